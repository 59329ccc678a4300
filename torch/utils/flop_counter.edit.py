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


def _attn_kept(m: int, n: int, is_causal: bool) -> int:
    """Count the elements of an m x n matrix that are not masked."""
    square = min(m, n)
    return square * (square + 1) // 2 + (m - square) * n if is_causal else m * n


@register_flop_formula(aten.attn_output)
def _attn_output_flop(
    q_shape, k_shape, v_shape, *, is_causal=False, out_shape=None, **kwargs
) -> int:
    """Count flops for attn_output: 2 (d + e) for each element of attn not masked."""
    *batch, m, d = q_shape
    n, e = v_shape[-2:]
    return 2 * prod(batch) * _attn_kept(m, n, is_causal) * (d + e)


@register_flop_formula(aten._attn_output_backward)
def _attn_output_backward_flop(
    grad_output_shape,
    q_shape,
    k_shape,
    v_shape,
    is_causal,
    scale,
    output_mask,
    out_shape=None,
    **kwargs,
) -> int:
    """Count flops for the backward of attn_output, which makes attn again."""
    *batch, m, d = q_shape
    n, e = v_shape[-2:]
    needs_q, needs_k, needs_v = output_mask
    columns = d + d * (needs_q + needs_k) + e * ((needs_q or needs_k) + needs_v)
    return 2 * prod(batch) * _attn_kept(m, n, is_causal) * columns


@register_flop_formula(aten._attn_output_jvp)
def _attn_output_jvp_flop(
    q_shape,
    k_shape,
    v_shape,
    q_tangent_shape,
    k_tangent_shape,
    v_tangent_shape,
    is_causal,
    scale,
    out_shape=None,
    **kwargs,
) -> int:
    """Count flops for the tangent of attn_output: two products for each tangent."""
    return _attn_output_double_backward_flop(
        None,
        q_shape,
        k_shape,
        v_shape,
        q_tangent_shape,
        k_tangent_shape,
        v_tangent_shape,
        is_causal,
        scale,
        (True, False, False, False),
    )


@register_flop_formula(aten._attn_output_double_backward)
def _attn_output_double_backward_flop(
    grad_output_shape,
    q_shape,
    k_shape,
    v_shape,
    q_tangent_shape,
    k_tangent_shape,
    v_tangent_shape,
    is_causal,
    scale,
    output_mask,
    out_shape=None,
    **kwargs,
) -> int:
    """Count flops for the double backward of attn_output: twelve products at most."""
    *batch, m, d = q_shape
    n, e = v_shape[-2:]
    has_q, has_k, has_v = (
        x is not None for x in (q_tangent_shape, k_tangent_shape, v_tangent_shape)
    )
    has_scores = has_q or has_k
    needs_output, needs_q, needs_k, needs_v = output_mask
    if not (has_scores or has_v):
        return 0
    # attn and its tangent; grad_output vᵀ and its tangent
    d_products = 1 + has_q + has_k
    e_products = (has_scores + has_v) * (needs_q or needs_k)
    # what they are multiplied with
    d_products += needs_q * (1 + has_k) + needs_k * (1 + has_q)
    e_products += needs_output * (has_scores + has_v) + needs_v * has_scores
    columns = d * d_products + e * e_products
    return 2 * prod(batch) * _attn_kept(m, n, is_causal) * columns


@register_flop_formula(aten._attn_output_triple_backward)
def _attn_output_triple_backward_flop(
    grad_output_shape,
    q_shape,
    k_shape,
    v_shape,
    u_q_shape,
    u_k_shape,
    u_v_shape,
    w_grad_output_shape,
    w_q_shape,
    w_k_shape,
    w_v_shape,
    is_causal,
    scale,
    output_mask,
    out_shape=None,
    **kwargs,
) -> int:
    """Count flops for attn_output's third order: each product of two that are there."""
    *batch, m, d = q_shape
    n, e = v_shape[-2:]
    # Whether each has a derivative along the sets of directions {}, {u}, {w} and {u, w}.
    q, k, v, grad = (
        [True, u is not None, w is not None, False]
        for u, w in (
            (u_q_shape, w_q_shape),
            (u_k_shape, w_k_shape),
            (u_v_shape, w_v_shape),
            (None, w_grad_output_shape),
        )
    )
    grad[0] = grad_output_shape is not None

    def products(x, y, to):
        return sum(x[i] and y[to - i] for i in range(to + 1) if i & to == i)

    def product(x, y):
        return [products(x, y, to) > 0 for to in range(4)]

    attn = product(q, k)
    attn[3] = attn[3] or (attn[1] and attn[2])
    scores = product(product(grad, v), attn)
    needs_output, needs_q, needs_k, needs_v = output_mask
    results = (
        (needs_output, attn, v, e),
        (needs_q, scores, k, d),
        (needs_k, scores, q, d),
        (needs_v, attn, grad, e),
    )
    columns = sum(products(x, y, 3) * cols for needed, x, y, cols in results if needed)
    if columns == 0:
        return 0
    columns += d * sum(products(q, k, to) for to in range(4))
    if needs_q or needs_k:
        columns += e * sum(products(grad, v, to) for to in range(4))
    return 2 * prod(batch) * _attn_kept(m, n, is_causal) * columns


# @@ before: aten.baddbmm: baddbmm_flop,
    aten.attn: _attn_flop,
    aten._attn_backward: _attn_backward_flop,
    aten.attn_output: _attn_output_flop,
    aten._attn_output_backward: _attn_output_backward_flop,
    aten._attn_output_jvp: _attn_output_jvp_flop,
    aten._attn_output_double_backward: _attn_output_double_backward_flop,
    aten._attn_output_triple_backward: _attn_output_triple_backward_flop,
