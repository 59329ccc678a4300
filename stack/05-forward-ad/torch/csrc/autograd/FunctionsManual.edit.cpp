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

// attn_t = (1 - attn²) ∘ (q_t kᵀ + q k_tᵀ)
// A tangent that is not there is a ZeroTensor: its term is left out. With none
// there, the result is undefined.
Tensor attn_jvp(
    const Tensor& q_p,
    const Tensor& q_t,
    const Tensor& k_p,
    const Tensor& k_t,
    const Tensor& attn) {
  Tensor scores_t;
  if (!q_t._is_zerotensor()) {
    scores_t = at::matmul(q_t, k_p.mT());
  }
  if (!k_t._is_zerotensor()) {
    const auto term = at::matmul(q_p, k_t.mT());
    scores_t = scores_t.defined() ? scores_t + term : term;
  }
  return scores_t.defined() ? (1 - attn * attn) * scores_t : scores_t;
}

// output_t = attn_t v + attn v_t
Tensor attn_output_jvp(
    const Tensor& q_p,
    const Tensor& q_t,
    const Tensor& k_p,
    const Tensor& k_t,
    const Tensor& v_p,
    const Tensor& v_t,
    const Tensor& attn) {
  const auto attn_t = attn_jvp(q_p, q_t, k_p, k_t, attn);
  Tensor output_t;
  if (attn_t.defined()) {
    output_t = at::matmul(attn_t, v_p);
  }
  if (!v_t._is_zerotensor()) {
    const auto term = at::matmul(attn, v_t);
    output_t = output_t.defined() ? output_t + term : term;
  }
  return output_t;
}
