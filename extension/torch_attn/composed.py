"""The operators as operations of PyTorch, and the checks of their arguments.

For what the kernels don't take, and for the derivatives that they don't compute. `q` is (*, m, d),
`k` is (*, n, d), `v` is (*, n, e).
"""

import torch

DTYPES = (torch.half, torch.bfloat16, torch.float, torch.double, torch.cfloat, torch.cdouble)


def check(op, q, k, v, *, grouped=False, sizes=None):
    """Raises RuntimeError unless `op` takes q, k and v; `sizes` are those of one sample.

    If `grouped`, batch dimensions of both k and v may be 1.
    """
    types = [x.dtype for x in (q, k, v)]
    devices = [x.device for x in (q, k, v)]
    sizes = [list(size) for size in sizes or (q.shape, k.shape, v.shape)]

    def require(holds, what, given, names="qkv"):
        shown = ", ".join(
            f"{name}: {x}" for name, x in zip("qkv", given, strict=True) if name in names
        )
        torch._check(holds, lambda: f"{op}: {what}, but got {shown}")

    same = "q, k and v must have the same dtype"
    require(types[0] == types[1] == types[2], same, types)
    kinds = "floating point or complex (half, bfloat16, float, double, cfloat or cdouble)"
    taken = f"{op}: q, k and v must be {kinds}, but got {q.dtype}"
    torch._check(q.dtype in DTYPES, lambda: taken)
    mkldnn = f"{op}: q, k and v must not be mkldnn tensors: convert them by to_dense()"
    torch._check(not any(x.is_mkldnn for x in (q, k, v)), lambda: mkldnn)
    same = "q, k and v must be on the same device"
    require(devices[0] == devices[1] == devices[2], same, devices)
    dims = [len(size) for size in sizes]
    require(min(dims) >= 2, "q, k and v must have at least 2 dimensions", sizes)
    same = "q, k and v must have the same number of dimensions"
    require(dims[0] == dims[1] == dims[2], same, sizes)
    or_one = ", or k and v 1 in place of some" if grouped else ""
    same = f"q (*, m, d), k (*, n, d) and v (*, n, e) must have the same batch dimensions *{or_one}"
    for q_size, k_size, v_size in list(zip(*sizes, strict=True))[:-2]:
        expected = k_size if grouped and _is_one(k_size) else q_size
        require(expected == k_size, same, sizes)
        require(expected == v_size, same, sizes)
    same = "q (*, m, d) and k (*, n, d) must have the same d"
    require(sizes[0][-1] == sizes[1][-1], same, sizes, "qk")
    same = "k (*, n, d) and v (*, n, e) must have the same n"
    require(sizes[1][-2] == sizes[2][-2], same, sizes, "kv")


def _is_one(size):
    if isinstance(size, int):
        return size == 1
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size == 1)


def _check_result(op, name, x, q, cols):
    """Raises RuntimeError unless x is None, or a result of attn with `cols` columns."""
    if x is None:
        return
    sizes = [*q.shape[:-1], cols]

    def message():
        wanted = f"{name} must be {q.dtype} of sizes {sizes} on {q.device}"
        return f"{op}: {wanted}, but got {x.dtype} of sizes {list(x.shape)} on {x.device}"

    torch._check(x.dtype == q.dtype and x.device == q.device and x.dim() == q.dim(), message)
    for found, size in zip(x.shape, sizes, strict=True):
        torch._check(found == size, message)


def check_backward(grad_output, grad_attn, q, k, v, attn):
    check("attn", q, k, v)
    _check_result("_attn_backward", "attn", attn, q, k.shape[-2])
    _check_result("_attn_backward", "grad_attn", grad_attn, q, k.shape[-2])
    _check_result("_attn_backward", "grad_output", grad_output, q, v.shape[-1])


def check_output_backward(grad_output, q, k, v):
    check("attn_output", q, k, v, grouped=True)
    _check_result("_attn_output_backward", "grad_output", grad_output, q, v.shape[-1])


