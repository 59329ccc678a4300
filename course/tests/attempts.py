"""Attempts at the exercises, by lesson: the wrong ones with words of what they are told.

Those that a lesson's solution file lists as mistakes are not repeated here.
"""

from __future__ import annotations

import runpy
from math import atan
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace

import numpy as np
import torch
from torch.autograd import Function, gradcheck
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

SOLUTIONS = {
    int(f.stem[:2]): runpy.run_path(str(f))
    for f in (Path(__file__).parents[1] / "solutions").glob("*.py")
}


def forgets(*_):
    """Its `return` is forgotten."""


def of(lesson, base=None, **methods):
    """The lesson's solution, or `base`, with other static methods."""
    base = base or SOLUTIONS[lesson]["solution"]
    return type("Attempt", (base,), {k: staticmethod(f) for k, f in methods.items()})


def function(forward, backward, **others):
    return of(0, Function, forward=forward, backward=backward, **others)


def saving(forward):
    """A forward that saves all its tensors."""

    def saves(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return forward(*inputs)

    return saves


def saved(backward):
    """A backward, called with the saved tensors, then the gradients."""
    return lambda ctx, *grads: backward(*ctx.saved_tensors, *grads)


# 1: arctan by NumPy


def arctan(x):
    return torch.from_numpy(np.arctan(x.numpy()))


def arctan_kept_on_the_class(ctx, x):
    SOLUTIONS[1]["Arctan"].kept = x
    return arctan(x)


WRONG = {}
RIGHT = {}
WRONG[1] = {
    "torch.arctan as forward": (
        of(1, forward=saving(torch.arctan)),
        "forward calls torch's atan",
    ),
    "no Function": (of(0, object, apply=torch.arctan), "forward calls torch's atan"),
    "torch.atan2": (
        of(1, forward=saving(lambda x: torch.atan2(x, torch.ones_like(x)))),
        "it has to be NumPy's arctan",
    ),
    "forward forgets": (of(1, forward=forgets), "forward returns None"),
    "backward forgets": (of(1, backward=forgets), "The gradient of x is None"),
    "two gradients": (
        of(1, backward=lambda ctx, grad: (grad, grad)),
        "backward returns 2 for 1: x.",
    ),
    "kept on the class": (
        of(
            1,
            forward=arctan_kept_on_the_class,
            backward=lambda ctx, grad: grad / (1 + SOLUTIONS[1]["Arctan"].kept ** 2),
        ),
        "The gradient of x",
    ),
    "in float": (
        of(1, forward=saving(lambda x: arctan(x.float()))),
        "The result has the dtype torch.float32, not torch.float64.",
    ),
    "x detached": (
        of(1, backward=saved(lambda x, grad: grad / (1 + x.detach() ** 2))),
        "The gradient has no graph",
    ),
    "always double": (
        of(1, forward=saving(lambda x: arctan(x.double()))),
        "The result has the dtype torch.float64, not torch.float32.",
    ),
    "kept as ctx.x": (
        of(
            1,
            forward=lambda ctx, x: setattr(ctx, "x", x) or arctan(x),
            backward=lambda ctx, grad: grad / (1 + ctx.x**2),
        ),
        "x is changed after the call, and the gradients are wrong without a word",
    ),
    "writes into x": (
        of(
            1,
            forward=saving(lambda x: torch.from_numpy(np.arctan(x.numpy(), x.numpy()))),
        ),
        "The input was changed",
    ),
    "writes into grad": (
        of(1, backward=saved(lambda x, grad: grad.div_(1 + x * x))),
        "The gradient that came in was changed",
    ),
}


def filled(x):
    y = torch.zeros_like(x)
    y.copy_(torch.as_tensor(np.arctan(x.detach().numpy())))
    return y


def entry_by_entry(x):
    y = x.clone()
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = float(np.arctan(x[i, j].item()))
    return y


RIGHT[1] = {
    "setup_context": function(
        lambda x: torch.from_numpy(np.arctan(x.numpy())),
        saved(lambda x, grad: grad * (1 + x.square()).reciprocal()),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    ),
    "torch.tensor": of(
        1, forward=saving(lambda x: torch.tensor(np.arctan(x.detach().cpu().numpy())))
    ),
    # Not NumPy's, but no more visible to autograd, which is what the exercise is about.
    "math.atan": of(
        1,
        forward=saving(
            lambda x: torch.tensor(
                [atan(one) for one in x.flatten().tolist()], dtype=x.dtype
            ).view(x.shape)
        ),
    ),
    "into a tensor of its own": of(1, forward=saving(filled)),
    "entry by entry": of(1, forward=saving(entry_by_entry)),
}

# 2: the order of execution


def nexts(node):
    return [following for following, _ in node.next_functions if following is not None]


def breadth_first(grad_fn):
    order = [grad_fn]
    for node in order:
        order += [n for n in dict.fromkeys(nexts(node)) if n not in order]
    return order


def counts(grad_fn):
    """Kahn's algorithm, one node at a time."""
    waits = {}
    for node in breadth_first(grad_fn):
        for following in nexts(node):
            waits[following] = waits.get(following, 0) + 1
    ready = [grad_fn]
    while ready:
        node = ready.pop()
        yield node
        for following in nexts(node):
            waits[following] -= 1
            if not waits[following]:
                ready.append(following)


def longest_path(grad_fn):
    """By the length of the longest path to a node."""
    depth = {grad_fn: 0}
    for node in counts(grad_fn):
        for following in nexts(node):
            depth[following] = max(depth.get(following, 0), depth[node] + 1)
    return sorted(depth, key=depth.get)


def counts_nodes_takes_away_edges(grad_fn):
    """Kahn's algorithm, but an edge that is there twice counts once."""
    nodes = breadth_first(grad_fn)
    waits = {}
    for node in nodes:
        for following in {*nexts(node)}:
            waits[following] = waits.get(following, 0) + 1
    ready, order = [grad_fn], []
    while ready:
        node = ready.pop()
        order.append(node)
        for following in nexts(node):
            waits[following] -= 1
            if waits[following] == 0:
                ready.append(following)
    return order


WRONG[2] = {
    "forgets": (forgets, "execution_order returns None"),
    "breadth first": (breadth_first, "which it waits for"),
    "leaves first": (lambda node: [*counts(node)][::-1], "The first is not the node"),
    "None for a leaf's": (
        lambda node: [*counts(node), None],
        "something that is no node",
    ),
    "one chain": (
        lambda node: [node, *(one_chain(nexts(node)[0]) if nexts(node) else ())],
        "is missing",
    ),
    "counts nodes, takes away edges": (
        counts_nodes_takes_away_edges,
        "which it waits for",
    ),
    "names": (
        lambda node: [one.name() for one in counts(node)],
        "Backward0' is something that is no node.",
    ),
}
RIGHT[2] = {"Kahn's": counts, "by the longest path": longest_path}


def one_chain(node):
    return [node, *(one_chain(nexts(node)[0]) if nexts(node) else ())]


# 3: the bilinear form


def by_einsum(grad, u, a, v):
    u, a, v = u.conj(), a.conj(), v.conj()
    return [
        grad * torch.einsum("mn,n->m", a, v),
        grad * torch.einsum("m,n->mn", u, v),
        grad * torch.einsum("m,mn->n", u, a),
    ]


def bilinear(change):
    """The solution, with its three gradients changed."""
    return lambda *args: change(*SOLUTIONS[3]["solution"](*args))


WRONG[3] = {
    "forgets": (forgets, "bilinear_backward returns None"),
    "v is forgotten": (
        bilinear(lambda u, a, v: (u, a)),
        "bilinear_backward returns 2 for 3: u, a, v.",
    ),
    "None for a": (
        bilinear(lambda u, a, v: (u, None, v)),
        "The gradient of a is None: is a `return` forgotten?",
    ),
    "grad conjugated": (
        lambda grad, u, a, v: by_einsum(grad.conj(), u, a, v),
        "complex: The gradient of u is wrong.",
    ),
    "a column": (
        bilinear(lambda u, a, v: (u, a, v[:, None])),
        "The gradient of v has the shape",
    ),
    "writes into u": (
        lambda grad, u, a, v: (
            grad * (a.conj() @ v.conj()),
            grad * torch.outer(u.conj(), v.conj()),
            grad * (u.mul_(2).conj() @ a.conj()) / 2,
        ),
        "The input u was changed",
    ),
}
RIGHT[3] = {
    "einsum": by_einsum,
    "columns and rows": lambda grad, u, a, v: (
        grad * (a.conj() @ v.conj()[:, None])[:, 0],
        grad * (u.conj()[:, None] * v.conj()),
        (grad * u.conj()[None] @ a.conj())[0],
    ),
}

# 4: log(sigmoid(x))


def log_sigmoid(x):
    return x.clamp(max=0) - torch.log1p(torch.exp(-x.abs()))


def saves_the_result(ctx, x):
    y = log_sigmoid(x)
    ctx.save_for_backward(y)
    return y


def saves_two(ctx, x):
    ctx.save_for_backward(x, torch.sigmoid(-x))
    return log_sigmoid(x)


def one_beside(ctx, x):
    ctx.slope = torch.sigmoid(-x)
    return saving(log_sigmoid)(ctx, x)


def one_more(held):
    def forward(ctx, x):
        ctx.held = held(torch.sigmoid(-x))
        return saving(log_sigmoid)(ctx, x)

    return forward


def sigmoid_by_where(x):
    return torch.where(x > 0, 1 / (1 + torch.exp(-x)), x.exp() / (1 + x.exp()))


WRONG[4] = {
    "backward forgets": (of(4, backward=forgets), "The gradient of x is None"),
    "saves two": (
        of(
            4,
            forward=saves_two,
            backward=saved(lambda x, slope, grad: grad * torch.sigmoid(-x)),
        ),
        "It keeps 2 tensors, not one.",
    ),
    "one beside": (of(4, forward=one_beside), "It keeps 2 tensors, not one."),
    "another sign": (
        of(4, backward=saved(lambda x, grad: grad * torch.sigmoid(x))),
        "The gradient of x is wrong.",
    ),
    "in float": (
        of(4, forward=saving(lambda x: log_sigmoid(x.float()))),
        "The result has the dtype",
    ),
    "log1p alone": (
        of(4, forward=saving(lambda x: -torch.log1p(torch.exp(-x)))),
        "Not finite at [-1000.0",
    ),
    "one in a dict": (
        of(4, forward=one_more(lambda slope: {"slope": slope})),
        "It keeps 2 tensors, not one.",
    ),
    "one in a tuple": (
        of(4, forward=one_more(lambda slope: ("slope", (slope,)))),
        "It keeps 2 tensors, not one.",
    ),
    # The gradient is right everywhere: but that of a branch not taken is 0 times inf.
    "torch.where": (
        of(4, backward=saved(lambda x, grad: grad * sigmoid_by_where(-x))),
        "The second derivative is not finite at [-1000.0, 1000.0]",
    ),
}
RIGHT[4] = {
    "saves the result": of(
        4,
        forward=saves_the_result,
        backward=saved(lambda y, grad: -grad * torch.expm1(y)),
    ),
    "logaddexp": of(
        4, forward=saving(lambda x: -torch.logaddexp(torch.zeros_like(x), -x))
    ),
}

# 5: KillTail

kill_tail = SOLUTIONS[5]["kill_tail"]


def mask(x, n):
    return x * (torch.arange(x.shape[1]) < x.shape[1] - n)


def kept_on_the_class(ctx, input, n):
    SOLUTIONS[5]["KillTail"].n = n
    return kill_tail(input, n)


def of_eight(input, n):
    result = input.clone()
    result[:, 8 - n :] = 0
    return result


def kill_by(kill, back=None):
    def forward(ctx, input, n):
        ctx.n = n
        return kill(input, n)

    return function(forward, lambda ctx, grad: ((back or kill)(grad, ctx.n), None))


def keeps_its_result(ctx, input, n):
    ctx.n, ctx.result = n, kill_tail(input, n)
    return ctx.result


WRONG[5] = {
    "a mask": (kill_by(mask), "The tail lives: 0 times NaN is NaN."),
    "a mask in backward": (
        kill_by(kill_tail, mask),
        "A gradient comes back from the tail: 0 times NaN is NaN.",
    ),
    "n kept on the class": (
        of(
            5,
            forward=kept_on_the_class,
            backward=lambda ctx, grad: (
                kill_tail(grad, SOLUTIONS[5]["KillTail"].n),
                None,
            ),
        ),
        "n = ",
    ),
    "eight columns": (kill_by(of_eight), "n = "),
    "forward forgets": (kill_by(forgets), "forward returns None"),
    "backward forgets": (of(5, backward=forgets), "backward returns None"),
    "no gradient of n": (
        of(5, backward=lambda ctx, grad: kill_tail(grad, ctx.n)),
        "backward returns 1 for 2: input, n.",
    ),
    "0 for n": (
        of(5, backward=lambda ctx, grad: (kill_tail(grad, ctx.n), 0)),
        "The gradient of n, which is no tensor, has to be None.",
    ),
    "the head": (
        kill_by(lambda x, n: kill_tail(x.flip(1), n).flip(1)),
        "What is no tail was changed.",
    ),
    "cuts it off": (
        kill_by(lambda x, n: x[:, : x.shape[1] - n].clone()),
        "The result has the shape",
    ),
    # Then what is done to the result in place is done to the caller's tensor, for n = 0 alone.
    "the caller's own": (
        kill_by(lambda x, n: x if n == 0 else kill_tail(x, n)),
        "The result shares the input's memory",
    ),
    "kept as ctx.result": (
        of(5, forward=keeps_its_result),
        "A result is kept by its own node",
    ),
}
RIGHT[5] = {
    "cat": kill_by(
        lambda x, n: torch.cat(
            [x[:, : x.shape[1] - n], x.new_zeros(x.shape[0], n)], dim=1
        )
    ),
    "where": kill_by(
        lambda x, n: torch.where(torch.arange(x.shape[1]) < x.shape[1] - n, x, 0.0)
    ),
    "a composite": of(
        0,
        object,
        apply=lambda x, n: F.pad(x[:, : x.shape[1] - n], (0, n)),
    ),
}

# 6: a gradcheck for two inputs

compare, difference = SOLUTIONS[6]["compare"], SOLUTIONS[6]["difference"]


def jacobians(function, x, y):
    """Pairs: by differences, and by backward."""
    theirs = torch.autograd.functional.jacobian(function, (x, y))
    for which, t in enumerate((x, y)):
        columns = [
            difference(function, (x, y), which, j, 1e-6) for j in range(t.numel())
        ]
        numerical = torch.stack(columns, 1)
        yield numerical, theirs[which].reshape(numerical.shape)


def close(a, b, atol=1e-6):
    return torch.allclose(a, b, rtol=1e-4, atol=atol)


def leaves_a_gradient(function, x, y):
    function(x, y).sum().backward()
    return compare(function, (x, y), (0, 1))


def freezes(function, x, y):
    right = compare(function, (x, y), (0, 1))
    x.requires_grad_(False)
    return right


def as_many_results_as_entries(function, x, y):
    grad = torch.autograd.grad(function(x, y), (x, y), torch.ones_like(x))
    return grad[0].shape == x.shape and compare(function, (x, y), (0, 1))


def moves_the_callers(function, x, y):
    right = compare(function, (x, y), (0, 1))
    x.detach().add_(1e-6)
    return right


def loses_a_gradient(function, x, y):
    right = compare(function, (x, y), (0, 1))
    x.grad = y.grad = None
    return right


def adds_to_a_gradient(function, x, y):
    fresh = x.grad is None
    function(x, y).sum().backward()
    if fresh:
        x.grad = y.grad = None
    return compare(function, (x, y), (0, 1))


WRONG[6] = {
    "the first entry": (
        lambda *a: all(close(n[0, 0], t[0, 0]) for n, t in jacobians(*a)),
        "is wrong in one entry",
    ),
    "leaves a .grad": (leaves_a_gradient, "The inputs have a .grad afterwards."),
    "freezes": (freezes, "The inputs don't require grad any more."),
    "as many results as entries": (
        as_many_results_as_entries,
        "a result with another number of entries than x: ",
    ),
    "forgets": (forgets, "two_inputs_gradcheck returns None"),
    "always True": (
        lambda *_: True,
        "It does not see that the gradient of x is wrong.",
    ),
    "always False": (lambda *_: False, "a right backward: It refuses it."),
    "loose": (
        lambda *a: all(close(n, t, 0.1) for n, t in jacobians(*a)),
        "It does not see that the gradient of x is wrong.",
    ),
    "x alone": (
        lambda *a: close(*next(jacobians(*a))),
        "It does not see that the gradient of y is wrong.",
    ),
    "raises": (
        lambda function, x, y: gradcheck(function, (x, y)),
        "two_inputs_gradcheck: GradcheckError: Jacobian mismatch",
    ),
    "moves the inputs": (moves_the_callers, "The inputs were changed."),
    "the mean of the error": (
        lambda *a: all((n - t).mean().abs() < 1e-6 for n, t in jacobians(*a)),
        "It does not see that entries are mixed up.",
    ),
    "the last entry": (
        lambda *a: all(close(n[:, -1], t[:, -1]) for n, t in jacobians(*a)),
        "is wrong in one entry",
    ),
    # Whoever accumulates gradients would lose them.
    "sets .grad to None": (
        loses_a_gradient,
        "The .grad that x had is lost.",
    ),
    "adds to .grad": (
        adds_to_a_gradient,
        "The .grad that x had is another afterwards.",
    ),
}
RIGHT[6] = {
    "PyTorch's": lambda function, x, y: gradcheck(
        function, (x, y), raise_exception=False
    ),
    "whole Jacobians": lambda *a: all(close(n, t) for n, t in jacobians(*a)),
}

# 7: |u| v


def reduced(gradients):
    """A backward of lesson 7, from a function of u, v and the gradient."""

    def backward(u, v, grad):
        found = gradients(u, v, grad)
        return found[0].sum_to_size(u.shape), found[1].sum_to_size(v.shape)

    return saved(backward)


def real(z):
    return z.real if z.is_complex() else z


def attributes(ctx, u, v):
    ctx.u, ctx.v = u, v
    return u.abs() * v


def by_attributes(ctx, grad):
    grad_u, grad_v = SOLUTIONS[7]["gradients"](grad, ctx.u, ctx.v)
    return grad_u.sum_to_size(ctx.u.shape), grad_v.sum_to_size(ctx.v.shape)


def saves_what_it_made(ctx, u, v):
    ctx.save_for_backward(u.sgn(), v, u.abs())
    ctx.shape = u.shape
    return u.abs() * v


def from_what_it_made(ctx, grad):
    sgn, v, size = ctx.saved_tensors
    grad_u, grad_v = real(grad * v.conj()) * sgn, grad * size
    return grad_u.sum_to_size(ctx.shape), grad_v.sum_to_size(v.shape)


def divides(u, v, grad):
    return real(grad * v.conj()) * u / u.abs(), grad * u.abs()


def divides_safely(u, v, grad):
    along = real(grad * v.conj()) * u / torch.where(u == 0, 1, u.abs())
    return along, grad * u.abs()


WRONG[7] = {
    "NaN at 0": (
        of(7, backward=reduced(divides)),
        "where u is 0 in places, is wrong.",
    ),
    "attributes": (
        of(7, forward=attributes, backward=by_attributes),
        "u is changed after the call",
    ),
    "forgets": (of(7, forward=forgets), "forward returns None"),
    "swapped": (
        of(
            7,
            backward=lambda ctx, grad: SOLUTIONS[7]["AbsTimes"].backward(ctx, grad)[
                ::-1
            ],
        ),
        "The gradient of u",
    ),
    "sign": (
        of(
            7,
            backward=reduced(
                lambda u, v, g: (real(g * v.conj()) * u.sign(), g * u.abs())
            ),
        ),
        "complex, ((",
    ),
    "v not conjugated": (
        of(7, backward=reduced(lambda u, v, g: (real(g * v) * u.sgn(), g * u.abs()))),
        "The gradient of u is wrong.",
    ),
    "saves what it made": (
        of(7, forward=saves_what_it_made, backward=from_what_it_made),
        "gradgradcheck fails",
    ),
    "one gradient": (
        of(7, backward=lambda ctx, grad: grad),
        "backward returns 1 for 2: u, v.",
    ),
    "|u| + 1e-12": (
        of(
            7,
            backward=reduced(
                lambda u, v, g: (
                    real(g * v.conj()) * u / (u.abs() + 1e-12),
                    g * u.abs(),
                )
            ),
        ),
        "The gradient of u",
    ),
}
RIGHT[7] = {
    "divides where it can": of(7, backward=reduced(divides_safely)),
    "setup_context": function(
        lambda u, v: u.abs() * v,
        SOLUTIONS[7]["AbsTimes"].backward,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    ),
}

# 8: sin and cos


def unmaterialized(ctx, x):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x)
    return x.sin(), x.cos()


