#pragma once

#include <ATen/native/cpu/AttnBackward.h>
#include <ATen/native/cpu/AttnFmaBackward.h>
#include <ATen/native/cpu/AttnFmaForward.h>
#include <ATen/native/cpu/AttnTiny.h>
#include <ATen/native/cpu/AttnVnniBackward.h>
#include <ATen/native/cpu/AttnVnniForward.h>

// Chooses the kernel by dtype and sizes: the first that fits. FMA fits all. See
// Note [Tiles of attn].

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// attn = tanh(q kᵀ), output = attn v
template <typename S>
void forward(const ForwardArgs<S>& args, const Runtime& runtime) {
  if (Tiny<S>::fits(args.sizes)) {
    return Tiny<S>::forward(args, runtime);
  }
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<S, at::BFloat16>) {
    if (Pairs::fits_forward(args.sizes) && Pairs::available()) {
      return forward_by<S, VnniForward<Pairs>>(args, runtime);
    }
  }
  if constexpr (!std::is_same_v<S, at::opmath_type<S>>) {
    if (Brgemm<S>::fits_forward(args.sizes) && Brgemm<S>::available()) {
      return forward_by<S, VnniForward<Brgemm<S>>>(args, runtime);
    }
  }
#endif
  forward_by<S, FmaForward<S>>(args, runtime);
}

// Computes the gradients of q, k and v.
template <typename S>
void backward(const BackwardArgs<S>& args, const Runtime& runtime) {
  if (Tiny<S>::fits(args.sizes)) {
    return Tiny<S>::backward(args, runtime);
  }
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<S, at::BFloat16>) {
    if (Pairs::fits_backward(args.sizes) && Pairs::available()) {
      return backward_by<S, VnniBackward<Pairs>>(args, runtime);
    }
  }
  if constexpr (!std::is_same_v<S, at::opmath_type<S>>) {
    if (Brgemm<S>::fits_backward(args.sizes) && Brgemm<S>::available()) {
      return backward_by<S, VnniBackward<Brgemm<S>>>(args, runtime);
    }
  }
#endif
  backward_by<S, FmaBackward<S>>(args, runtime);
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
