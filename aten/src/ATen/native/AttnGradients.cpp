#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/native/Attn.h>
#include <ATen/native/AttnGradients.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty.h>
#endif

namespace at::native {

AttnGradients empty_attn_gradients(
    const std::optional<Tensor>& grad_output,
    const std::optional<Tensor>& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 3> output_mask) {
  AttnGradients found;
  found.grad_output = grad_output.value_or(Tensor());
  found.grad_attn = grad_attn.value_or(Tensor());
  check_attn_backward_inputs(found.grad_output, found.grad_attn, q, k, v, attn);
  if (found.grad_output.defined() || found.grad_attn.defined()) {
    if (output_mask[0]) {
      found.grad_q = at::empty(q.sizes(), q.options());
    }
    if (output_mask[1]) {
      found.grad_k = at::empty(k.sizes(), k.options());
    }
  }
  if (output_mask[2] && found.grad_output.defined()) {
    found.grad_v = at::empty(v.sizes(), v.options());
  }
  return found;
}

} // namespace at::native
