#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <array>
#include <optional>

namespace at::native {

// What a kernel of _attn_backward is given besides q, k, v and attn, and fills.
struct AttnGradients {
  Tensor grad_output, grad_attn; // undefined: zero
  Tensor grad_q, grad_k, grad_v; // contiguous; undefined: not wanted, or zero

  bool none_wanted() const {
    return !grad_q.defined() && !grad_k.defined() && !grad_v.defined();
  }
};

// Checks the arguments of _attn_backward, and allocates what it returns. Raises
// an error where q, k and v would have none, and for attn, or a gradient given,
// that is not as attn's result is.
TORCH_API AttnGradients empty_attn_gradients(
    const std::optional<Tensor>& grad_output,
    const std::optional<Tensor>& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 3> output_mask);

} // namespace at::native
