#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/AttnGradients.h>
#include <c10/cuda/CUDAGuard.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_attn_backward_native.h>
#endif

#if !defined(USE_ROCM)
#include <ATen/native/cuda/AttnColumns.cuh>
#include <ATen/native/cuda/AttnDtypes.cuh>
#include <ATen/native/cuda/AttnOperands.cuh>
#include <ATen/native/cuda/AttnScores.cuh>
#endif

#include <array>
#include <optional>
#include <tuple>

namespace at::native {

#if !defined(USE_ROCM)

namespace attn_tiles {

namespace {

// S̄ᵀ = (v G_oᵀ + G_aᵀ) ∘ (1 - attnᵀ²), grad_k = S̄ᵀ q, grad_v = attnᵀ G_o
template <typename T>
bool sweep_columns(
    const Tensor& q,
    const Tensor& v,
    const Tensor& attn,
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& grad_k,
    const Tensor& grad_v) {
  const auto merged = merge_batch<5>({&attn, &q, &v, &grad_output, &grad_attn});
  if (!merged) {
    return false;
  }
  const auto& strides = merged->strides;
  ColumnArgs<T> args{};
  args.batch = merged->batch;
  args.attn = scores_of<const T>(attn, strides[0]);
  args.q = operand_of<T>(q, strides[1]);
  args.v = operand_of<T>(v, strides[2]);
  args.grad_output = operand_of<T>(grad_output, strides[3]);
  args.grad_attn = scores_of<const T>(grad_attn, strides[4]);
  if (grad_k.defined()) {
    args.grad_k = static_cast<T*>(grad_k.mutable_data_ptr());
  }
  if (grad_v.defined()) {
    args.grad_v = static_cast<T*>(grad_v.mutable_data_ptr());
  }
  args.m = attn.size(-2);
  args.n = attn.size(-1);
  args.d = q.size(-1);
  args.e = v.size(-1);
  return launch_columns(args);
}

// Computes the gradients that are wanted. Returns false if no kernel can.
template <typename T>
bool sweep_backward(
    const AttnGradients& grads,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn) {
  const Tensor v_ = with_aligned_rows(v);
  const Tensor grad_output = with_aligned_rows(grads.grad_output);
  if (grads.grad_q.defined() && !sweep_rows<T, true>(
                                    grad_output,
                                    v_,
                                    with_aligned_rows(k),
                                    attn,
                                    grads.grad_attn,
                                    grads.grad_q)) {
    return false;
  }
  return (!grads.grad_k.defined() && !grads.grad_v.defined()) ||
         sweep_columns<T>(
             with_aligned_rows(q),
             v_,
             attn,
             grad_output,
             grads.grad_attn,
             grads.grad_k,
             grads.grad_v);
}

} // namespace

} // namespace attn_tiles

#endif // !USE_ROCM

// _attn_backward, by kernels if there are some for these inputs, else composed.
// The kernels need no temporary as large as attn.
std::tuple<Tensor, Tensor, Tensor> _attn_backward_cuda(
    const std::optional<Tensor>& grad_output,
    const std::optional<Tensor>& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 3> output_mask) {
  // The dispatcher takes grad_output's device, but that may be undefined.
  const c10::cuda::CUDAGuard guard(q.device());
#if !defined(USE_ROCM)
  if (isFloatingType(q.scalar_type())) {
    auto grads = empty_attn_gradients(
        grad_output, grad_attn, q, k, v, attn, output_mask);
    const bool done = grads.none_wanted() ||
                      (attn.numel() > 0 && attn_tiles::has_kernels(q, k, v) &&
                       attn_tiles::for_dtype_of(q, [&](auto type) {
                         return attn_tiles::sweep_backward<decltype(type)>(
                             grads, q, k, v, attn);
                       }));
    if (done) {
      return std::make_tuple(
          std::move(grads.grad_q),
          std::move(grads.grad_k),
          std::move(grads.grad_v));
    }
  }
#endif
  return native::_attn_backward(
      grad_output, grad_attn, q, k, v, attn, output_mask);
}

} // namespace at::native
