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
#include <ATen/ops/_attn_output_triple_backward_native.h>
#include <ATen/ops/attn_output_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#endif

#include <array>
#include <cstddef>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <utility>

namespace at::native {

namespace {

// attn = tanh(scale q kᵀ), or 0 above the diagonal if is_causal
Tensor make_attn(
    const Tensor& q, const Tensor& k, bool is_causal, double scale) {
  auto attn = at::matmul(q, k.mT());
  if (scale != 1) {
    attn.mul_(scale);
  }
  if (is_causal) {
    attn.tril_();
  }
  return attn.tanh_();
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

// x + y, where an undefined tensor is zero.
Tensor add(const Tensor& x, const Tensor& y) {
  return x.defined() && y.defined() ? x.add(y) : (x.defined() ? x : y);
}

// The derivative of a product along a set of directions: the sum of x_T y_R
// over the ways to divide the set into T and R.
template <typename F>
Tensor product(
    const AttnJet& x, const AttnJet& y, size_t set, const F& multiply) {
  Tensor sum;
  for (size_t t = set;; t = (t - 1) & set) {
    if (x[t].defined() && y[set - t].defined()) {
      sum = add(sum, multiply(x[t], y[set - t]));
    }
    if (t == 0) {
      return sum;
    }
  }
}

Tensor multiply(const Tensor& x, const Tensor& y) {
  return x.mul(y);
}

// The jet of a linear function of x.
AttnJet each(const AttnJet& x, Tensor (Tensor::*function)() const) {
  AttnJet result(x.size());
  for (size_t set = 0; set < x.size(); ++set) {
    result[set] = x[set].defined() ? (x[set].*function)() : x[set];
  }
  return result;
}

// The jet of the derivative of x along a direction, for sets without it.
AttnJet along(const AttnJet& x, size_t direction) {
  AttnJet result(x.size());
  for (size_t set = 0; set < x.size(); ++set) {
    result[set] = x[set | direction];
  }
  return result;
}

// The jet of an input: the derivative along each direction by itself. It is
// linear, so there are no others.
AttnJet jet(const Tensor& x, std::initializer_list<Tensor> tangents) {
  AttnJet result(size_t(1) << tangents.size());
  result[0] = x;
  size_t set = 1;
  for (const auto& tangent : tangents) {
    result[set] = tangent;
    set *= 2;
  }
  return result;
}

} // namespace

// With X = q kᵀ, attn = tanh(scale X), slope = scale (1 - attn²), P = G vᴴ and
// S̄ = P ∘ conj(slope), attn and slope being 0 above the diagonal if is_causal,
// the results are derivatives of
//   attn v, S̄ conj(k), S̄ᵀ conj(q), attnᴴ G
// The derivative of a product is a sum of products; those of attn and slope
// along a direction i are
//   attn_i = slope ∘ X_i, slope_i = -2 scale attn ∘ attn_i
std::array<Tensor, 4> attn_output_derivatives(
    const AttnJet& grad_output,
    const AttnJet& q,
    const AttnJet& all_k,
    const AttnJet& all_v,
    bool is_causal,
    double scale,
    std::array<bool, 4> output_mask) {
  const auto [needs_output, needs_q, needs_k, needs_v] = output_mask;
  const bool needs_scores = needs_q || needs_k;
  const auto sets = q.size(), all = sets - 1;
  AttnJet k(sets), v(sets), x(sets), attn(sets), slope(sets), scores(sets);
  for (size_t set = 0; set < sets; ++set) {
    k[set] = seen(all_k[set], q[0], is_causal);
    v[set] = seen(all_v[set], q[0], is_causal);
  }
  const auto k_t = each(k, &Tensor::mT);
  attn[0] = make_attn(q[0], k[0], is_causal, scale);
  slope[0] = attn[0].mul(attn[0]).mul_(-scale).add_(scale);
  if (is_causal) {
    slope[0].tril_();
  }
  for (size_t set = 1; set < sets; ++set) {
    x[set] = product(q, k_t, set, at::matmul);
    const auto i = set & (~set + 1), others = set - i;
    attn[set] = product(slope, along(x, i), others, multiply);
    if (set != all || needs_scores) {
      const auto half = product(attn, along(attn, i), others, multiply);
      slope[set] = half.defined() ? half.mul(-2 * scale) : half;
    }
  }
  if (needs_scores) {
    const auto v_h = each(v, &Tensor::mH);
    const auto slope_conj = each(slope, &Tensor::conj);
    AttnJet p(sets);
    for (size_t set = 0; set < sets; ++set) {
      p[set] = product(grad_output, v_h, set, at::matmul);
      scores[set] = product(p, slope_conj, set, multiply);
    }
  }

  std::array<Tensor, 4> results;
  if (needs_output) {
    results[0] = product(attn, v, all, at::matmul);
  }
  if (needs_q) {
    results[1] = product(scores, each(k, &Tensor::conj), all, at::matmul);
  }
  if (needs_k) {
    const auto scores_t = each(scores, &Tensor::mT);
    results[2] = product(scores_t, each(q, &Tensor::conj), all, at::matmul);
  }
  if (needs_v) {
    results[3] = product(each(attn, &Tensor::mH), grad_output, all, at::matmul);
  }
  for (const auto& [i, y] : {std::pair(2, all_k[0]), {3, all_v[0]}}) {
    if (results[i].defined()) {
      const auto like = seen(y, q[0], is_causal);
      results[i] = of_all(at::sum_to(results[i], like.sym_sizes()), y);
    }
  }
  return results;
}

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

// The derivative of attn_output along tangents of its inputs. What is undefined
// is zero.
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
  auto output = attn_output_derivatives(
      AttnJet(2),
      jet(q, {q_t}),
      jet(k, {k_t}),
      jet(v, {v_t}),
      is_causal,
      scale,
      {true, false, false, false})[0];
  if (!output.defined()) {
    c10::SymDimVector sizes(q.sym_sizes().begin(), q.sym_sizes().end());
    sizes.back() = v.sym_size(-1);
    output = at::zeros_symint(sizes, q.options());
  }
  return output;
}

// The derivative of attn_output along tangents of its inputs, and those of the
// gradients of <grad_output, attn_output> by q, k and v. A result that
// output_mask leaves out, or that is zero because of what is undefined, comes
// back undefined.
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
  return std::tuple_cat(attn_output_derivatives(
      jet(grad_output, {Tensor()}),
      jet(q, {q_t}),
      jet(k, {k_t}),
      jet(v, {v_t}),
      is_causal,
      scale,
      output_mask));
}

