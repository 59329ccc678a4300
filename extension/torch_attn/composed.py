"""The operators as operations of PyTorch, and the checks of their arguments.

For what the kernels don't take, and for the derivatives that they don't compute. `q` is (*, m, d),
`k` is (*, n, d), `v` is (*, n, e).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.half, torch.bfloat16, torch.float, torch.double, torch.cfloat, torch.cdouble)
Results = tuple[Tensor | None, ...]
Mask = Sequence[bool]
Sizes = Sequence[Sequence[int]]
_torch_check: Callable[[bool, Callable[[], str]], None] = torch._check  # which has no types


def check(
    op: str, q: Tensor, k: Tensor, v: Tensor, *, grouped: bool = False, sizes: Sizes | None = None
) -> None:
    """Raises RuntimeError unless `op` takes q, k and v; `sizes` are those of one sample.

    If `grouped`, batch dimensions of both k and v may be 1.
    """
    types = [x.dtype for x in (q, k, v)]
    devices = [x.device for x in (q, k, v)]
    sizes = [list(size) for size in sizes or (q.shape, k.shape, v.shape)]

    def require(holds: bool, what: str, given: Sequence[object], names: str = "qkv") -> None:
        shown = ", ".join(
            f"{name}: {x}" for name, x in zip("qkv", given, strict=True) if name in names
        )
        _torch_check(holds, lambda: f"{op}: {what}, but got {shown}")

    same = "q, k and v must have the same dtype"
    require(types[0] == types[1] == types[2], same, types)
    kinds = "floating point or complex (half, bfloat16, float, double, cfloat or cdouble)"
    taken = f"{op}: q, k and v must be {kinds}, but got {q.dtype}"
    _torch_check(q.dtype in DTYPES, lambda: taken)
    mkldnn = f"{op}: q, k and v must not be mkldnn tensors: convert them by to_dense()"
    _torch_check(not any(x.is_mkldnn for x in (q, k, v)), lambda: mkldnn)
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


def _is_one(size: int | torch.SymInt) -> bool:
    if isinstance(size, int):
        return size == 1
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size == 1)


def _check_like(op: str, name: str, x: Tensor | None, q: Tensor, sizes: Iterable[int]) -> None:
    """Raises RuntimeError unless x is None, or of these sizes, and otherwise as q is."""
    if x is None:
        return
    sizes = list(sizes)

    def message() -> str:
        wanted = f"{name} must be {q.dtype} of sizes {sizes} on {q.device}"
        return f"{op}: {wanted}, but got {x.dtype} of sizes {list(x.shape)} on {x.device}"

    _torch_check(x.dtype == q.dtype and x.device == q.device and x.dim() == q.dim(), message)
    for found, size in zip(x.shape, sizes, strict=True):
        _torch_check(found == size, message)


def output_size(q: Tensor, v: Tensor) -> tuple[int, ...]:
    return (*q.shape[:-1], v.shape[-1])


def check_backward(
    grad_output: Tensor | None,
    grad_attn: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn: Tensor,
) -> None:
    check("attn", q, k, v)
    of_attn = (*q.shape[:-1], k.shape[-2])
    _check_like("_attn_backward", "attn", attn, q, of_attn)
    _check_like("_attn_backward", "grad_attn", grad_attn, q, of_attn)
    _check_like("_attn_backward", "grad_output", grad_output, q, output_size(q, v))


class Derivative:
    """A derivative of attn_output. Its `check` checks what its arguments' names say.

    These end with of what each is a tangent, or with grad_output.
    """

    def __init__(self, formula: Callable[..., Any]) -> None:
        self.formula = formula
        self.op = f"_{formula.__name__}"
        self.names = formula.__code__.co_varnames[: formula.__code__.co_argcount]

    def check(self, *args: Any) -> None:
        given = dict(zip(self.names, args, strict=True))
        q, k, v = given["q"], given["k"], given["v"]
        check("attn_output", q, k, v, grouped=True)
        for name in [x for x in self.names if x not in ("q", "k", "v")]:
            of = name.removesuffix("_tangent").removeprefix("u_").removeprefix("w_")
            if of in ("q", "k", "v"):
                _check_like(self.op, name, given[name], q, given[of].shape)
            elif of == "grad_output":
                _check_like(self.op, name, given[name], q, output_size(q, v))

    def __call__(self, *args: Any) -> Any:
        self.check(*args)
        return self.formula(*args)


def attn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Computes attn = tanh(q kᵀ) and output = attn v; returns (output, attn)."""
    check("attn", q, k, v)
    attn = torch.tanh(q @ k.mT)
    return attn @ v, attn


