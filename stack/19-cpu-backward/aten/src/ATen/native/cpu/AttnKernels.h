#pragma once

#include <ATen/native/cpu/AttnBackward.h>
#include <ATen/native/cpu/AttnFmaBackward.h>
#include <ATen/native/cpu/AttnFmaForward.h>

// Chooses the kernel by dtype and sizes: the first that fits. FMA fits all. See
// Note [Tiles of attn].

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// attn = tanh(q kᵀ), output = attn v
template <typename S>
void forward(const ForwardArgs<S>& args, const Runtime& runtime) {
  forward_by<S, FmaForward<S>>(args, runtime);
}

// Computes the gradients of q, k and v.
template <typename S>
void backward(const BackwardArgs<S>& args, const Runtime& runtime) {
  backward_by<S, FmaBackward<S>>(args, runtime);
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
