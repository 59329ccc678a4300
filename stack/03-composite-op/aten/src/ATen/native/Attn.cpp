#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/Attn.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/attn_native.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tanh.h>
#endif

#include <cstddef>
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

} // namespace

void check_attn_inputs(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    c10::SymIntArrayRef q_sizes,
    c10::SymIntArrayRef k_sizes,
    c10::SymIntArrayRef v_sizes) {
  const auto q_type = q.scalar_type();
  const auto k_type = k.scalar_type();
  const auto v_type = v.scalar_type();
  TORCH_CHECK(
      q_type == k_type && q_type == v_type,
      "attn: q, k and v must have the same dtype, but got q: ",
      dtype_name(q),
      ", k: ",
      dtype_name(k),
      ", v: ",
      dtype_name(v));
  TORCH_CHECK(
      is_attn_dtype(q_type),
      "attn: q, k and v must be floating point or complex (half, bfloat16, "
      "float, double, cfloat or cdouble), but got ",
      dtype_name(q));
  TORCH_CHECK(
      !q.is_mkldnn() && !k.is_mkldnn() && !v.is_mkldnn(),
      "attn: q, k and v must not be mkldnn tensors: convert them by "
      "to_dense()");
  TORCH_CHECK(
      q.device() == k.device() && q.device() == v.device(),
      "attn: q, k and v must be on the same device, but got q: ",
      q.device(),
      ", k: ",
      k.device(),
      ", v: ",
      v.device());
  TORCH_CHECK(
      q_sizes.size() >= 2 && k_sizes.size() >= 2 && v_sizes.size() >= 2,
      "attn: q, k and v must have at least 2 dimensions, but got q: ",
      q_sizes,
      ", k: ",
      k_sizes,
      ", v: ",
      v_sizes);
  TORCH_CHECK(
      q_sizes.size() == k_sizes.size() && q_sizes.size() == v_sizes.size(),
      "attn: q, k and v must have the same number of dimensions, but got q: ",
      q_sizes,
      ", k: ",
      k_sizes,
      ", v: ",
      v_sizes);
  const size_t batch = q_sizes.size() - 2;
  for (size_t i = 0; i < batch; ++i) {
    for (const auto& other : {k_sizes, v_sizes}) {
      TORCH_SYM_CHECK(
          q_sizes[i].sym_eq(other[i]),
          "attn: q (*, m, d), k (*, n, d) and v (*, n, e) must have the same "
          "batch dimensions *, but got q: ",
          q_sizes,
          ", k: ",
          k_sizes,
          ", v: ",
          v_sizes);
    }
  }
  TORCH_SYM_CHECK(
      q_sizes[batch + 1].sym_eq(k_sizes[batch + 1]),
      "attn: q (*, m, d) and k (*, n, d) must have the same d, but got q: ",
      q_sizes,
      ", k: ",
      k_sizes);
  TORCH_SYM_CHECK(
      k_sizes[batch].sym_eq(v_sizes[batch]),
      "attn: k (*, n, d) and v (*, n, e) must have the same n, but got k: ",
      k_sizes,
      ", v: ",
      v_sizes);
}

// attn = tanh(q kᵀ), output = attn v
std::tuple<Tensor, Tensor> attn(
    const Tensor& q, const Tensor& k, const Tensor& v) {
  check_attn_inputs(q, k, v, q.sym_sizes(), k.sym_sizes(), v.sym_sizes());
  auto attn = at::tanh(at::matmul(q, k.mT()));
  auto output = at::matmul(attn, v);
  return std::make_tuple(std::move(output), std::move(attn));
}

} // namespace at::native
