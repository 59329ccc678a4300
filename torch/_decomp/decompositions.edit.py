# @@ before: @register_decomposition(aten._addmm_activation)
def _check_attn(
    q: Tensor, k: Tensor, v: Tensor, op: str = "attn", grouped: bool = False
) -> None:
    torch._check(
        q.dtype == k.dtype and q.dtype == v.dtype,
        lambda: (
            f"{op}: q, k and v must have the same dtype, but got "
            f"q: {q.dtype}, k: {k.dtype}, v: {v.dtype}"
        ),
    )
    torch._check(
        # Not float8, float4 and chalf, which lack products or tanh.
        q.dtype
        in (
            *(torch.half, torch.bfloat16, torch.float, torch.double),
            *(torch.cfloat, torch.cdouble),
        ),
        lambda: (
            f"{op}: q, k and v must be floating point or complex (half, bfloat16, "
            f"float, double, cfloat or cdouble), but got {q.dtype}"
        ),
    )
    torch._check(
        q.device == k.device and q.device == v.device,
        lambda: (
            f"{op}: q, k and v must be on the same device, but got "
            f"q: {q.device}, k: {k.device}, v: {v.device}"
        ),
    )
    q_size, k_size, v_size = (list(x.shape) for x in (q, k, v))
    all_sizes = f"but got q: {q_size}, k: {k_size}, v: {v_size}"
    torch._check(
        min(q.dim(), k.dim(), v.dim()) >= 2,
        lambda: f"{op}: q, k and v must have at least 2 dimensions, {all_sizes}",
    )
    torch._check(
        q.dim() == k.dim() and q.dim() == v.dim(),
        lambda: (
            f"{op}: q, k and v must have the same number of dimensions, {all_sizes}"
        ),
    )
    or_one = ", or k and v 1 in place of some" if grouped else ""

    def batch_message() -> str:
        return (
            f"{op}: q (*, m, d), k (*, n, d) and v (*, n, e) must have the same batch "
            f"dimensions *{or_one}, {all_sizes}"
        )

    from torch.fx.experimental.symbolic_shapes import statically_known_true

    for q_b, k_b, v_b in zip(q_size[:-2], k_size[:-2], v_size[:-2]):
        size = k_b if grouped and statically_known_true(k_b == 1) else q_b
        for other in (k_b, v_b):
            torch._check(size == other, batch_message)
    torch._check(
        q_size[-1] == k_size[-1],
        lambda: (
            f"{op}: q (*, m, d) and k (*, n, d) must have the same d, "
            f"but got q: {q_size}, k: {k_size}"
        ),
    )
    torch._check(
        k_size[-2] == v_size[-2],
        lambda: (
            f"{op}: k (*, n, d) and v (*, n, e) must have the same n, "
            f"but got k: {k_size}, v: {v_size}"
        ),
    )


# A result of attn, or its gradient: q's sizes but for the last one.
def _check_attn_result(
    op: str, name: str, x: "Tensor | None", q: Tensor, cols: "int | torch.SymInt"
) -> None:
    if x is None:
        return
    sizes = [*q.shape[:-1], cols]

    def message() -> str:
        return (
            f"{op}: {name} must be {q.dtype} of sizes {sizes} on "
            f"{q.device}, but got {x.dtype} of sizes {list(x.shape)} on {x.device}"
        )

    torch._check(
        x.dtype == q.dtype and x.device == q.device and x.dim() == q.dim(), message
    )
    for found, size in zip(x.shape, sizes):
        torch._check(found == size, message)


@register_decomposition(aten.attn.default)
def attn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    _check_attn(q, k, v)
    attn = torch.tanh(torch.matmul(q, k.mT))
    return torch.matmul(attn, v), attn


@register_decomposition(aten._attn_backward.default)
def _attn_backward(
    grad_output: "Tensor | None",
    grad_attn: "Tensor | None",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn: Tensor,
    output_mask: list[bool],
) -> "tuple[Tensor | None, Tensor | None, Tensor | None]":
    _check_attn(q, k, v)
    op = "_attn_backward"
    _check_attn_result(op, "attn", attn, q, k.shape[-2])
    _check_attn_result(op, "grad_attn", grad_attn, q, k.shape[-2])
    _check_attn_result(op, "grad_output", grad_output, q, v.shape[-1])
    grad_q = grad_k = grad_v = None
    needs_q, needs_k, needs_v = output_mask
    if (needs_q or needs_k) and not (grad_output is None and grad_attn is None):
        grad = grad_attn
        if grad_output is not None:
            grad = torch.matmul(grad_output, v.mH)
            if grad_attn is not None:
                grad = grad + grad_attn
        grad_scores = aten.tanh_backward(grad, attn)
        if needs_q:
            grad_q = torch.matmul(grad_scores, k.conj())
        if needs_k:
            grad_k = torch.matmul(grad_scores.mT, q.conj())
    if needs_v and grad_output is not None:
        grad_v = torch.matmul(attn.mH, grad_output)
    return grad_q, grad_k, grad_v


