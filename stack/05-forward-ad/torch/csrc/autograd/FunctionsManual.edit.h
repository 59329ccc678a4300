// @@ before: } // namespace torch::autograd::generated::details
std::tuple<Tensor, Tensor, Tensor> attn_backward(
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 3> grad_input_mask);
std::tuple<Tensor, Tensor> attn_jvp(
    const Tensor& q_p,
    const Tensor& q_t,
    const Tensor& k_p,
    const Tensor& k_t,
    const Tensor& v_p,
    const Tensor& v_t,
    const Tensor& attn);