def attn_backward(
    grad_output: Tensor | None,
    grad_attn: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn: Tensor,
    output_mask: Mask,
) -> Results:
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


def _attn_of(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    attn = torch.tanh(q @ k.mT if scale == 1 else q @ k.mT * scale)
    return attn.tril() if is_causal else attn


def _seen(q: Tensor, x: Tensor, is_causal: bool) -> Tensor:
    """Those rows of x, of which k has as many, that some query sees: the others may be anything."""
    return x[..., : q.shape[-2], :] if is_causal else x


def _of_all(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x for that of its rows that are seen."""
    unseen = x[..., grad.shape[-2] :, :]
    return torch.cat((grad, torch.zeros_like(unseen)), -2) if unseen.shape[-2] else grad


# A jet is a tensor and its derivatives along some directions: x[s] is that along the directions of
# the set s, a number with a bit for each. None is zero.
Jet = list[Tensor | None]


def _jet(x: Tensor, *tangents: Tensor | None) -> Jet:
    """The jet of an input, whose derivatives along two directions are zero."""
    jet: Jet = [None] * 2 ** len(tangents)
    jet[0] = x
    for i, tangent in enumerate(tangents):
        jet[2**i] = tangent
    return jet


def _each(jet: Jet, linear: Callable[[Tensor], Tensor]) -> Jet:
    return [None if x is None else linear(x) for x in jet]


def _product(
    x: Jet, y: Jet, at: int, multiply: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    """The derivative of a product along the set `at`: x_s y_r, summed over ways to split it."""
    total = None
    for s in range(at + 1):
        if s & at == s and (x_s := x[s]) is not None and (y_r := y[at - s]) is not None:
            term = multiply(x_s, y_r)
            total = term if total is None else total + term
    return total


def _along(jet: Jet, i: int) -> Jet:
    """The jet of the derivative along the direction of the set i."""
    return [jet[s | i] if s | i < len(jet) else None for s in range(len(jet))]


def _derivatives(
    grad_output: Jet, q: Jet, k: Jet, v: Jet, is_causal: bool, scale: float, output_mask: Mask
) -> Results:
    """Derivatives of attn_output and of its gradients, each None if it is not wanted, or zero.

    The arguments up to v are jets. With X = q kᵀ, attn = tanh(scale X), slope = scale (1 - attn²)
    and S̄ = (grad_output vᴴ) ∘ conj(slope), where attn and slope are 0 above the diagonal if causal,
    they are those of
        attn v, S̄ conj(k), S̄ᵀ conj(q), attnᴴ grad_output
    along all directions. Those of attn and slope along a direction i are
        attn_i = slope ∘ X_i, slope_i = -2 scale attn ∘ attn_i
    """
    needs_output, needs_q, needs_k, needs_v = output_mask
    needs_scores = needs_q or needs_k
    all_q, all_k, all_v = q[0], k[0], v[0]
    assert all_q is not None and all_k is not None and all_v is not None
    k, v = (_each(jet, lambda x: _seen(all_q, x, is_causal)) for jet in (k, v))
    assert k[0] is not None and v[0] is not None
    sets, every = len(q), len(q) - 1
    matmul, mul = torch.matmul, torch.mul
    k_t = _each(k, lambda x: x.mT)

    attn_0 = _attn_of(all_q, k[0], is_causal, scale)
    slope_0 = scale - scale * attn_0 * attn_0
    attn: Jet = [attn_0]
    slope: Jet = [slope_0.tril() if is_causal else slope_0]
    x: Jet = [None]
    for at in range(1, sets):
        i = at & -at
        x.append(_product(q, k_t, at, matmul))
        attn.append(_product(slope, _along(x, i), at - i, mul))
        half = _product(attn, _along(attn, i), at - i, mul) if needs_scores or at != every else None
        slope.append(half if half is None else half * (-2 * scale))

    results: Jet = [None] * 4
    if needs_scores:
        v_h, slope = _each(v, lambda x: x.mH), _each(slope, torch.conj)
        grads = [_product(grad_output, v_h, at, matmul) for at in range(sets)]
        grads = [_product(grads, slope, at, mul) for at in range(sets)]
    if needs_output:
        results[0] = _product(attn, v, every, matmul)
    if needs_q:
        results[1] = _product(grads, _each(k, torch.conj), every, matmul)
    if needs_k:
        grads = _each(grads, lambda x: x.mT)
        results[2] = _product(grads, _each(q, torch.conj), every, matmul)
    if needs_v:
        results[3] = _product(_each(attn, lambda x: x.mH), grad_output, every, matmul)
    for i, seen, whole in ((2, k[0], all_k), (3, v[0], all_v)):
        if (grad := results[i]) is not None:
            results[i] = _of_all(grad.sum_to_size(seen.shape), whole)
    return tuple(results)


def attn_output(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float = 1.0
) -> Tensor:
    """Returns output = attn v with attn = tanh(scale q kᵀ), or 0 above the diagonal if causal."""
    check("attn_output", q, k, v, grouped=True)
    k, v = _seen(q, k, is_causal), _seen(q, v, is_causal)
    return _attn_of(q, k, is_causal, scale) @ v


@Derivative
def attn_output_backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    output_mask: Mask,
) -> Results:
    """Returns the gradients of q, k and v, or None for what is not needed.

    With attn as in `attn_output` and S̄ = scale (grad_output vᴴ) ∘ conj(1 - attn²), or 0 above the
    diagonal: grad_q = S̄ conj(k), grad_k = S̄ᵀ conj(q), grad_v = attnᴴ grad_output. Those of k and v
    are sums over the samples that share them.
    """
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


@Derivative
def attn_output_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tangent: Tensor | None,
    k_tangent: Tensor | None,
    v_tangent: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Returns the derivative of attn_output along tangents, of which any may be None, that is 0."""
    jets = _jet(q, q_tangent), _jet(k, k_tangent), _jet(v, v_tangent)
    only_output = (True, False, False, False)
    found = _derivatives([None] * 2, *jets, is_causal, scale, only_output)[0]
    return q.new_zeros(output_size(q, v)) if found is None else found


@Derivative
def attn_output_double_backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tangent: Tensor | None,
    k_tangent: Tensor | None,
    v_tangent: Tensor | None,
    is_causal: bool,
    scale: float,
    output_mask: Mask,
) -> Results:
    """Returns the derivatives along tangents of attn_output and of its gradients by q, k and v."""
    jets = _jet(q, q_tangent), _jet(k, k_tangent), _jet(v, v_tangent)
    return _derivatives(_jet(grad_output, None), *jets, is_causal, scale, output_mask)


@Derivative
def attn_output_triple_backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u_q: Tensor | None,
    u_k: Tensor | None,
    u_v: Tensor | None,
    w_grad_output: Tensor | None,
    w_q: Tensor | None,
    w_k: Tensor | None,
    w_v: Tensor | None,
    is_causal: bool,
    scale: float,
    output_mask: Mask,
) -> Results:
    """Returns the same along tangents u, differentiated along w, which grad_output has too."""
    jets = _jet(q, u_q, w_q), _jet(k, u_k, w_k), _jet(v, u_v, w_v)
    grads = _jet(grad_output, None, w_grad_output)
    return _derivatives(grads, *jets, is_causal, scale, output_mask)