def sin_cos(backward):
    return function(unmaterialized, saved(backward))


def zeros_of(x, s, c):
    if s is None and c is None:
        return None
    s = x * 0 if s is None else s
    c = x * 0 if c is None else c
    return s * x.cos() - c * x.sin()


def zero_for_none(x, s, c):
    if s is None and c is None:
        return None
    return (0 if s is None else s) * x.cos() - (0 if c is None else c) * x.sin()


def zeros_at_last(x, s, c):
    parts = [g * d for g, d in ((s, x.cos()), (c, -x.sin())) if g is not None]
    return sum(parts) if parts else torch.zeros_like(x)


def swapped_slopes(x, s, c):
    return sin_cos_by_terms(x, s, c, x.sin(), x.cos())


def sin_cos_by_terms(x, s, c, of_s, of_c):
    parts = [g * d for g, d in ((s, of_s), (c, of_c)) if g is not None]
    return sum(parts[1:], parts[0]) if parts else None


def by_addcmul(x, s, c):
    if s is None:
        return c if c is None else -(c * x.sin())
    along = s * x.cos()
    return along if c is None else torch.addcmul(along, c, x.sin(), value=-1)


def saves_results(ctx, x):
    ctx.set_materialize_grads(False)
    y = x.sin(), x.cos()
    ctx.save_for_backward(*y)
    return y


