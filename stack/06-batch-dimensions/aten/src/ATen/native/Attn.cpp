#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/Attn.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_attn_backward_native.h>
#include <ATen/ops/attn_native.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tanh_backward.h>
#endif

#include <array>
#include <optional>
#include <tuple>

namespace at::native {

// attn = tanh(q kᵀ), output = attn v
std::tuple<Tensor, Tensor> attn(
    const Tensor& q, const Tensor& k, const Tensor& v) {
  check_attn_inputs(q, k, v, q.sym_sizes(), k.sym_sizes(), v.sym_sizes());
  auto attn = at::matmul(q, k.mT()).tanh_();
  auto output = at::matmul(attn, v);
  return std::make_tuple(std::move(output), std::move(attn));
}

// Backward of attn for the gradients of both its outputs, G_o of output and G_a
// of attn, either of which may be undefined, that is zero. With S̄ = (G_o vᴴ +
// G_a) ∘ conj(1 - attn²):
//   grad_q = S̄ conj(k), grad_k = S̄ᵀ conj(q), grad_v = attnᴴ G_o
// A gradient that output_mask leaves out, or that is zero, comes back
// undefined.
std::tuple<Tensor, Tensor, Tensor> _attn_backward(
    const std::optional<Tensor>& grad_output_opt,
    const std::optional<Tensor>& grad_attn_opt,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 3> output_mask) {
  check_attn_inputs(q, k, v, q.sym_sizes(), k.sym_sizes(), v.sym_sizes());
  const Tensor grad_output = grad_output_opt.value_or(Tensor());
  const Tensor grad_attn = grad_attn_opt.value_or(Tensor());
  Tensor grad_q, grad_k, grad_v;

  if ((output_mask[0] || output_mask[1]) &&
      (grad_output.defined() || grad_attn.defined())) {
    Tensor grad = grad_attn;
    if (grad_output.defined()) {
      grad = at::matmul(grad_output, v.mH());
      if (grad_attn.defined()) {
        grad = grad.add(grad_attn);
      }
    }
    const Tensor grad_scores = at::tanh_backward(grad, attn);
    if (output_mask[0]) {
      grad_q = at::matmul(grad_scores, k.conj());
    }
    if (output_mask[1]) {
      grad_k = at::matmul(grad_scores.mT(), q.conj());
    }
  }
  if (output_mask[2] && grad_output.defined()) {
    grad_v = at::matmul(attn.mH(), grad_output);
  }
  return std::make_tuple(
      std::move(grad_q), std::move(grad_k), std::move(grad_v));
}

} // namespace at::native
