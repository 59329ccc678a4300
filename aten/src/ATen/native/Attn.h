#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>

#include <cstddef>

namespace at::native {

// Whether there are both products and tanh of this dtype: not of float8, float4
// and ComplexHalf, which are floating point or complex too.
inline bool is_attn_dtype(c10::ScalarType type) {
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

// Of one such dtype, on one device, and of the sizes q (*, m, d), k (*, n, d),
// v (*, n, e), where * is any number of batch dimensions, the same for all
// three. The sizes are those of one sample, which under vmap are not the
// tensors' own.
inline void check_attn_inputs(
    const Tensor& q_tensor,
    const Tensor& k_tensor,
    const Tensor& v_tensor,
    c10::SymIntArrayRef q,
    c10::SymIntArrayRef k,
    c10::SymIntArrayRef v) {
  const auto q_type = q_tensor.scalar_type();
  const auto k_type = k_tensor.scalar_type();
  const auto v_type = v_tensor.scalar_type();
  TORCH_CHECK(
      q_type == k_type && q_type == v_type,
      "attn: q, k and v must have the same dtype, but got q: ",
      q_type,
      ", k: ",
      k_type,
      ", v: ",
      v_type);
  TORCH_CHECK(
      is_attn_dtype(q_type),
      "attn: q, k and v must be floating point or complex (half, bfloat16, "
      "float, double, cfloat or cdouble), but got ",
      q_type);
  TORCH_CHECK(
      q_tensor.device() == k_tensor.device() &&
          q_tensor.device() == v_tensor.device(),
      "attn: q, k and v must be on the same device, but got q: ",
      q_tensor.device(),
      ", k: ",
      k_tensor.device(),
      ", v: ",
      v_tensor.device());
  TORCH_CHECK(
      q.size() >= 2 && k.size() >= 2 && v.size() >= 2,
      "attn: q, k and v must have at least 2 dimensions, but got q: ",
      q,
      ", k: ",
      k,
      ", v: ",
      v);
  TORCH_CHECK(
      q.size() == k.size() && q.size() == v.size(),
      "attn: q, k and v must have the same number of dimensions, but got q: ",
      q,
      ", k: ",
      k,
      ", v: ",
      v);
  const size_t batch = q.size() - 2;
  for (size_t i = 0; i < batch; ++i) {
    for (const auto& other : {k, v}) {
      TORCH_SYM_CHECK(
          q[i].sym_eq(other[i]),
          "attn: q (*, m, d), k (*, n, d) and v (*, n, e) must have the same "
          "batch dimensions *, but got q: ",
          q,
          ", k: ",
          k,
          ", v: ",
          v);
    }
  }
  TORCH_SYM_CHECK(
      q[batch + 1].sym_eq(k[batch + 1]),
      "attn: q (*, m, d) and k (*, n, d) must have the same d, but got q: ",
      q,
      ", k: ",
      k);
  TORCH_SYM_CHECK(
      k[batch].sym_eq(v[batch]),
      "attn: k (*, n, d) and v (*, n, e) must have the same n, but got k: ",
      k,
      ", v: ",
      v);
}

} // namespace at::native
