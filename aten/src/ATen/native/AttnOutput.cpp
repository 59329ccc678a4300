#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Attn.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_attn_output_backward_native.h>
#include <ATen/ops/_attn_output_double_backward_native.h>
#include <ATen/ops/_attn_output_jvp_native.h>
#include <ATen/ops/attn_output_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#endif

#include <array>
#include <optional>
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

// Returns those rows of x that some row of q sees: the others may hold
// anything, as the unused end of a cache does.
Tensor seen(const Tensor& x, const Tensor& q, bool is_causal) {
  return is_causal && x.defined() ? x.slice_symint(-2, 0, q.sym_size(-2)) : x;
}
// Returns the gradient of x for that of its rows that are seen.
Tensor of_all(const Tensor& grad, const Tensor& x) {
  if (!grad.defined() || grad.sym_size(-2) == x.sym_size(-2)) {
    return grad;
  }
  const auto unseen = x.slice_symint(-2, grad.sym_size(-2));
  return at::cat({grad, at::zeros_like(unseen)}, -2);
}

// x + y and x y, where an undefined tensor is zero.
Tensor add(const Tensor& x, const Tensor& y) {
  return x.defined() && y.defined() ? x.add(y) : (x.defined() ? x : y);
}
Tensor multiply(const Tensor& x, const Tensor& y) {
  return x.defined() && y.defined() ? x.matmul(y) : Tensor();
}

// The tangent of attn_output for tangents q', k' and v' of its inputs, and the
// gradients by q, k and v of <G, that tangent>. With attn as above, slope =
// scale (1 - attn²), or 0 above the diagonal if is_causal, and S̄ = (G vᴴ) ∘
// conj(slope):
//   attn' = slope ∘ (q' kᵀ + q k'ᵀ), output' = attn' v + attn v'
//   S̄' = (G v'ᴴ) ∘ conj(slope) - 2 scale (G vᴴ) ∘ conj(attn ∘ attn')
//   grad_q = S̄' conj(k) + S̄ conj(k'), grad_k = S̄'ᵀ conj(q) + S̄ᵀ conj(q')
//   grad_v = attn'ᴴ G
// These are the tangents of the gradients of <G, attn_output>: second
// derivatives don't depend on their order. What is undefined is zero.
std::tuple<Tensor, Tensor, Tensor, Tensor> second_order(
    const Tensor& grad_output,
    const Tensor& q,
    const Tensor& all_k,
    const Tensor& all_v,
    const Tensor& q_tangent,
    const Tensor& all_k_tangent,
    const Tensor& all_v_tangent,
    bool is_causal,
    double scale,
    std::array<bool, 4> output_mask) {
  const auto [needs_output, needs_q, needs_k, needs_v] = output_mask;
  const auto k = seen(all_k, q, is_causal), v = seen(all_v, q, is_causal);
  const auto k_tangent = seen(all_k_tangent, q, is_causal);
  const auto v_tangent = seen(all_v_tangent, q, is_causal);
  const auto attn = make_attn(q, k, is_causal, scale);
  auto slope = attn.mul(attn).mul_(-scale).add_(scale);
  if (is_causal) {
    slope.tril_();
  }
  auto attn_tangent =
      add(multiply(q_tangent, k.mT()),
          k_tangent.defined() ? q.matmul(k_tangent.mT()) : Tensor());
  if (attn_tangent.defined()) {
    attn_tangent = attn_tangent.mul(slope);
  }
  Tensor output_tangent, grad_q, grad_k, grad_v;
  if (needs_output) {
    output_tangent = add(multiply(attn_tangent, v), multiply(attn, v_tangent));
  }
  if (needs_q || needs_k) {
    const auto grad_attn = grad_output.matmul(v.mH());
    const auto scores = grad_attn.mul(slope.conj());
    Tensor scores_tangent;
    if (v_tangent.defined()) {
      scores_tangent = grad_output.matmul(v_tangent.mH()).mul(slope.conj());
    }
    if (attn_tangent.defined()) {
      scores_tangent =
          add(scores_tangent,
              grad_attn.mul(attn.mul(attn_tangent).mul(-2 * scale).conj()));
    }
    if (needs_q) {
      grad_q = multiply(scores_tangent, k.conj());
      if (k_tangent.defined()) {
        grad_q = add(grad_q, scores.matmul(k_tangent.conj()));
      }
    }
    if (needs_k && scores_tangent.defined()) {
      grad_k = scores_tangent.mT().matmul(q.conj());
      if (q_tangent.defined()) {
        grad_k = grad_k.add(scores.mT().matmul(q_tangent.conj()));
      }
      grad_k = at::sum_to(grad_k, k.sym_sizes());
    }
  }
  if (needs_v && attn_tangent.defined()) {
    grad_v = at::sum_to(attn_tangent.mH().matmul(grad_output), v.sym_sizes());
  }
  return std::make_tuple(
      std::move(output_tangent),
      std::move(grad_q),
      of_all(grad_k, all_k),
      of_all(grad_v, all_v));
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
  const auto attn = make_attn(q, seen(k, q, is_causal), is_causal, scale);
  return at::matmul(attn, seen(v, q, is_causal));
}

