#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/AttnGradients.h>
#include <ATen/native/cpu/AttnBackwardKernel.h>
#include <ATen/native/cpu/AttnKernel.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_attn_backward_native.h>
#endif

#include <array>
#include <optional>
#include <tuple>

namespace at::native {

DEFINE_DISPATCH(attn_backward_stub);

// _attn_backward by the CPU's kernel, which has no temporary as large as attn,
// or composed.
std::tuple<Tensor, Tensor, Tensor> _attn_backward_cpu(
    const std::optional<Tensor>& grad_output,
    const std::optional<Tensor>& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 3> output_mask) {
  if (!has_attn_kernel(q, v)) {
    return native::_attn_backward(
        grad_output, grad_attn, q, k, v, attn, output_mask);
  }
  auto grads =
      empty_attn_gradients(grad_output, grad_attn, q, k, v, attn, output_mask);
  if (!grads.none_wanted()) {
    attn_backward_stub(kCPU, grads, q, k, v, attn);
  }
  return std::make_tuple(
      std::move(grads.grad_q),
      std::move(grads.grad_k),
      std::move(grads.grad_v));
}

} // namespace at::native
