# Owner(s): ["module: autograd"]

"""``attn`` as a :class:`torch.autograd.Function`, with every formula checked.

With ``q`` (m, d), ``k`` (n, d) and ``v`` (n, e)::

    attn = tanh(q @ k.T)  # (m, n)
    output = attn @ v  # (m, e)

The formulas are derived in docs/source/notes/attn.md. Run this file for a report of
the checks; its exit status is 1 if any of them fails. Import it for :class:`Attn` and
:func:`attn_reference`.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError
from torch.utils._python_dispatch import TorchDispatchMode


class AttnResult(NamedTuple):
    """``output`` (m, e) and ``attn`` (m, n)."""

    output: Tensor
    attn: Tensor


def attn_reference(q: Tensor, k: Tensor, v: Tensor) -> AttnResult:
    """The definition, differentiated by autograd one operation at a time.

    Args:
        q (Tensor): (m, d), floating point.
        k (Tensor): (n, d), of the dtype of ``q``.
        v (Tensor): (n, e), of the dtype of ``q``.
    """
    attn = torch.tanh(torch.mm(q, k.t()))
    return AttnResult(torch.mm(attn, v), attn)


def _add(x: Optional[Tensor], y: Optional[Tensor]) -> Optional[Tensor]:
    """Sum in which None stands for zero."""
    if x is None or y is None:
        return y if x is None else x
    return x + y


class Attn(torch.autograd.Function):
    """``(q, k, v) -> (output, attn)`` with its own backward and jvp.

    A gradient or tangent that is zero comes in, and a gradient goes out, as None: no
    product with zeros is ever computed. The backward is out of place and made of
    differentiable operations, so that autograd can derive the double backward.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        attn = torch.tanh(torch.mm(q, k.t()))
        return torch.mm(attn, v), attn

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, attn = output
        # tanh' is 1 - attn^2: the output itself replaces the scores q @ k.T.
        ctx.save_for_backward(*inputs, attn)
        ctx.save_for_forward(*inputs, attn)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx, grad_output: Optional[Tensor], grad_attn: Optional[Tensor]
    ) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
        """From the gradients of the outputs to those of the inputs.

        Args:
            grad_output (Tensor, optional): (m, e).
            grad_attn (Tensor, optional): (m, n).

        Returns:
            ``grad_q`` (m, d), ``grad_k`` (n, d) and ``grad_v`` (n, e), each None where
            it is zero or not asked for.
        """
        q, k, v, attn = ctx.saved_tensors
        needs_q, needs_k, needs_v = ctx.needs_input_grad
        grad_q = grad_k = grad_v = None

        if needs_v and grad_output is not None:
            grad_v = torch.mm(attn.t(), grad_output)

        if needs_q or needs_k:
            grad = _add(
                None if grad_output is None else torch.mm(grad_output, v.t()),
                grad_attn,
            )
            if grad is not None:
                grad_scores = grad * (1 - attn * attn)
                if needs_q:
                    grad_q = torch.mm(grad_scores, k)
                if needs_k:
                    grad_k = torch.mm(grad_scores.t(), q)

        return grad_q, grad_k, grad_v

    @staticmethod
    def jvp(
        ctx, q_t: Optional[Tensor], k_t: Optional[Tensor], v_t: Optional[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """From the tangents of the inputs to those of the outputs.

        Args:
            q_t (Tensor, optional): (m, d).
            k_t (Tensor, optional): (n, d).
            v_t (Tensor, optional): (n, e).

        Returns:
            ``output_t`` (m, e) and ``attn_t`` (m, n).
        """
        q, k, v, attn = ctx.saved_tensors
        scores_t = _add(
            None if q_t is None else torch.mm(q_t, k.t()),
            None if k_t is None else torch.mm(q, k_t.t()),
        )
        if scores_t is None:
            # Only v has a tangent. Autograd takes no None for a differentiable output.
            return torch.mm(attn, v_t), torch.zeros_like(attn)
        attn_t = scores_t * (1 - attn * attn)
        output_t = torch.mm(attn_t, v)
        if v_t is not None:
            output_t = output_t + torch.mm(attn, v_t)
        return output_t, attn_t


def attn(q: Tensor, k: Tensor, v: Tensor) -> AttnResult:
    """``attn = tanh(q @ k.T)`` and ``output = attn @ v``, differentiated by :class:`Attn`.

    Args:
        q (Tensor): (m, d), floating point. Complex tensors are not supported.
        k (Tensor): (n, d), of the dtype of ``q``.
        v (Tensor): (n, e), of the dtype of ``q``.

    Raises:
        RuntimeError: if an argument is not a matrix, if the sizes d or n differ, or if
            the dtypes differ.
    """
    return AttnResult(*Attn.apply(q, k, v))


# The rest checks the above.

INPUTS = ("q", "k", "v")
OUTPUTS = ("output", "attn")

Op = Callable[[Tensor, Tensor, Tensor], AttnResult]
Tensors = Sequence[Tensor]
Maybe = Sequence[Optional[Tensor]]


class Formulas(NamedTuple):
    """What :func:`formulas` returns, named as in the note."""

    values: Tensors  # output, attn
    gradients: Tensors  # grad_q, grad_k, grad_v
    tangents: Tensors  # output_t, attn_t
    double: Tensors  # gradients of <grads, u> for grad_output, grad_attn, q, k, v


def formulas(
    inputs: Tensors, grads: Tensors, u: Tensors, *, scale: bool = False
) -> Formulas:
    """Every formula of the note, written out.

    Args:
        inputs: q (m, d), k (n, d), v (n, e).
        grads: grad_output (m, e), grad_attn (m, n).
        u: tangents of ``inputs``, or cotangents of their gradients; the same shapes.
        scale: bound each result instead: all terms count with their absolute values, and
            1 stands for |tanh|, |tanh'| and |tanh''|. This is the scale of the rounding
            errors; those of the scores, which tanh passes on, are the ``max |q||k|^T``.
    """
    if scale:
        inputs, grads, u = ([x.abs() for x in xs] for xs in (inputs, grads, u))
    (q, k, v), (grad_output, grad_attn), (u_q, u_k, u_v) = inputs, grads, u

    scores = torch.mm(q, k.t())
    if scale:
        amplified = 1 + scores.amax()
        attn = slope = curvature = amplified * torch.ones_like(scores)
    else:
        attn = torch.tanh(scores)
        slope = 1 - attn * attn
        curvature = -2 * attn * slope

    grad = torch.mm(grad_output, v.t()) + grad_attn
    grad_scores = grad * slope
    u_scores = torch.mm(u_q, k.t()) + torch.mm(q, u_k.t())
    attn_t = u_scores * slope
    output_t = torch.mm(attn_t, v) + torch.mm(attn, u_v)
    w_scores = torch.mm(grad_output, u_v.t()) * slope + u_scores * grad * curvature
    return Formulas(
        values=(torch.mm(attn, v), attn),
        gradients=(
            torch.mm(grad_scores, k),
            torch.mm(grad_scores.t(), q),
            torch.mm(attn.t(), grad_output),
        ),
        tangents=(output_t, attn_t),
        double=(
            output_t,
            attn_t,
            torch.mm(grad_scores, u_k) + torch.mm(w_scores, k),
            torch.mm(grad_scores.t(), u_q) + torch.mm(w_scores.t(), q),
            torch.mm(attn_t.t(), grad_output),
        ),
    )


def gradients(
    op: Op,
    inputs: Tensors,
    grads: Tensors,
    wanted: Sequence[str] = INPUTS,
    used: Sequence[str] = OUTPUTS,
) -> Maybe:
    """Gradients where only ``wanted`` requires grad and only ``used`` has a gradient."""
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in zip(INPUTS, inputs)]
    pairs = [
        (y, grad)
        for name, y, grad in zip(OUTPUTS, op(*leaves), grads)
        if name in used and y.requires_grad
    ]
    if not pairs:
        return None, None, None
    outputs, grads = zip(*pairs)
    asked = [x for x in leaves if x.requires_grad]
    found = iter(torch.autograd.grad(outputs, asked, grads, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in leaves]


def tangents(op: Op, inputs: Tensors, u: Maybe) -> Tensors:
    """Tangents of the outputs by forward-mode AD; None in ``u`` is no tangent."""
    with forward_ad.dual_level():
        duals = (
            x if t is None else forward_ad.make_dual(x, t) for x, t in zip(inputs, u)
        )
        pairs = [forward_ad.unpack_dual(y) for y in op(*duals)]
    return [torch.zeros_like(y) if t is None else t for y, t in pairs]


def double_backward(op: Op, inputs: Tensors, grads: Tensors, u: Tensors) -> Tensors:
    """Gradients of ``<grads of inputs, u>`` for ``grads`` and ``inputs``."""
    inputs, grads = (
        [x.detach().requires_grad_() for x in xs] for xs in (inputs, grads)
    )
    first = torch.autograd.grad(op(*inputs), inputs, grads, create_graph=True)
    return torch.autograd.grad(first, [*grads, *inputs], u)


def vjp(op: Op, inputs: Tensors, grads: Tensors) -> Tensors:
    """Values and gradients by ``torch.func``, so that :func:`torch.vmap` can batch them."""
    outputs, pullback = torch.func.vjp(op, *inputs)
    return *outputs, *pullback(AttnResult(*grads))


def stack(rows: Iterable[Tensors]) -> Tensors:
    return [torch.stack(column) for column in zip(*rows)]


class Discard(torch.autograd.Function):
    """Passes a value on, and to both of its inputs no gradient."""

    @staticmethod
    def forward(ctx, output: Tensor, attn: Tensor) -> Tensor:
        return output.sum() + attn.sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, None]:
        return None, None


class CountProducts(TorchDispatchMode):
    """Counts the matrix products that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


class Report:
    """Prints a line per check and counts the failures."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.failures = 0

    def line(self, name: str, passed: bool, *figures: str) -> None:
        self.failures += not passed
        columns = "".join(f"{figure:>12}" for figure in figures)
        print(f"{'PASS' if passed else 'FAIL'}  {name:<50}{columns}".rstrip())

    def compare(
        self, name: str, actual: Maybe, expected: Maybe, scales: Tensors
    ) -> None:
        """Each entry within ``tolerance * scale``, and None just where expected."""
        passed, largest, share = len(actual) == len(expected), 0.0, 0.0
        for x, y, scale in zip(actual, expected, scales):
            if x is None or y is None:
                passed = passed and x is y
                continue
            error, bound = (x.double() - y).abs(), self.tolerance * scale
            passed = passed and x.shape == y.shape and bool((error <= bound).all())
            largest = max(largest, error.max().item())
            share = max(share, (error / bound).max().item())
        self.line(name, passed, f"{largest:.1e}", f"{share:.3f}")

    def check(self, name: str, test: Callable[..., bool], *args, **kwargs) -> None:
        """``test`` is gradcheck or gradgradcheck."""
        try:
            self.line(name, test(*args, **kwargs))
        except GradcheckError as error:
            self.line(name, False)
            print(error)


def example() -> None:
    """Prints one call, its values and its gradients."""
    q, k, v = (
        torch.randn(*size, requires_grad=True) for size in ((2, 3), (2, 3), (2, 4))
    )
    result = attn(q, k, v)
    result.output.sum().backward()
    print("q (2, 3), k (2, 3), v (2, 4); gradients of output.sum()\n")
    for name, x in result._asdict().items():
        print(f"{name} {tuple(x.shape)}\n{x}\n")
    for name, x in zip(INPUTS, (q, k, v)):
        print(f"{name}.grad {tuple(x.shape)}\n{x.grad}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks attn as an autograd.Function.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32"),
        default="float64",
        help="of the comparisons; gradcheck is always in float64",
    )
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(args.seed)
    example()

    m, n, d, e = 3, 5, 2, 4
    shapes = ((m, d), (n, d), (n, e)), ((m, e), (m, n)), ((m, d), (n, d), (n, e))
    inputs, grads, u = (
        [torch.randn(*s, dtype=dtype) for s in group] for group in shapes
    )
    # The truth is autograd's, of the definition, in float64 and on the same numbers.
    exact = [[x.double() for x in xs] for xs in (inputs, grads, u)]
    scales = formulas(*exact, scale=True)
    # One eps, that is two roundings, per term of every sum on the way.
    report = Report((m + n + d + e) * torch.finfo(dtype).eps)

    print(f"m, n, d, e = {m}, {n}, {d}, {e}; {args.dtype}; seed {args.seed}\n")
    print(f"{'':<56}{'max error':>12}{'error/bound':>12}")

    values = attn_reference(*exact[0])
    report.compare("values", attn(*inputs), values, scales.values)

    subsets = [some for size in (1, 2, 3) for some in combinations(INPUTS, size)]
    counts_match = True
    for used in (OUTPUTS, OUTPUTS[:1], OUTPUTS[1:]):
        for wanted in subsets:
            with CountProducts() as products:
                actual = gradients(attn, inputs, grads, wanted, used)
            expected = gradients(attn_reference, *exact[:2], wanted, used)
            name = f"grad of {', '.join(wanted)} from {', '.join(used)}"
            report.compare(name, actual, expected, scales.gradients)
            # Two forward, one per gradient that is not None, one for grad_output @ v.T.
            shared = "output" in used and wanted != ("v",)
            needed = 2 + sum(x is not None for x in expected) + shared
            counts_match = counts_match and products.count == needed
    neither = gradients(lambda *x: (Discard.apply(*attn(*x)),), inputs, [None])
    report.line("grad from neither output is None", neither == [None] * 3)
    report.line("no matrix product that nobody asked for", counts_match)

    for wanted in subsets:
        actual, expected = (
            tangents(op, x, [y if i in wanted else None for i, y in zip(INPUTS, t)])
            for op, x, t in ((attn, inputs, u), (attn_reference, exact[0], exact[2]))
        )
        name = f"forward AD along {', '.join(wanted)}"
        report.compare(name, actual, expected, scales.tangents)

    truth = Formulas(
        values,
        gradients(attn_reference, *exact[:2]),
        tangents(attn_reference, *exact[::2]),
        double_backward(attn_reference, *exact),
    )
    actual = double_backward(attn, inputs, grads, u)
    report.compare("double backward", actual, truth.double, scales.double)
    written_out = formulas(inputs, grads, u)
    for name in Formulas._fields:
        report.compare(
            f"formulas of the note: {name}",
            *(getattr(x, name) for x in (written_out, truth, scales)),
        )

    batch = [[torch.stack((x, -2 * x)) for x in xs] for xs in (inputs, grads)]
    samples = [[[x[i].double() for x in xs] for xs in batch] for i in range(2)]
    bounds = [formulas(*sample, exact[2], scale=True) for sample in samples]
    report.compare(
        "vmap of values and gradients",
        torch.vmap(partial(vjp, attn))(*batch),
        stack(vjp(attn_reference, *sample) for sample in samples),
        stack((*bound.values, *bound.gradients) for bound in bounds),
    )

    leaves = [x.clone().requires_grad_() for x in exact[0]]
    for name, op in (
        ("output, attn", attn),
        ("output", lambda *x: attn(*x).output),
        ("attn", lambda *x: attn(*x).attn),
        # Of two results, gradcheck gives one at a time a gradient; of this one, both.
        ("both at once", lambda *x: torch.cat(attn(*x), dim=1)),
    ):
        report.check(
            f"gradcheck of {name}, forward AD and vmap",
            gradcheck,
            op,
            leaves,
            check_forward_ad=True,
            check_batched_grad=True,
            check_batched_forward_grad=True,
        )
        report.check(
            f"gradgradcheck of {name}, forward over reverse",
            gradgradcheck,
            op,
            leaves,
            check_fwd_over_rev=True,
        )

    print(f"\n{report.failures} failed" if report.failures else "\nAll passed")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
