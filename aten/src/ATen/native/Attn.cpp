#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/Attn.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymBool.h>
#include <c10/core/SymInt.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_attn_backward_native.h>
#include <ATen/ops/attn_native.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tanh_backward.h>
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <tuple>

namespace at::native {

namespace {

// Whether there are both products and tanh of this dtype: not of float8, float4
// and ComplexHalf, which are floating point or complex too.
bool is_attn_dtype(c10::ScalarType type) {
  switch (type) {
    case kHalf:
    case kBFloat16:
    case kFloat:
    case kDouble:
    case kComplexFloat:
    case kComplexDouble:
      return true;
    default:
      return false;
  }
}

// The dtype's name in Python, where meta functions print it too.
std::string dtype_name(const Tensor& x) {
  return c10::str("torch.", c10::getDtypeNames(x.scalar_type()).first);
}

// A result of attn, its gradient, or a tangent of q: as q is, but for the last
// size.
void check_attn_result(
    const char* op,
    const char* name,
    const Tensor& x,
    const Tensor& q,
    const c10::SymInt& cols) {
  if (!x.defined()) {
    return;
  }
  c10::SymDimVector sizes(q.sym_sizes().begin(), q.sym_sizes().end());
  sizes.back() = cols;
  const auto found = x.sym_sizes();
  c10::SymBool right = x.scalar_type() == q.scalar_type() &&
                       x.device() == q.device() && found.size() == sizes.size();
  for (size_t i = 0; i < std::min(found.size(), sizes.size()); ++i) {
    right = right.sym_and(found[i].sym_eq(sizes[i]));
  }
  TORCH_SYM_CHECK(
      right,
      op,
      ": ",
      name,
      " must be ",
      dtype_name(q),
      " of sizes ",
      c10::SymIntArrayRef(sizes),
      " on ",
      q.device(),
      ", but got ",
      dtype_name(x),
      " of sizes ",
      found,
      " on ",
      x.device());
}

} // namespace

void check_attn_inputs(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    c10::SymIntArrayRef q_sizes,
    c10::SymIntArrayRef k_sizes,
    c10::SymIntArrayRef v_sizes,
    const char* op,
    bool grouped) {
  const auto q_type = q.scalar_type();
  const auto k_type = k.scalar_type();
  const auto v_type = v.scalar_type();
  TORCH_CHECK(
      q_type == k_type && q_type == v_type,
      op,
      ": q, k and v must have the same dtype, but got q: ",
      dtype_name(q),
      ", k: ",
      dtype_name(k),
      ", v: ",
      dtype_name(v));
  TORCH_CHECK(
      is_attn_dtype(q_type),
      op,
      ": q, k and v must be floating point or complex (half, bfloat16, "
      "float, double, cfloat or cdouble), but got ",
      dtype_name(q));
  TORCH_CHECK(
      !q.is_mkldnn() && !k.is_mkldnn() && !v.is_mkldnn(),
      op,
      ": q, k and v must not be mkldnn tensors: convert them by "
      "to_dense()");
  TORCH_CHECK(
      q.device() == k.device() && q.device() == v.device(),
      op,
      ": q, k and v must be on the same device, but got q: ",
      q.device(),
      ", k: ",
      k.device(),
      ", v: ",
      v.device());
  TORCH_CHECK(
      q_sizes.size() >= 2 && k_sizes.size() >= 2 && v_sizes.size() >= 2,
      op,
      ": q, k and v must have at least 2 dimensions, but got q: ",
      q_sizes,
      ", k: ",
      k_sizes,
      ", v: ",
      v_sizes);
  TORCH_CHECK(
      q_sizes.size() == k_sizes.size() && q_sizes.size() == v_sizes.size(),
      op,
      ": q, k and v must have the same number of dimensions, but got q: ",
      q_sizes,
      ", k: ",
      k_sizes,
      ", v: ",
      v_sizes);
  const size_t batch = q_sizes.size() - 2;
  for (size_t i = 0; i < batch; ++i) {
    auto same = q_sizes[i].sym_eq(k_sizes[i]);
    if (grouped) {
      same = same.sym_or(k_sizes[i].sym_eq(1));
    }
    const auto& first = grouped ? k_sizes[i] : q_sizes[i];
    for (const auto& holds : {same, first.sym_eq(v_sizes[i])}) {
      TORCH_SYM_CHECK(
          holds,
          op,
          ": q (*, m, d), k (*, n, d) and v (*, n, e) must have the same batch "
          "dimensions *",
          grouped ? ", or k and v 1 in place of some" : "",
          ", but got q: ",
          q_sizes,
          ", k: ",
          k_sizes,
          ", v: ",
          v_sizes);
    }
  }
  TORCH_SYM_CHECK(
      q_sizes[batch + 1].sym_eq(k_sizes[batch + 1]),
      op,
      ": q (*, m, d) and k (*, n, d) must have the same d, but got q: ",
      q_sizes,
      ", k: ",
      k_sizes);
  TORCH_SYM_CHECK(
      k_sizes[batch].sym_eq(v_sizes[batch]),
      op,
      ": k (*, n, d) and v (*, n, e) must have the same n, but got k: ",
      k_sizes,
      ", v: ",
      v_sizes);
}

void check_attn_backward_inputs(
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn) {
  check_attn_inputs(q, k, v, q.sym_sizes(), k.sym_sizes(), v.sym_sizes());
  const char* op = "_attn_backward";
  check_attn_result(op, "attn", attn, q, k.sym_size(-2));
  check_attn_result(op, "grad_attn", grad_attn, q, k.sym_size(-2));
  check_attn_result(op, "grad_output", grad_output, q, v.sym_size(-1));
}

void check_attn_output_inputs(
    const Tensor& q, const Tensor& k, const Tensor& v) {
  check_attn_inputs(
      q,
      k,
      v,
      q.sym_sizes(),
      k.sym_sizes(),
      v.sym_sizes(),
      "attn_output",
      /*grouped=*/true);
}

void check_attn_output_backward_inputs(
    const Tensor& grad_output,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v) {
  check_attn_output_inputs(q, k, v);
  const char* op = "_attn_output_backward";
  check_attn_result(op, "grad_output", grad_output, q, v.sym_size(-1));
}

void check_attn_output_tangents(
    const char* op,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& q_tangent,
    const Tensor& k_tangent,
    const Tensor& v_tangent,
    const Tensor& grad_output,
    std::array<const char*, 4> names) {
  check_attn_output_inputs(q, k, v);
  check_attn_result(op, names[0], q_tangent, q, q.sym_size(-1));
  check_attn_result(op, names[1], k_tangent, k, k.sym_size(-1));
  check_attn_result(op, names[2], v_tangent, v, v.sym_size(-1));
  check_attn_result(op, names[3], grad_output, q, v.sym_size(-1));
}

void check_attn_output_triple_backward_inputs(
    const AttnJet& grad_output,
    const AttnJet& q,
    const AttnJet& k,
    const AttnJet& v) {
  const char* op = "_attn_output_triple_backward";
  const auto check = [&](size_t tangents,
                         const Tensor& grad,
                         std::array<const char*, 4> names) {
    check_attn_output_tangents(
        op,
        q[0],
        k[0],
        v[0],
        q[tangents],
        k[tangents],
        v[tangents],
        grad,
        names);
  };
  check(1, grad_output[0], {"u_q", "u_k", "u_v", "grad_output"});
  check(2, grad_output[2], {"w_q", "w_k", "w_v", "w_grad_output"});
}

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
  const Tensor grad_output = grad_output_opt.value_or(Tensor());
  const Tensor grad_attn = grad_attn_opt.value_or(Tensor());
  check_attn_backward_inputs(grad_output, grad_attn, q, k, v, attn);
  Tensor grad_q, grad_k, grad_v;

  if ((output_mask[0] || output_mask[1]) &&
      (grad_output.defined() || grad_attn.defined())) {
    Tensor grad_scores;
    if (grad_output.defined()) {
      grad_scores = at::matmul(grad_output, v.mH());
      if (grad_attn.defined()) {
        grad_scores.add_(grad_attn);
      }
      at::tanh_backward_out(grad_scores, grad_scores, attn);
    } else {
      grad_scores = at::tanh_backward(grad_attn, attn);
    }
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
