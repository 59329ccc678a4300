#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/Attn.h>
#include <ATen/native/AttnSharedBatch.h>
#include <ATen/native/cpu/AttnKernel.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/attn_native.h>
#include <ATen/ops/attn_output_native.h>
#include <ATen/ops/empty.h>
#endif

#include <algorithm>
#include <tuple>

namespace at::native {

DEFINE_DISPATCH(attn_stub);

bool has_attn_kernel(const Tensor& q, const Tensor& v) {
  return isFloatingType(q.scalar_type()) && q.dim() > 0 && v.dim() > 0 &&
         std::max(q.size(-1), v.size(-1)) <= ATTN_MAX_WIDTH;
}

// attn = tanh(q kᵀ), output = attn v, by the CPU's kernel or composed.
std::tuple<Tensor, Tensor> attn_cpu(
    const Tensor& q, const Tensor& k, const Tensor& v) {
  if (!has_attn_kernel(q, v)) {
    return native::attn(q, k, v);
  }
  check_attn_inputs(q, k, v, q.sym_sizes(), k.sym_sizes(), v.sym_sizes());
  DimVector sizes(q.sizes());
  sizes.back() = v.size(-1);
  auto output = at::empty(sizes, q.options());
  sizes.back() = k.size(-2);
  auto attn = at::empty(sizes, q.options());
  attn_stub(kCPU, output, attn, q, k, v, false, 1.0);
  return std::make_tuple(std::move(output), std::move(attn));
}

// output = attn v, with attn = tanh(scale q kᵀ), or 0 above the diagonal if
// is_causal: by the CPU's kernel, which never has all of attn, or composed.
Tensor attn_output_cpu(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale) {
  if (!has_attn_kernel(q, v)) {
    return native::attn_output(q, k, v, is_causal, scale);
  }
  check_attn_output_inputs(q, k, v);
  c10::DimVector sizes(q.sizes());
  sizes.back() = v.size(-1);
  auto output = at::empty(sizes, q.options());
  const AttnSharedBatch order(q, k);
  attn_stub(
      kCPU,
      order(output),
      Tensor(),
      order(q),
      order(k),
      order(v),
      is_causal,
      scale);
  return output;
}

} // namespace at::native
