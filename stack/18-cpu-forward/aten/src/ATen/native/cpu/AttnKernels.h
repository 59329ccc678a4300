#pragma once

#include <ATen/native/cpu/AttnFmaForward.h>
#include <ATen/native/cpu/AttnForward.h>

// Chooses the kernel by dtype and sizes: the first that fits. FMA fits all. See
// Note [Tiles of attn].

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// attn = tanh(q kᵀ), output = attn v
template <typename S>
void forward(const ForwardArgs<S>& args, const Runtime& runtime) {
  forward_by<S, FmaForward<S>>(args, runtime);
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
