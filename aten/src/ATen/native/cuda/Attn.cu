#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/native/Attn.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/attn_native.h>
#include <ATen/ops/empty.h>
#endif

#if !defined(USE_ROCM)
#include <ATen/native/cuda/AttnDtypes.cuh>
#include <ATen/native/cuda/AttnOperands.cuh>
#endif

#include <tuple>

namespace at::native {

// attn = tanh(q kᵀ), output = attn v, by a kernel if there is one for these
// inputs, else composed.
std::tuple<Tensor, Tensor> attn_cuda(
    const Tensor& q, const Tensor& k, const Tensor& v) {
#if !defined(USE_ROCM)
  check_attn_inputs(q, k, v, q.sym_sizes(), k.sym_sizes(), v.sym_sizes());
  using namespace attn_tiles;
  if (has_kernels(q, k, v)) {
    DimVector sizes(q.sizes());
    sizes.back() = v.size(-1);
    auto output = at::empty(sizes, q.options());
    sizes.back() = k.size(-2);
    auto attn = at::empty(sizes, q.options());
    if (attn.numel() > 0 && for_dtype_of(q, [&](auto type) {
          return sweep_rows<decltype(type), false>(
              with_aligned_rows(q),
              with_aligned_rows(k),
              with_aligned_rows(v),
              attn,
              {},
              output);
        })) {
      return std::make_tuple(std::move(output), std::move(attn));
    }
  }
#endif
  return native::attn(q, k, v);
}

} // namespace at::native
