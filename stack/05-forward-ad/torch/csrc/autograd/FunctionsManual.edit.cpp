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

// attn_t = (1 - attn²) ∘ (q_t kᵀ + q k_tᵀ), output_t = attn_t v + attn v_t
// The term of an undefined tangent, which is zero, is left out. A result
// without terms is undefined.
std::tuple<Tensor, Tensor> attn_jvp(
    const Tensor& q_p,
    const Tensor& q_t,
    const Tensor& k_p,
    const Tensor& k_t,
    const Tensor& v_p,
    const Tensor& v_t,
    const Tensor& attn) {
  Tensor output_t, attn_t;
  if (q_t.defined()) {
    attn_t = at::matmul(q_t, k_p.mT());
  }
  if (k_t.defined()) {
    const auto term = at::matmul(q_p, k_t.mT());
    attn_t = attn_t.defined() ? attn_t + term : term;
  }
  if (attn_t.defined()) {
    attn_t = (1 - attn * attn) * attn_t;
    output_t = at::matmul(attn_t, v_p);
  }
  if (v_t.defined()) {
    const auto term = at::matmul(attn, v_t);
    output_t = output_t.defined() ? output_t + term : term;
  }
  return std::make_tuple(std::move(output_t), std::move(attn_t));
}
