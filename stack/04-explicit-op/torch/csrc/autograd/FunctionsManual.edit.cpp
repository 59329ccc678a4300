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