def keeps_results(ctx, x):
    ctx.set_materialize_grads(False)
    ctx.sin, ctx.cos = x.sin(), x.cos()
    return ctx.sin, ctx.cos


WRONG[8] = {
    "s * 0 for None": (sin_cos(zeros_of), "only sin is used: The backward multiplies"),
    "0 for None": (
        sin_cos(zero_for_none),
        "only sin is used: The backward multiplies 2 times",
    ),
    "zeros for neither": (
        sin_cos(zeros_at_last),
        "neither is used: The gradient is not None.",
    ),
    "one result": (
        of(8, forward=saving(torch.sin)),
        "forward returns 1 for 2: sin, cos.",
    ),
    "backward forgets": (of(8, backward=forgets), "The gradient of x is None"),
    "swapped slopes": (
        sin_cos(swapped_slopes),
        "only sin is used: The gradient of x is wrong.",
    ),
    "x detached": (
        sin_cos(
            lambda x, s, c: sin_cos_by_terms(
                x, s, c, x.detach().cos(), -x.detach().sin()
            )
        ),
        "gradgradcheck fails",
    ),
    "keeps its results": (
        function(
            keeps_results,
            lambda ctx, s, c: sin_cos_by_terms(None, s, c, ctx.cos, -ctx.sin),
        ),
        "A result is kept by its own node",
    ),
    "writes into grad_sin": (
        sin_cos(
            lambda x, s, c: (
                s.mul_(x.cos())
                if c is None
                else sin_cos_by_terms(x, s, c, x.cos(), -x.sin())
            )
        ),
        "The gradient that came in was changed",
    ),
}
RIGHT[8] = {
    "addcmul": sin_cos(by_addcmul),
    "saves the results": function(
        saves_results, saved(lambda y, z, s, c: sin_cos_by_terms(y, s, c, z, -y))
    ),
}

