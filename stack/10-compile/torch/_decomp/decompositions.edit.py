# @@ before: @register_decomposition(aten._addmm_activation)
def _check_attn(q: Tensor, k: Tensor, v: Tensor) -> None:
    torch._check(
        q.dtype == k.dtype and q.dtype == v.dtype,
        lambda: (
            "attn: q, k and v must have the same dtype, but got "
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
            "attn: q, k and v must be floating point or complex (half, bfloat16, "
            f"float, double, cfloat or cdouble), but got {q.dtype}"
        ),
    )
    torch._check(
        q.device == k.device and q.device == v.device,
        lambda: (
            "attn: q, k and v must be on the same device, but got "
            f"q: {q.device}, k: {k.device}, v: {v.device}"
        ),
    )
    q_size, k_size, v_size = (list(x.shape) for x in (q, k, v))
    all_sizes = f"but got q: {q_size}, k: {k_size}, v: {v_size}"
    torch._check(
        min(q.dim(), k.dim(), v.dim()) >= 2,
        lambda: f"attn: q, k and v must have at least 2 dimensions, {all_sizes}",
    )
    torch._check(
        q.dim() == k.dim() and q.dim() == v.dim(),
        lambda: (
            f"attn: q, k and v must have the same number of dimensions, {all_sizes}"
        ),
    )
    for i, size in enumerate(q_size[:-2]):
        for other in (k_size[i], v_size[i]):
            torch._check(
                size == other,
                lambda: (
                    "attn: q (*, m, d), k (*, n, d) and v (*, n, e) must have the "
                    f"same batch dimensions *, {all_sizes}"
                ),
            )
    torch._check(
        q_size[-1] == k_size[-1],
        lambda: (
            "attn: q (*, m, d) and k (*, n, d) must have the same d, "
            f"but got q: {q_size}, k: {k_size}"
        ),
    )
    torch._check(
        k_size[-2] == v_size[-2],
        lambda: (
            "attn: k (*, n, d) and v (*, n, e) must have the same n, "
            f"but got k: {k_size}, v: {v_size}"
        ),
    )


# A result of attn, or its gradient: q's sizes but for the last one.
def _check_attn_result(
    name: str, x: "Tensor | None", q: Tensor, cols: "int | torch.SymInt"
) -> None:
    if x is None:
        return
    sizes = [*q.shape[:-1], cols]

    def message() -> str:
        return (
            f"_attn_backward: {name} must be {q.dtype} of sizes {sizes} on "
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
    _check_attn_result("attn", attn, q, k.shape[-2])
    _check_attn_result("grad_attn", grad_attn, q, k.shape[-2])
    _check_attn_result("grad_output", grad_output, q, v.shape[-1])
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


