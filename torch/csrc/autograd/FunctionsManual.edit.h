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
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attn_double_backward(
    const Tensor& u_q,
    const Tensor& u_k,
    const Tensor& u_v,
    const std::optional<Tensor>& grad_output_opt,
    const std::optional<Tensor>& grad_attn_opt,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 6> grad_input_mask);
std::tuple<Tensor, Tensor, Tensor> attn_backward_jvp(
    const Tensor& grad_output_p,
    const Tensor& grad_output_t,
    const Tensor& grad_attn_p,
    const Tensor& grad_attn_t,
    const Tensor& q_p,
    const Tensor& q_t,
    const Tensor& k_p,
    const Tensor& k_t,
    const Tensor& v_p,
    const Tensor& v_t,
    const Tensor& attn_p,
    const Tensor& attn_t,
    std::array<bool, 3> output_mask);
Tensor attn_output_jvp(
    const std::array<Tensor, 3>& x, const std::array<Tensor, 3>& u, bool is_causal, double scale);
std::tuple<Tensor, Tensor, Tensor, Tensor> attn_output_double_backward(
    const std::array<Tensor, 3>& u,
    const Tensor& grad,
    const std::array<Tensor, 3>& x,
    bool is_causal,
    double scale,
    std::array<bool, 4> mask);
std::tuple<Tensor, Tensor, Tensor> attn_output_backward_jvp(
    const Tensor& grad,
    const Tensor& grad_t,
    const std::array<Tensor, 3>& x,
    const std::array<Tensor, 3>& x_t,
    bool is_causal,
    double scale,
    std::array<bool, 3> mask);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
attn_output_jvp_backward(
    const Tensor& grad,
    const std::array<Tensor, 3>& x,
    const std::array<Tensor, 3>& u,
    bool is_causal,
    double scale,
    std::array<bool, 6> mask);
Tensor attn_output_jvp_jvp(
    const std::array<Tensor, 3>& x,
    const std::array<Tensor, 3>& x_t,
    const std::array<Tensor, 3>& u,
    const std::array<Tensor, 3>& u_t,
    bool is_causal,
    double scale);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
attn_output_double_backward_backward(
    const Tensor& w_grad,
    const std::array<Tensor, 3>& w,
    const Tensor& grad,
    const std::array<Tensor, 3>& x,
    const std::array<Tensor, 3>& u,
    bool is_causal,
    double scale,
    std::array<bool, 7> mask);
std::tuple<Tensor, Tensor, Tensor, Tensor> attn_output_double_backward_jvp(
    const Tensor& grad,
    const Tensor& grad_t,
    const std::array<Tensor, 3>& x,
    const std::array<Tensor, 3>& x_t,
    const std::array<Tensor, 3>& u,
    const std::array<Tensor, 3>& u_t,
    bool is_causal,
    double scale,
    std::array<bool, 4> mask);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
attn_output_triple_backward_backward(
    const Tensor& h_grad,
    const std::array<Tensor, 3>& h,
    const Tensor& grad,
    const std::array<Tensor, 3>& x,
    const std::array<Tensor, 3>& u,
    const Tensor& w_grad,
    const std::array<Tensor, 3>& w,
    bool is_causal,
    double scale,
    std::array<bool, 11> mask);
std::tuple<Tensor, Tensor, Tensor, Tensor> attn_output_triple_backward_jvp(
    const Tensor& grad,
    const Tensor& grad_t,
    const std::array<Tensor, 3>& x,
    const std::array<Tensor, 3>& x_t,
    const std::array<Tensor, 3>& u,
    const std::array<Tensor, 3>& u_t,
    const Tensor& w_grad,
    const Tensor& w_grad_t,
    const std::array<Tensor, 3>& w,
    const std::array<Tensor, 3>& w_t,
    bool is_causal,
    double scale,
    std::array<bool, 4> mask);
