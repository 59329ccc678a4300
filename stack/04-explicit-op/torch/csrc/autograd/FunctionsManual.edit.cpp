// @@ before: } // namespace torch::autograd::generated::details
// Backward of attn for the gradients of both its outputs, G_o of output and G_a
// of attn, either of which may be undefined, that is zero. With S̄ = (G_o vᴴ +
// G_a) ∘ conj(1 - attn²):
//   grad_q = S̄ conj(k), grad_k = S̄ᵀ conj(q), grad_v = attnᴴ G_o
// A gradient that grad_input_mask leaves out, or that is zero, is undefined.
std::tuple<Tensor, Tensor, Tensor> attn_backward(
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 3> grad_input_mask) {
  const auto [needs_q, needs_k, needs_v] = grad_input_mask;
  Tensor grad_q, grad_k, grad_v;
  if ((needs_q || needs_k) && (grad_output.defined() || grad_attn.defined())) {
    Tensor grad = grad_attn;
    if (grad_output.defined()) {
      grad = at::matmul(grad_output, v.mH());
      if (grad_attn.defined()) {
        grad = grad.add(grad_attn);
      }
    }
    const Tensor grad_scores = at::tanh_backward(grad, attn);
    if (needs_q) {
      grad_q = at::matmul(grad_scores, k.conj());
    }
    if (needs_k) {
      grad_k = at::matmul(grad_scores.mT(), q.conj());
    }
  }
  if (needs_v && grad_output.defined()) {
    grad_v = at::matmul(attn.mH(), grad_output);
  }
  return std::make_tuple(
      std::move(grad_q), std::move(grad_k), std::move(grad_v));
}
