// @@ before: AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu__cdist_backward( || AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu__fused_moving_avg_obs_fq_helper_functional(
// @@ only: torch<2.13
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu__attn_backward(AtenTensorHandle* grad_output, AtenTensorHandle* grad_attn, AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle attn, const int32_t* output_mask, int64_t output_mask_len_, AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2);
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu__attn_output_backward(AtenTensorHandle grad_output, AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, int32_t is_causal, double scale, const int32_t* output_mask, int64_t output_mask_len_, AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2);
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu__attn_output_double_backward(AtenTensorHandle grad_output, AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle* q_tangent, AtenTensorHandle* k_tangent, AtenTensorHandle* v_tangent, int32_t is_causal, double scale, const int32_t* output_mask, int64_t output_mask_len_, AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2, AtenTensorHandle* ret3);
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu__attn_output_jvp(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle* q_tangent, AtenTensorHandle* k_tangent, AtenTensorHandle* v_tangent, int32_t is_causal, double scale, AtenTensorHandle* ret0);
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu__attn_output_triple_backward(AtenTensorHandle* grad_output, AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle* u_q, AtenTensorHandle* u_k, AtenTensorHandle* u_v, AtenTensorHandle* w_grad_output, AtenTensorHandle* w_q, AtenTensorHandle* w_k, AtenTensorHandle* w_v, int32_t is_causal, double scale, const int32_t* output_mask, int64_t output_mask_len_, AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2, AtenTensorHandle* ret3);
// @@ before: AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu__cdist_backward( || AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu__fused_moving_avg_obs_fq_helper_functional(
// @@ only: torch>=2.13
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu__attn_backward(AtenTensorHandle* grad_output, AtenTensorHandle* grad_attn, AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle attn, const int32_t* output_mask, int64_t output_mask_len_, AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2);
#endif // TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu__attn_output_backward(AtenTensorHandle grad_output, AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, int32_t is_causal, double scale, const int32_t* output_mask, int64_t output_mask_len_, AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2);
#endif // TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu__attn_output_double_backward(AtenTensorHandle grad_output, AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle* q_tangent, AtenTensorHandle* k_tangent, AtenTensorHandle* v_tangent, int32_t is_causal, double scale, const int32_t* output_mask, int64_t output_mask_len_, AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2, AtenTensorHandle* ret3);
#endif // TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu__attn_output_jvp(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle* q_tangent, AtenTensorHandle* k_tangent, AtenTensorHandle* v_tangent, int32_t is_causal, double scale, AtenTensorHandle* ret0);
#endif // TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu__attn_output_triple_backward(AtenTensorHandle* grad_output, AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle* u_q, AtenTensorHandle* u_k, AtenTensorHandle* u_v, AtenTensorHandle* w_grad_output, AtenTensorHandle* w_q, AtenTensorHandle* w_k, AtenTensorHandle* w_v, int32_t is_causal, double scale, const int32_t* output_mask, int64_t output_mask_len_, AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2, AtenTensorHandle* ret3);
#endif // TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
// @@ before: AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu_avg_pool2d( || AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu_baddbmm_out(
// @@ only: torch<2.13
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu_attn(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle* ret0, AtenTensorHandle* ret1);
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu_attn_output(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, int32_t is_causal, double scale, AtenTensorHandle* ret0);
// @@ before: AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu_avg_pool2d( || AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu_baddbmm_out(
// @@ only: torch>=2.13
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu_attn(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle* ret0, AtenTensorHandle* ret1);
#endif // TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_xpu_attn_output(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, int32_t is_causal, double scale, AtenTensorHandle* ret0);
#endif // TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
