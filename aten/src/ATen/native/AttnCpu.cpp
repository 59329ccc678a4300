#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/Attn.h>
#include <ATen/native/AttnGradients.h>
#include <ATen/native/AttnSharedBatch.h>
#include <ATen/native/cpu/AttnKernel.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_attn_backward_native.h>
#include <ATen/ops/_attn_output_backward_native.h>
#include <ATen/ops/attn_native.h>
#include <ATen/ops/attn_output_native.h>
#include <ATen/ops/empty.h>
#endif

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

namespace at::native {

DEFINE_DISPATCH(attn_stub);
DEFINE_DISPATCH(attn_backward_stub);

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
    attn_backward_stub(kCPU, grads, q, k, v, attn, false, 1.0, 1);
  }
  return std::make_tuple(
      std::move(grads.grad_q),
      std::move(grads.grad_k),
      std::move(grads.grad_v));
}

// The backward of attn_output, by the CPU's kernel or composed. The kernel
// makes each tile of attn again, and adds the gradients of k and v over the
// samples that share them.
std::tuple<Tensor, Tensor, Tensor> _attn_output_backward_cpu(
    const Tensor& grad_output,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale,
    std::array<bool, 3> output_mask) {
  // Without a sample the kernel writes no gradient, but those of k and v that
  // q's samples share are zero.
  if (!has_attn_kernel(q, v) || q.numel() == 0) {
    return native::_attn_output_backward(
        grad_output, q, k, v, is_causal, scale, output_mask);
  }
  check_attn_output_backward_inputs(grad_output, q, k, v);
  const auto empty_like = [](bool wanted, const Tensor& x) {
    return wanted ? at::empty(x.sizes(), x.options()) : Tensor();
  };
  auto grad_q = empty_like(output_mask[0], q);
  auto grad_k = empty_like(output_mask[1], k);
  auto grad_v = empty_like(output_mask[2], v);
  const AttnSharedBatch order(q, k);
  const AttnGradients grads{
      order(grad_output),
      Tensor(),
      order(grad_q),
      order(grad_k),
      order(grad_v)};
  if (!grads.none_wanted()) {
    attn_backward_stub(
        kCPU,
        grads,
        order(q),
        order(k),
        order(v),
        Tensor(),
        is_causal,
        scale,
        order.group());
  }
  return std::make_tuple(
      std::move(grad_q), std::move(grad_k), std::move(grad_v));
}

} // namespace at::native