// The backward of attn_output for the gradient G of its result. With attn as
// above and S̄ = scale (G vᴴ) ∘ conj(1 - attn²), or 0 above the diagonal:
//   grad_q = S̄ conj(k), grad_k = S̄ᵀ conj(q), grad_v = attnᴴ G
// Those of k and v are sums over the samples that share them. A gradient that
// output_mask leaves out comes back undefined.
std::tuple<Tensor, Tensor, Tensor> _attn_output_backward(
    const Tensor& grad_output,
    const Tensor& q,
    const Tensor& all_k,
    const Tensor& all_v,
    bool is_causal,
    double scale,
    std::array<bool, 3> output_mask) {
  check_attn_output_backward_inputs(grad_output, q, all_k, all_v);
  const auto k = seen(all_k, q, is_causal), v = seen(all_v, q, is_causal);
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
      std::move(grad_q), of_all(grad_k, all_k), of_all(grad_v, all_v));
}

// Returns output' of `second_order`.
Tensor _attn_output_jvp(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const std::optional<Tensor>& q_tangent,
    const std::optional<Tensor>& k_tangent,
    const std::optional<Tensor>& v_tangent,
    bool is_causal,
    double scale) {
  const Tensor q_t = q_tangent.value_or(Tensor()),
               k_t = k_tangent.value_or(Tensor()),
               v_t = v_tangent.value_or(Tensor());
  check_attn_output_tangents("_attn_output_jvp", q, k, v, q_t, k_t, v_t);
  auto output = std::get<0>(second_order(
      {},
      q,
      k,
      v,
      q_t,
      k_t,
      v_t,
      is_causal,
      scale,
      {true, false, false, false}));
  if (!output.defined()) {
    c10::SymDimVector sizes(q.sym_sizes().begin(), q.sym_sizes().end());
    sizes.back() = v.sym_size(-1);
    output = at::zeros_symint(sizes, q.options());
  }
  return output;
}

// Returns all of `second_order`. A gradient that output_mask leaves out, or
// that is zero because of what is undefined, comes back undefined.
std::tuple<Tensor, Tensor, Tensor, Tensor> _attn_output_double_backward(
    const Tensor& grad_output,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const std::optional<Tensor>& q_tangent,
    const std::optional<Tensor>& k_tangent,
    const std::optional<Tensor>& v_tangent,
    bool is_causal,
    double scale,
    std::array<bool, 4> output_mask) {
  const Tensor q_t = q_tangent.value_or(Tensor()),
               k_t = k_tangent.value_or(Tensor()),
               v_t = v_tangent.value_or(Tensor());
  const char* op = "_attn_output_double_backward";
  check_attn_output_tangents(op, q, k, v, q_t, k_t, v_t, grad_output);
  return second_order(
      grad_output, q, k, v, q_t, k_t, v_t, is_causal, scale, output_mask);
}

} // namespace at::native