def attn(q, k, v):
    """Computes attn = tanh(q kᵀ) and output = attn v; returns (output, attn)."""
    check("attn", q, k, v)
    attn = torch.tanh(q @ k.mT)
    return attn @ v, attn


def attn_backward(grad_output, grad_attn, q, k, v, attn, output_mask):
    """Returns the gradients of q, k and v, or None: of what is not needed, or zero.

    With S̄ = (grad_output vᴴ + grad_attn) ∘ conj(1 - attn²), where a gradient that is None is zero:
    grad_q = S̄ conj(k), grad_k = S̄ᵀ conj(q), grad_v = attnᴴ grad_output.
    """
    check_backward(grad_output, grad_attn, q, k, v, attn)
    needs_q, needs_k, needs_v = output_mask
    grad_q = grad_k = grad_v = None
    if (needs_q or needs_k) and not (grad_output is None and grad_attn is None):
        grad = grad_attn
        if grad_output is not None:
            grad = grad_output @ v.mH
            if grad_attn is not None:
                grad = grad + grad_attn
        grad_scores = torch.ops.aten.tanh_backward(grad, attn)
        grad_q = grad_scores @ k.conj() if needs_q else None
        grad_k = grad_scores.mT @ q.conj() if needs_k else None
    if needs_v and grad_output is not None:
        grad_v = attn.mH @ grad_output
    return grad_q, grad_k, grad_v


def _attn_of(q, k, is_causal, scale):
    attn = torch.tanh(q @ k.mT if scale == 1 else q @ k.mT * scale)
    return attn.tril() if is_causal else attn


def _seen(q, x, is_causal):
    """Those rows of x, which is k or v, that some query sees: the others may hold anything."""
    return x[..., : q.shape[-2], :] if is_causal else x


def _of_all(grad, x):
    """The gradient of x for that of its rows that are seen."""
    unseen = x[..., grad.shape[-2] :, :]
    return torch.cat((grad, torch.zeros_like(unseen)), -2) if unseen.shape[-2] else grad


def attn_output(q, k, v, is_causal=False, scale=1.0):
    """Returns output = attn v with attn = tanh(scale q kᵀ), or 0 above the diagonal if causal."""
    check("attn_output", q, k, v, grouped=True)
    k, v = _seen(q, k, is_causal), _seen(q, v, is_causal)
    return _attn_of(q, k, is_causal, scale) @ v


def attn_output_backward(grad_output, q, k, v, is_causal, scale, output_mask):
    """Returns the gradients of q, k and v, or None for what is not needed.

    With attn as in `attn_output` and S̄ = scale (grad_output vᴴ) ∘ conj(1 - attn²), or 0 above the
    diagonal: grad_q = S̄ conj(k), grad_k = S̄ᵀ conj(q), grad_v = attnᴴ grad_output. Those of k and v
    are sums over the samples that share them.
    """
    check_output_backward(grad_output, q, k, v)
    all_k, all_v = k, v
    k, v = _seen(q, k, is_causal), _seen(q, v, is_causal)
    attn = _attn_of(q, k, is_causal, scale)
    needs_q, needs_k, needs_v = output_mask
    grad_q = grad_k = grad_v = None
    if needs_q or needs_k:
        grad_scores = torch.ops.aten.tanh_backward(grad_output @ v.mH, attn)
        grad_scores = grad_scores if scale == 1 else grad_scores * scale
        grad_scores = grad_scores.tril() if is_causal else grad_scores
        grad_q = grad_scores @ k.conj() if needs_q else None
        if needs_k:
            grad_k = _of_all((grad_scores.mT @ q.conj()).sum_to_size(k.shape), all_k)
    if needs_v:
        grad_v = _of_all((attn.mH @ grad_output).sum_to_size(v.shape), all_v)
    return grad_q, grad_k, grad_v
