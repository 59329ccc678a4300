// @@ before: } // namespace torch::autograd::generated::details
// Either gradient may be undefined, that is zero; with both undefined, so are
// all results.
std::tuple<Tensor, Tensor, Tensor> attn_backward(
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 3> grad_input_mask) {
  if (!grad_output.defined() && !grad_attn.defined()) {
    return std::make_tuple(Tensor(), Tensor(), Tensor());
  }
  return at::_attn_backward(
      grad_output, grad_attn, q, k, v, attn, grad_input_mask);
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
