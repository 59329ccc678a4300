#pragma once

#include <ATen/native/cpu/AttnBrgemm.h>
#include <ATen/native/cpu/AttnFmaBackward.h>
#include <ATen/native/cpu/AttnFmaForward.h>

// Which kernel computes attn, by its dtype and sizes. The first that fits;
// FMA's fit all. See Note [Tiles of attn].

namespace at::native {
inline namespace CPU_CAPABILITY {

template <typename ForwardKernel, typename BackwardKernel>
struct AttnKernels {
  using Forward = ForwardKernel;
  using Backward = BackwardKernel;
};

// fn(the kernels for these sizes)
template <typename S, typename F>
void with_attn_kernels(const AttnSizes& sizes, const F& fn) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (!std::is_same_v<S, at::opmath_type<S>>) {
    if (AttnBrgemm<S>::fits(sizes)) {
      return sizes.m > AttnBrgemm<S>::FEW_ROWS
                 ? fn(AttnKernels<BrgemmForward<S>, BrgemmBackward<S>>())
                 : fn(AttnKernels<BrgemmForward<S>, FmaBackward<S>>());
    }
  }
#endif
  fn(AttnKernels<FmaForward<S>, FmaBackward<S>>());
}

} // namespace CPU_CAPABILITY
} // namespace at::native