# 9: x s + t


def scale_by(backward):
    """A Scale whose backward gets (input, scale, grad, what is wanted)."""
    return of(
        9,
        backward=lambda ctx, grad: backward(
            *ctx.saved_tensors, grad, ctx.needs_input_grad
        ),
    )


def rows(t):
    return t.reshape(-1, t.shape[-1])


def when(wanted, gradient):
    return gradient() if wanted else None


def always(*which):
    """The solution, but the gradients of `which` are computed, wanted or not."""

    def backward(x, s, grad, wants):
        wants = [wanted or i in which for i, wanted in enumerate(wants)]
        return (
            when(wants[0], lambda: grad * s),
            when(wants[1], lambda: (grad * x).sum_to_size(s.shape)),
            when(wants[2], lambda: grad.sum_to_size(s.shape)),
        )

    return scale_by(backward)


def plus(x, t):
    return x if t is None else x + t


def saving_two(forward):
    def saves(ctx, x, s, t):
        ctx.save_for_backward(x, s)
        return forward(x, s, t)

    return saves


def scaled_by_attributes(ctx, x, s, t):
    ctx.input, ctx.scale = x, s
    return plus(x * s, t)


WRONG[9] = {
    "the shift's always": (
        always(2),
        "The gradient of shift, which is no tensor, has to be None.",
    ),
    "the input's always": (
        always(0),
        "The input is frozen, and the backward does as much as before.",
    ),
    "the scale's always": (
        always(1),
        "The scale is frozen, and the backward does as much as before.",
    ),
    "forgets": (of(9, forward=forgets), "forward returns None"),
    "two gradients": (
        scale_by(lambda x, s, grad, wants: (grad * s, grad * x)),
        "backward returns 2 for 3: input, scale, shift.",
    ),
    "the shift's not summed": (
        scale_by(
            lambda x, s, g, w: (
                g * s,
                (g * x).sum_to_size(s.shape),
                when(w[2], lambda: g),
            )
        ),
        "The gradient of shift has the shape",
    ),
    "the shift is not added": (
        of(9, forward=lambda ctx, x, s, t: x * s),
        "The result is wrong.",
    ),
    "kept as ctx.input": (
        of(
            9,
            forward=scaled_by_attributes,
            backward=lambda ctx, grad: SOLUTIONS[9]["Scale"].backward(
                SimpleNamespace(
                    saved_tensors=(ctx.input, ctx.scale),
                    needs_input_grad=ctx.needs_input_grad,
                ),
                grad,
            ),
        ),
        "input is changed after the call, and the gradients are wrong without a word",
    ),
    "writes into the input": (
        of(9, forward=saving_two(lambda x, s, t: plus(x.mul_(s), t))),
        "Input 1 was changed",
    ),
    # It is right here, and raises where the others are on a GPU.
    "zeros on the CPU": (
        of(
            9,
            forward=saving_two(
                lambda x, s, t: x * s + (torch.zeros(s.shape) if t is None else t)
            ),
        ),
        "It is given tensors of another device than the CPU, and fails",
    ),
}
RIGHT[9] = {
    "diag": scale_by(
        lambda x, s, g, w: (
            when(w[0], lambda: g @ torch.diag(s)),
            when(w[1], lambda: (g * x).sum_to_size(s.shape)),
            when(w[2], lambda: g.sum_to_size(s.shape)),
        )
    ),
    "einsum": scale_by(
        lambda x, s, g, w: (
            when(w[0], lambda: torch.einsum("...n,n->...n", g, s)),
            when(w[1], lambda: torch.einsum("...n,...n->n", g, x)),
            when(w[2], lambda: rows(g).sum(0)),
        )
    ),
}

