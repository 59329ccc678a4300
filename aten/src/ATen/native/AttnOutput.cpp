#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Attn.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_attn_output_backward_native.h>
#include <ATen/ops/attn_output_native.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tanh_backward.h>
#endif

#include <array>
#include <tuple>

namespace at::native {

namespace {

// attn = tanh(scale q kᵀ), or 0 above the diagonal if is_causal
Tensor make_attn(
    const Tensor& q, const Tensor& k, bool is_causal, double scale) {
  auto attn = at::matmul(q, k.mT());
  if (scale != 1) {
    attn.mul_(scale);
  }
  attn.tanh_();
  return is_causal ? attn.tril_() : attn;
}

} // namespace

// output = attn v, with attn = tanh(scale q kᵀ), or 0 above the diagonal if
// is_causal
Tensor attn_output(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale) {
  check_attn_output_inputs(q, k, v);
  return at::matmul(make_attn(q, k, is_causal, scale), v);
}

// The backward of attn_output for the gradient G of its result. With attn as
// above and S̄ = scale (G vᴴ) ∘ conj(1 - attn²), or 0 above the diagonal:
//   grad_q = S̄ conj(k), grad_k = S̄ᵀ conj(q), grad_v = attnᴴ G
// Those of k and v are sums over the samples that share them. A gradient that
// output_mask leaves out comes back undefined.
std::tuple<Tensor, Tensor, Tensor> _attn_output_backward(
    const Tensor& grad_output,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale,
    std::array<bool, 3> output_mask) {
  check_attn_output_backward_inputs(grad_output, q, k, v);
  const auto attn = make_attn(q, k, is_causal, scale);
  Tensor grad_q, grad_k, grad_v;
  if (output_mask[0] || output_mask[1]) {
    auto grad_scores = at::matmul(grad_output, v.mH());
    at::tanh_backward_out(grad_scores, grad_scores, attn);
    if (scale != 1) {
      grad_scores.mul_(scale);
    }
    if (is_causal) {
      grad_scores.tril_();
    }
    if (output_mask[0]) {
      grad_q = at::matmul(grad_scores, k.conj());
    }
    if (output_mask[1]) {
      grad_k =
          at::sum_to(at::matmul(grad_scores.mT(), q.conj()), k.sym_sizes());
    }
  }
  if (output_mask[2]) {
    grad_v = at::sum_to(at::matmul(attn.mH(), grad_output), v.sym_sizes());
  }
  return std::make_tuple(
      std::move(grad_q), std::move(grad_k), std::move(grad_v));
}

} // namespace at::native
