#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/native/Attn.h>
#include <ATen/native/AttnGradients.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty.h>
#endif

namespace at::native {

// A result of attn, or its gradient: q's sizes but for the last one.
static void check_attn_result(
    const char* name, const Tensor& x, const Tensor& q, int64_t cols) {
  if (!x.defined()) {
    return;
  }
  DimVector sizes(q.sizes());
  sizes.back() = cols;
  TORCH_CHECK(
      x.scalar_type() == q.scalar_type() && x.device() == q.device() &&
          x.sizes() == sizes,
      "_attn_backward: ",
      name,
      " must be ",
      q.scalar_type(),
      " of sizes ",
      sizes,
      " on ",
      q.device(),
      ", but got ",
      x.scalar_type(),
      " of sizes ",
      x.sizes(),
      " on ",
      x.device());
}

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
  check_attn_inputs(q, k, v, q.sym_sizes(), k.sym_sizes(), v.sym_sizes());
  check_attn_result("attn", attn, q, k.size(-2));
  check_attn_result("grad_attn", found.grad_attn, q, k.size(-2));
  check_attn_result("grad_output", found.grad_output, q, v.size(-1));
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