# attn_output has no decomposition, which would bring the m x n matrix back.
@register_decomposition(aten.attn_output.default, type="meta")
def _attn_output_meta(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float = 1.0
) -> Tensor:
    _check_attn(q, k, v, "attn_output", grouped=True)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@register_decomposition(aten._attn_output_backward.default, type="meta")
def _attn_output_backward_meta(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    output_mask: list[bool],
) -> "tuple[Tensor | None, Tensor | None, Tensor | None]":
    _check_attn(q, k, v, "attn_output", grouped=True)
    op = "_attn_output_backward"
    _check_attn_result(op, "grad_output", grad_output, q, v.shape[-1])
    grads = (
        x.new_empty(x.shape) if wanted else None
        for x, wanted in zip((q, k, v), output_mask)
    )
    return tuple(grads)


def _check_attn_tangents(
    op: str,
    inputs: "tuple[Tensor, Tensor, Tensor]",
    tangents: "tuple[Tensor | None, ...]",
) -> None:
    _check_attn(*inputs, "attn_output", grouped=True)
    for name, x, tangent in zip("qkv", inputs, tangents):
        _check_attn_result(op, f"{name}_tangent", tangent, x, x.shape[-1])


@register_decomposition(aten._attn_output_jvp.default, type="meta")
def _attn_output_jvp_meta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tangent: "Tensor | None",
    k_tangent: "Tensor | None",
    v_tangent: "Tensor | None",
    is_causal: bool,
    scale: float,
) -> Tensor:
    _check_attn_tangents(
        "_attn_output_jvp", (q, k, v), (q_tangent, k_tangent, v_tangent)
    )
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@register_decomposition(aten._attn_output_double_backward.default, type="meta")
def _attn_output_double_backward_meta(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tangent: "Tensor | None",
    k_tangent: "Tensor | None",
    v_tangent: "Tensor | None",
    is_causal: bool,
    scale: float,
    output_mask: list[bool],
) -> "tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]":
    op = "_attn_output_double_backward"
    _check_attn_tangents(op, (q, k, v), (q_tangent, k_tangent, v_tangent))
    _check_attn_result(op, "grad_output", grad_output, q, v.shape[-1])
    # Without a tangent of the scores there is no gradient of v.
    has_scores = q_tangent is not None or k_tangent is not None
    has_any = has_scores or v_tangent is not None
    results = (
        x.new_empty(x.shape) if wanted and exists else None
        for x, wanted, exists in zip(
            (grad_output, q, k, v), output_mask, (has_any, has_any, has_any, has_scores)
        )
    )
    return tuple(results)


@register_decomposition(aten._attn_output_triple_backward.default, type="meta")
def _attn_output_triple_backward_meta(
    grad_output: "Tensor | None",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u_q: "Tensor | None",
    u_k: "Tensor | None",
    u_v: "Tensor | None",
    w_grad_output: "Tensor | None",
    w_q: "Tensor | None",
    w_k: "Tensor | None",
    w_v: "Tensor | None",
    is_causal: bool,
    scale: float,
    output_mask: list[bool],
) -> "tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]":
    op = "_attn_output_triple_backward"
    _check_attn(q, k, v, "attn_output", grouped=True)
    d, e = q.shape[-1], v.shape[-1]
    for name, x, like, cols in (
        ("grad_output", grad_output, q, e),
        ("u_q", u_q, q, d),
        ("u_k", u_k, k, d),
        ("u_v", u_v, v, e),
        ("w_grad_output", w_grad_output, q, e),
        ("w_q", w_q, q, d),
        ("w_k", w_k, k, d),
        ("w_v", w_v, v, e),
    ):
        _check_attn_result(op, name, x, like, cols)
    # Scores have a tangent if q or k has one.
    has_u = u_q is not None or u_k is not None
    has_w = w_q is not None or w_k is not None
    has_grad, has_w_grad = grad_output is not None, w_grad_output is not None
    has_output = (
        (has_u and has_w)
        or (has_u and w_v is not None)
        or (has_w and u_v is not None)
    )
    has_scores = (has_grad and has_output) or (
        has_w_grad and (has_u or u_v is not None)
    )
    has_v = has_u and ((has_grad and has_w) or has_w_grad)
    results = (
        q.new_empty(sizes) if wanted and exists else None
        for sizes, wanted, exists in zip(
            ((*q.shape[:-1], e), q.shape, k.shape, v.shape),
            output_mask,
            (has_output, has_scores, has_scores, has_v),
        )
    )
    return tuple(results)
