// The operators of linear_extension, and what their kernels share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>
#include <tuple>

namespace linear_extension {

// For X (N, i), W (o, i), b (o) and the gradient G (N, o) of Y = X W^T + b.
inline void check_product(
    const char* op, const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(
      a.dim() == 2 && b.dim() == 2,
      op,
      ": wants matrices, not ",
      a.sizes(),
      " and ",
      b.sizes());
  TORCH_CHECK(
      a.scalar_type() == b.scalar_type(),
      op,
      ": the dtypes differ: ",
      a.scalar_type(),
      " and ",
      b.scalar_type());
  TORCH_CHECK(
      a.device() == b.device(),
      op,
      ": the devices differ: ",
      a.device(),
      " and ",
      b.device());
}

inline void check_linear(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias) {
  check_product("linear", input, weight);
  TORCH_CHECK(
      input.size(1) == weight.size(1),
      "linear: input (N, i) and weight (o, i) must have the same i, not ",
      input.sizes(),
      " and ",
      weight.sizes());
  if (bias) {
    TORCH_CHECK(
        bias->dim() == 1 && bias->size(0) == weight.size(0),
        "linear: bias (o) must fit weight (o, i), not ",
        bias->sizes(),
        " and ",
        weight.sizes());
    TORCH_CHECK(
        bias->scalar_type() == input.scalar_type() &&
            bias->device() == input.device(),
        "linear: bias must have the dtype and the device of input");
  }
}

inline void check_backward_input(
    const at::Tensor& grad, const at::Tensor& weight) {
  check_product("linear_backward_input", grad, weight);
  TORCH_CHECK(
      grad.size(1) == weight.size(0),
      "linear_backward_input: grad (N, o) and weight (o, i) must have the same "
      "o, not ",
      grad.sizes(),
      " and ",
      weight.sizes());
}

inline void check_backward_weight(
    const at::Tensor& grad, const at::Tensor& input) {
  check_product("linear_backward_weight", grad, input);
  TORCH_CHECK(
      grad.size(0) == input.size(0),
      "linear_backward_weight: grad (N, o) and input (N, i) must have the same "
      "N, not ",
      grad.sizes(),
      " and ",
      input.sizes());
}

} // namespace linear_extension