// The second derivatives of attn_output and of its gradients, along tangents u
// and w of the inputs; w may have a tangent of grad_output as well. A tensor
// that is undefined is zero, and a result that is zero because of that comes
// back undefined.
std::tuple<Tensor, Tensor, Tensor, Tensor> _attn_output_triple_backward(
    const std::optional<Tensor>& grad_output,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const std::optional<Tensor>& u_q,
    const std::optional<Tensor>& u_k,
    const std::optional<Tensor>& u_v,
    const std::optional<Tensor>& w_grad_output,
    const std::optional<Tensor>& w_q,
    const std::optional<Tensor>& w_k,
    const std::optional<Tensor>& w_v,
    bool is_causal,
    double scale,
    std::array<bool, 4> output_mask) {
  const auto given = [](const std::optional<Tensor>& x) {
    return x.value_or(Tensor());
  };
  const auto grads = jet(given(grad_output), {Tensor(), given(w_grad_output)}),
             qs = jet(q, {given(u_q), given(w_q)}),
             ks = jet(k, {given(u_k), given(w_k)}),
             vs = jet(v, {given(u_v), given(w_v)});
  check_attn_output_triple_backward_inputs(grads, qs, ks, vs);
  return std::tuple_cat(attn_output_derivatives(
      grads, qs, ks, vs, is_causal, scale, output_mask));
}

} // namespace at::native
