#pragma once

#include <ATen/native/cpu/AttnBackward.h>
#include <ATen/native/cpu/AttnBrgemmBackward.h>
#include <ATen/native/cpu/AttnBrgemmForward.h>
#include <ATen/native/cpu/AttnFmaBackward.h>
#include <ATen/native/cpu/AttnFmaForward.h>

// Chooses the kernel by dtype and sizes: the first that fits. FMA fits all. See
// Note [Tiles of attn].

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// attn = tanh(q kᵀ), output = attn v
template <typename S>
void forward(const ForwardArgs<S>& args, const Runtime& runtime) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (!std::is_same_v<S, at::opmath_type<S>>) {
    if (BrgemmProducts<S>::fits(args.sizes, runtime)) {
      return forward_by<S, BrgemmForward<S>>(args, runtime);
    }
  }
#endif
  forward_by<S, FmaForward<S>>(args, runtime);
}

// Computes the gradients of q, k and v.
template <typename S>
void backward(const BackwardArgs<S>& args, const Runtime& runtime) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (!std::is_same_v<S, at::opmath_type<S>>) {
    if (args.sizes.m > BrgemmProducts<S>::FEW_ROWS &&
        BrgemmProducts<S>::fits(args.sizes, runtime)) {
      return backward_by<S, BrgemmBackward<S>>(args, runtime);
    }
  }
#endif
  backward_by<S, FmaBackward<S>>(args, runtime);
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