# 10: the fake kernel

pairwise_fake = SOLUTIONS[10]["solution"]


def promoted(x):
    return torch.promote_types(x.dtype, torch.float)


WRONG[10] = {
    "meta": (
        lambda x, y: torch.empty(
            pairwise_fake(x, y).shape, dtype=promoted(x), device="meta"
        ),
        "cpu: The device is meta, not cpu.",
    ),
    "forgets": (forgets, "pairwise_fake returns None"),
    "turned around": (lambda x, y: pairwise_fake(y, x), "The shape is"),
    "a view": (
        lambda x, y: pairwise_fake(y, x).mT,
        "The strides are",
    ),
    "float always": (
        lambda x, y: pairwise_fake(x, y).float(),
        "The dtype is torch.float32, not torch.float64.",
    ),
    "a shape": (
        lambda x, y: (*x.shape[:-1], y.shape[-2]),
        "pairwise_fake returns tuple, where Tensor is expected.",
    ),
    "int of sizes": (
        lambda x, y: x.new_empty(
            *(int(n) for n in x.shape[:-1]), int(y.shape[-2]), dtype=promoted(x)
        ),
        "Sizes became fixed numbers",
    ),
    "meta or cpu": (
        lambda x, y: torch.empty(
            *x.shape[:-1],
            y.shape[-2],
            dtype=promoted(x),
            device="meta" if x.device.type == "meta" else "cpu",
        ),
        "The device is cpu, not cuda:0.",
    ),
}
RIGHT[10] = {
    "by matmul": lambda x, y: torch.matmul(x, y.mT).to(promoted(x)),
    "empty": lambda x, y: torch.empty(
        *x.shape[:-1], y.size(-2), dtype=promoted(x), device=x.device
    ),
    # Its strides differ where a size is 1, which nobody can tell.
    "einsum": lambda x, y: torch.einsum("...nd,...md->...nm", x, y).to(promoted(x)),
}

