# @@ before: @register_flop_formula(aten.convolution_backward)
@register_flop_formula(aten.attn)
def _attn_flop(q_shape, k_shape, v_shape, out_shape=None, **kwargs) -> int:
    """Count flops for attn: 2 m n (d + e) for each sample."""
    *batch, m, d = q_shape
    n, e = v_shape[-2:]
    return 2 * prod(batch) * m * n * (d + e)


@register_flop_formula(aten._attn_backward)
def _attn_backward_flop(
    grad_output_shape,
    grad_attn_shape,
    q_shape,
    k_shape,
    v_shape,
    attn_shape,
    output_mask,
    out_shape=None,
    **kwargs,
) -> int:
    """Count flops for the backward of attn: 2 m n d or 2 m n e for each product."""
    *batch, m, d = q_shape
    n, e = v_shape[-2:]
    needs_q, needs_k, needs_v = output_mask
    columns = 0
    if grad_output_shape is not None:
        columns += e * ((needs_q or needs_k) + needs_v)
    if grad_output_shape is not None or grad_attn_shape is not None:
        columns += d * (needs_q + needs_k)
    return 2 * prod(batch) * m * n * columns


# @@ before: aten.baddbmm: baddbmm_flop,
    aten.attn: _attn_flop,
    aten._attn_backward: _attn_backward_flop,
