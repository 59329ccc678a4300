#pragma once

#include <ATen/native/cpu/AttnFmaForward.h>

// Which kernel computes attn, by its dtype and sizes. The first that fits;
// FMA's fit all. See Note [Tiles of attn].

namespace at::native {
inline namespace CPU_CAPABILITY {

template <typename ForwardKernel>
struct AttnKernels {
  using Forward = ForwardKernel;
};

// fn(the kernels for these sizes)
template <typename S, typename F>
void with_attn_kernels(const AttnSizes& /*sizes*/, const F& fn) {
  fn(AttnKernels<FmaForward<S>>());
}

} // namespace CPU_CAPABILITY
} // namespace at::native