# 11: the arithmetic of a launch


def tiles(place, number=lambda blocks: blocks):
    """A launch by `place`(block, thread, down, across, tile); entries outside are None."""

    def launch(rows, columns, tile):
        down, across = -(-rows // tile), -(-columns // tile)

        def entry(block, thread):
            row, column = place(block, thread, down, across, tile)
            return (row, column) if row < rows and column < columns else None

        return number(down * across), entry

    return launch


def row_major(block, thread, down, across, tile):
    (i, j), (r, c) = divmod(block, across), divmod(thread, tile)
    return i * tile + r, j * tile + c


def down_columns(block, thread, down, across, tile):
    j, i = divmod(block, down)
    return row_major(i * across + j, thread, down, across, tile)


def listed(rows, columns, tile):
    """All entries in advance."""
    origins = [(i, j) for i in range(0, rows, tile) for j in range(0, columns, tile)]
    shifts = [(r, c) for r in range(tile) for c in range(tile)]
    made = {
        (block, thread): (i + r, j + c)
        for block, (i, j) in enumerate(origins)
        for thread, (r, c) in enumerate(shifts)
        if i + r < rows and j + c < columns
    }
    return len(origins), lambda block, thread: made.get((block, thread))


WRONG[11] = {
    "down columns": (tiles(down_columns), "Block 1 has the tile (1, 0), not (0, 1)."),
    "forgets": (forgets, "launch returns None"),
    "no blocks": (lambda *a: listed(*a)[1], "launch returns 1 for 2: blocks, entry."),
    "entry forgets": (lambda *a: (listed(*a)[0], forgets), "Some entry has no thread."),
    "no whole number": (
        tiles(row_major, float),
        "launch, for the number of blocks, returns",
    ),
    "one block more": (
        tiles(row_major, lambda n: n + 1),
        "7 blocks, where 6 are needed.",
    ),
    "the same tile": (
        tiles(lambda block, *others: row_major(0, *others)),
        "Two threads have the same entry.",
    ),
    "(column, row)": (
        lambda *sizes: (
            listed(*sizes)[0],
            lambda b, t: (e := listed(*sizes)[1](b, t)) and e[::-1],
        ),
        "is outside of C.",
    ),
}
RIGHT[11] = {
    "divmod": tiles(row_major),
    "listed": listed,
    "entries as lists": lambda *sizes: [
        listed(*sizes)[0],
        lambda block, thread: (e := listed(*sizes)[1](block, thread)) and [*e],
    ],
}


# 12: times as fast

seconds = SOLUTIONS[12]["seconds"]


def in_turn(summary, rounds=60):
    return lambda f, g, clock: summary(
        [(seconds(f, clock), seconds(g, clock)) for _ in range(rounds)]
    )


def medians(f, g, clock):
    """As the lesson itself measures: the order turned around in each round."""
    times = {f: [], g: []}
    for turn in range(60):
        for run in (f, g)[:: 1 if turn % 2 else -1]:
            times[run].append(seconds(run, clock))
    return median(times[g]) / median(times[f])


def abba(f, g, clock):
    found = []
    for _ in range(40):
        a, b, c, d = (seconds(run, clock) for run in (f, g, g, f))
        found.append((b + c) / (a + d))
    return median(found)


WRONG[12] = {
    "forgets": (forgets, "times_as_fast returns None"),
    "one call each": (in_turn(lambda ts: ts[0][1] / ts[0][0], 1), "Too few calls"),
    "the mean of ratios": (
        in_turn(lambda ts: mean(g / f for f, g in ts)),
        "on a machine with hiccups",
    ),
    "a difference": (
        in_turn(lambda ts: median(g - f for f, g in ts)),
        "on a quiet machine",
    ),
    "the slowest": (
        in_turn(lambda ts: max(g for _, g in ts) / max(f for f, _ in ts)),
        "on a machine",
    ),
    "the first pair of many": (
        in_turn(lambda ts: ts[0][1] / ts[0][0]),
        "on a machine with hiccups",
    ),
}
RIGHT[12] = {
    "f, g, g, f": abba,
    "the ratio of medians": medians,
    # The later one of a pair is slower, by less than the checker allows.
    "f always before g": in_turn(lambda ts: median(g / f for f, g in ts)),
}

# 13: right once, wrong twice

Attn = SOLUTIONS[13]["Attn"]


def numbers(ctx, grad_output, grad_attn):
    """What SavesNumbers does."""
    q, k, v, attn = (t.data for t in ctx.saved_tensors)
    grad = torch.zeros_like(attn) if grad_attn is None else grad_attn
    grad = grad if grad_output is None else grad + grad_output @ v.T
    grad = grad * (1 - attn * attn)
    grad_v = None if grad_output is None else attn.T @ grad_output
    return grad @ k, grad.T @ q, grad_v


def cuts_grad_attn(ctx, grad_output, grad_attn):
    cut = None if grad_attn is None else grad_attn.detach()
    return Attn.backward(ctx, grad_output, cut)


def wants_tensors(ctx, grad_output, grad_attn):
    q, k, v, attn = ctx.saved_tensors
    grad = (grad_output @ v.T + grad_attn) * (1 - attn * attn)
    return grad @ k, grad.T @ q, attn.T @ grad_output


def half_of_both(ctx, grad_output, grad_attn):
    """The second derivative is wrong, and the first where both results are used."""
    if grad_output is not None and grad_attn is not None:
        grad_attn = grad_attn / 2
    return SOLUTIONS[13]["Frozen"].backward(ctx, grad_output, grad_attn)


def raises_under_create_graph(ctx, *grads):
    if torch.is_grad_enabled():
        raise RuntimeError("not twice")
    return Attn.backward(ctx, *grads)


WRONG[13] = {
    "SavesNumbers": (of(13, Attn, backward=numbers), "those of SavesNumbers"),
    "backward forgets": (of(13, Attn, backward=forgets), "backward returns None"),
    "two gradients": (
        of(13, Attn, backward=lambda ctx, *grads: Attn.backward(ctx, *grads)[:2]),
        "backward returns 2 for 3: q, k, v.",
    ),
    "one result": (
        of(13, Attn, forward=lambda q, k, v: Attn.forward(q, k, v)[0]),
        "forward returns 1 for 2: output, attn.",
    ),
    "wants tensors": (
        of(13, Attn, backward=wants_tensors),
        "gradcheck of the",
    ),
    "k for q": (
        of(
            13,
            Attn,
            backward=lambda ctx, *g: (
                2 * Attn.backward(ctx, *g)[0],
                *Attn.backward(ctx, *g)[1:],
            ),
        ),
        "gradcheck of the first result fails, which is too easy to find: GradcheckError: J",
    ),
    "half of both": (
        of(13, SOLUTIONS[13]["Frozen"], backward=half_of_both),
        "gradcheck of both results at once fails, which is too easy to find",
    ),
    "raises under create_graph": (
        of(13, Attn, backward=raises_under_create_graph),
        "backward, under create_graph: RuntimeError: not twice",
    ),
}
RIGHT[13] = {
    "grad_attn detached": of(13, Attn, backward=cuts_grad_attn),
    "once": of(13, Attn, backward=once_differentiable(Attn.backward)),
}

# 14: the entry of log_add

ENTRY = SOLUTIONS[14]["entry"]()


def entry(a=ENTRY["a"], b=ENTRY["b"], name=ENTRY["name"]):
    return lambda: {"name": name, "a": a, "b": b}


WRONG[14] = {
    "another name": (
        entry(name="log_sum(Tensor a, Tensor b) -> Tensor"),
        "It is called log_sum, not log_add.",
    ),
    "int and bool": (
        entry(name="log_add(int a, bool b) -> Tensor"),
        "It takes int a, bool b, not Tensor a, Tensor b.",
    ),
    "a list and an option": (
        entry(name="log_add(Tensor[] a, Tensor? b) -> Tensor"),
        "It takes Tensor[] a, Tensor? b, not",
    ),
    "a conditional": (
        entry("grad * (a - b).sigmoid() if True else grad"),
        "the formula for a: C++ does not know",
    ),
    "torch.": (entry("grad * torch.sigmoid(a - b)"), "C++ does not know torch"),
    "**": (entry("grad * (a - b).sigmoid() ** 1"), "C++ does not know"),
    "a keyword": (
        entry("grad * (a - b).sigmoid().clamp(min=0)"),
        "C++ does not know",
    ),
    "1 / 2": (
        entry(b="1 / 2 * grad * (1 + ((b - a) * 0.5).tanh())"),
        "the formula for b: 1 / 2 is a division of whole numbers in C++.",
    ),
    "forgets": (forgets, "entry returns None"),
    "without grad": (entry("(a - b).sigmoid()"), "The gradient of a is wrong."),
    "three": (
        entry(name="log_add(Tensor a, Tensor b, Tensor c) -> Tensor"),
        "It takes Tensor a, Tensor b, Tensor c, not",
    ),
    "two results": (
        entry(name="log_add(Tensor a, Tensor b) -> (Tensor, Tensor)"),
        "It returns a Tensor.",
    ),
    "in place": (
        entry(name="log_add(Tensor(a!) a, Tensor b) -> Tensor(a!)"),
        "PyTorch's parser does not take the schema",
    ),
    "another's method": (
        entry("grad * (a - b).numpy()"),
        "C++ does not know (a - b).numpy",
    ),
    "auto_element_wise": (
        lambda: {**entry()(), "result": "auto_element_wise"},
        "auto_element_wise is for functions of one tensor",
    ),
    "in place on grad": (
        entry("grad.mul_((a - b).sigmoid())"),
        "the formula for a: mul_ changes a tensor in place",
    ),
    "a key too many": (
        lambda: {**entry()(), "c": "grad"},
        "There is a formula for c, which is no argument of log_add.",
    ),
    "C++'s own": (
        entry("grad * at::sigmoid(a - b)"),
        "the formula for a: 'grad * at::sigmoid(a - b)' is no expression of both languages",
    ),
    "on the CPU": (
        entry("grad * (a - b).sigmoid().cpu()"),
        "the formula for a, on another device than the CPU",
    ),
    "auto_linear": (
        lambda: {**entry()(), "result": "auto_linear"},
        "log_add is not linear",
    ),
    "a wrong tangent": (
        lambda: {**entry()(), "result": "a_t + b_t"},
        "The tangent is wrong.",
    ),
}
RIGHT[14] = {
    "by the result": entry("grad * (a - result).exp()", "grad * (b - result).exp()"),
    "by a quotient": entry("grad / (1 + (b - a).exp())", "grad / ((a - b).exp() + 1)"),
    "by tanh": entry(b="0.5 * grad * (1 + ((b - a) / 2).tanh())"),
    "in two lines": entry("grad *\n  (a - b).sigmoid()"),
    "with a tangent": lambda: {
        **entry()(),
        "result": "a_t * (a_p - result).exp() + b_t * (b_p - result).exp()",
    },
}

# 15: kinds of operators

kind = SOLUTIONS[15]["kind"]


def asks_the_node(operator, *args):
    """By a result's node: a composite's is of another operator."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    inside = "CompositeImplicitAutograd"
    if has(operator.name(), inside):
        return "composite"
    with torch.enable_grad():
        fresh = [
            a.detach().requires_grad_()
            if isinstance(a, torch.Tensor) and a.is_floating_point()
            else a
            for a in args
        ]
        result = operator(*fresh)
    results = result if isinstance(result, (tuple, list)) else [result]
    return "formula" if any(r.grad_fn for r in results) else "none"


WRONG[15] = {
    "forgets": (forgets, "kind returns None"),
    "always a formula": (lambda *_: "formula", "aten.narrow.default: composite, not"),
    "a truth": (lambda op, *a: kind(op, *a) == "formula", "kind returns bool"),
    "by the device's kernel": (
        lambda op, *a: (
            "formula"
            if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU")
            else "composite"
        ),
        "aten.sort.default: formula, not composite.",
    ),
    "by the result's dtype": (
        lambda op, *a: kind(op, *a) if kind(op, *a) != "none" else "formula",
        "aten.eq.Tensor: none, not formula.",
    ),
}
RIGHT[15] = {"by any result": asks_the_node}

# 16: the FLOPs of attn


def flops(q, k, v):
    return SOLUTIONS[16]["flops"](q, k, v)


WRONG[16] = {
    "forgets": (forgets, "without a batch: flops returns None"),
    "a float": (
        lambda *shapes: float(flops(*shapes)),
        "flops returns float, where int is expected.",
    ),
    "no batch": (
        lambda q, k, v: 2 * q[0] * k[0] * (k[1] + v[1]),
        "with a batch of (3,): ",
    ),
    "one batch dimension": (
        lambda q, k, v: flops(q, k, v) if len(q) < 4 else flops(q[1:], k[1:], v[1:]),
        "with a batch of (2, 3): ",
    ),
    "e is d": (lambda q, k, v: flops(q, k, k), "without a batch: "),
}
RIGHT[16] = {
    "two products": lambda q, k, v: (
        2 * q.numel() * k[-2] + 2 * q[:-1].numel() * v[-2] * v[-1]
    ),
    "of empty tensors": lambda q, k, v: (
        2 * (torch.empty(q) @ torch.empty(k).mT).numel() * (k[-1] + v[-1])
    ),
}
