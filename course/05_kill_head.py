"""
5. KillHead: a custom Function
==============================

``KillHead`` is the first Function of the lecture "Writing an autograd function", which
comes before the lab. It takes a matrix and a number n, and returns the matrix with its
first n columns set to 0. We write it in the lecture's form, which you find in most code,
then in today's form, and ask at the end whether it had to be written at all.
"""

import torch
from torch.autograd import Function, gradcheck, gradgradcheck

from drawing import plt
from exercise import (
    about,
    apply,
    gradients,
    keeps_well,
    normal,
    passes,
    report,
    same,
    size,
)

torch.manual_seed(0)

# %%
# The classical form
# ------------------
# A Function is a class with two static methods. You never create an object of it: you
# call its method ``apply``, which it inherits.
#
# - ``forward(ctx, ...)`` gets plain tensors: autograd does not record inside it.
# - ``ctx`` keeps what ``backward`` needs. A tensor that is an input or a result goes
#   through ``ctx.save_for_backward``; all else, such as the number n, is simply an
#   attribute.
# - ``backward(ctx, ...)`` gets a gradient for each *result* and returns one for each
#   *input*, None for what is no tensor.
#
# Two things go wrong easily. ``forward`` may not change its input in place without
# saying so; so it returns a ``clone``. And the gradient that ``backward`` gets may be used by
# others too: ``clone`` again.


class KillHead(Function):
    @staticmethod
    def forward(ctx, input, n):
        ctx.n = n
        result = input.clone()
        result[:, 0:n] = 0
        return result

    @staticmethod
    def backward(ctx, grad):
        result = grad.clone()
        result[:, 0 : ctx.n] = 0
        return result, None


x = torch.arange(1.0, 7).reshape(2, 3).requires_grad_()
y = KillHead.apply(x, 2)
y.sum().backward()
print(y.detach(), x.grad, sep="\n")
assert y.tolist() == [[0, 0, 3], [0, 0, 6]] and x.grad.tolist() == [
    [0, 0, 1],
    [0, 0, 1],
]

# %%
# The formula comes from the Jacobian: a result of the first n columns depends on
# nothing, any other on the one input in its own place, with slope 1. Lesson 6 says
# what ``gradcheck`` does; here it simply says whether that is right.

checked = torch.randn(10, 20, dtype=torch.double, requires_grad=True)
assert gradcheck(KillHead.apply, (checked, 4), eps=1e-6, atol=1e-4)
assert gradgradcheck(KillHead.apply, (checked, 4))

# %%
# Today's form
# ------------
# With ``setup_context``, ``forward`` is the function itself and gets no ``ctx``. That
# lets ``torch.func`` in: vmap, grad, jvp. ``generate_vmap_rule`` derives the batched
# function from these methods, and ``jvp`` is forward mode: from the tangents of the
# inputs to those of the result. As KillHead is linear, its jvp and its backward are
# KillHead again.


class KillHeadModern(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input, n):
        result = input.clone()
        result[:, 0:n] = 0
        return result

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.n = inputs

    @staticmethod
    def backward(ctx, grad):
        return KillHeadModern.apply(grad, ctx.n), None

    @staticmethod
    def jvp(ctx, tangent, _):
        return KillHeadModern.apply(tangent, ctx.n)


assert gradcheck(
    KillHeadModern.apply, (checked, 4), check_forward_ad=True, check_batched_grad=True
)
assert gradgradcheck(KillHeadModern.apply, (checked, 4), check_fwd_over_rev=True)

many = torch.randn(5, 3, 8)
each = torch.stack([KillHead.apply(matrix, 2) for matrix in many])
assert torch.equal(torch.vmap(KillHeadModern.apply, (0, None))(many, 2), each)

# %%
# The first form raises under vmap; but a ``jvp`` has a price too: Dynamo does not
# compile a Function that has one, as of 2.13. So both are kept here, and you choose
# by what you need. Leave out ``jvp``, and today's form compiles as well.


def refusal(function, *args):
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


class KillHeadCompiled(KillHeadModern):
    """Without a jvp of its own."""

    jvp = Function.jvp


def compiled(kill):
    torch.compiler.reset()
    return torch.compile(
        lambda x: kill.apply(x, 2) * 2, fullgraph=True, backend="aot_eager"
    )


for kill, has_vmap, compiles in (
    (KillHead, False, True),
    (KillHeadModern, True, False),
    (KillHeadCompiled, True, True),
):
    no_vmap = refusal(torch.vmap(kill.apply, (0, None)), many, 2)
    not_compiled = refusal(compiled(kill), torch.randn(3, 8, requires_grad=True))
    print(f"{kill.__name__}:")
    print("  vmap:", no_vmap or "yes")
    print("  compile:", not_compiled or "yes")
    assert (not no_vmap, not not_compiled) == (has_vmap, compiles)

# %%
# In a loop
# ---------
# Now we learn with it: x is moved so that ``KillHead(x)`` comes near y, by the mean
# squared error and plain gradient descent. The head cannot move, as its gradient is
# 0, and its part of the error stays. For the rest we know all in advance. The mean is
# over 24 numbers, so a step with rate 1 takes 2/24 off each difference, and the error
# of that part shrinks by (11/12)² in each step:
#
# .. math::
#
#    L_k = c + (L_0 - c) \left(\tfrac{11}{12}\right)^{2k},
#    \qquad c = \tfrac1{24} \textstyle\sum_{i,\,j<2} y_{ij}^2


def learn(kill, x, y, n, steps=5):
    x = x.clone().requires_grad_()
    optimizer, losses = torch.optim.SGD([x], lr=1.0), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.MSELoss()(kill.apply(x, n), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return x.detach(), losses


def closed_form(first, rest, steps=5):
    return [rest + (first - rest) * (11 / 12) ** (2 * k) for k in range(steps)]


y, x = torch.randn(3, 8), torch.randn(3, 8)
rest = y[:, :2].square().sum().item() / 24
for kill in (KillHead, KillHeadModern):
    moved, losses = learn(kill, x, y, 2)
    assert torch.allclose(
        torch.tensor(losses), torch.tensor(closed_form(losses[0], rest))
    )
    assert torch.equal(moved[:, :2], x[:, :2])  # the head never moves
    assert not torch.equal(moved[:, 2:], x[:, 2:])
for step, loss in enumerate(losses, 1):
    print(f"step {step}: loss {loss:.5f}")
assert losses == sorted(losses, reverse=True) and losses[-1] > rest

figure, axes = plt.subplots(figsize=(5, 3))
_, long = learn(KillHead, x, y, 2, steps=25)
axes.plot(closed_form(long[0], rest, 25), color="#888888", label="closed form")
axes.plot(long, "o", markersize=4, label="loss")
axes.axhline(rest, linestyle=":", color="#c0504d", label="c: what the head costs")
axes.set_xlabel("step")
axes.set_ylim(0, None)
axes.legend()
figure.tight_layout()

# %%
# The lecture that this lesson comes from printed five losses, of random numbers that
# nobody has any more. They obey the same law: the first and the second give c, and c
# the other three.

printed = [1.51758, 1.31014, 1.13583, 0.98936, 0.86628]
shrinks = (11 / 12) ** 2
c = (printed[1] - shrinks * printed[0]) / (1 - shrinks)
for theirs, law in zip(printed, closed_form(printed[0], c), strict=True):
    assert abs(theirs - law) < 3e-5

# %%
# Did it have to be written?
# --------------------------
# By lesson 1's table, no: outside PyTorch, out of tensor operations, it is a
# composite. Cut the head off, and pad with zeros. All comes by itself: forward mode,
# vmap, compile.


def kill_head(x, n):
    return torch.nn.functional.pad(x[:, n:], (n, 0))


assert torch.equal(kill_head(x, 2), KillHead.apply(x, 2))
assert gradcheck(
    lambda x: kill_head(x, 4), checked, check_forward_ad=True, check_batched_grad=True
)
assert torch.equal(torch.vmap(kill_head, (0, None))(many, 2), each)
assert (
    refusal(torch.compile(kill_head, fullgraph=True, backend="aot_eager"), x, 2) == ""
)

# %%
# To multiply by a mask of zeros and ones looks just as good, and is not the same: 0 ·
# NaN is NaN, and what was to be killed lives.

mask = (torch.arange(8) >= 2).to(x.dtype)
sick = x.clone()
sick[0, 0] = torch.nan
print(
    "NaN, by a mask:",
    (sick * mask).isnan().any().item(),
    "killed:",
    kill_head(sick, 2).isnan().any().item(),
)
assert (sick * mask).isnan().any() and not kill_head(sick, 2).isnan().any()

# %%
# Exercise
# --------
# Write ``KillTail``: the *last* n columns are set to 0; ``KillTail.apply(x, 0)``
# changes nothing. The result is always a new tensor, for n = 0 too: who writes into it
# would else write into x, for this n alone. Either form will do. A solution is in
# :download:`course/solutions/05_kill_head.py </../course/solutions/05_kill_head.py>`.


class KillTail(Function):
    @staticmethod
    def forward(ctx, input, n):
        raise NotImplementedError  # your turn

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError  # your turn


def check(attempt):
    for turn in range(16):
        rows, width, sick = size(1, 4), size(2, 9), turn >= 8
        n = (0, width, size(1, width), size(1, width - 1))[turn % 4]
        x, grad = normal(rows, width), torch.randn(rows, width, dtype=torch.double)
        if sick:  # multiplied by 0, these are not 0
            for matrix in (x.detach(), grad):
                matrix[:, -1], matrix[0, 0] = torch.inf, torch.nan
        before = x.detach().clone()
        y = apply(attempt, x, n)
        apply(
            attempt, normal(2, 3), 1
        )  # what the first call keeps, it keeps for itself
        rest, tail = slice(0, width - n), slice(width - n, width)
        lives = "0 times NaN is NaN." if sick else "it is not 0."
        with about(f"a matrix ({rows}, {width}), n = {n}"):
            assert y.shape == x.shape, f"The result has the shape {tuple(y.shape)}."
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), (
                "The result shares the input's memory: return a new tensor."
            )
            assert same(y[:, rest], before[:, rest]), "What is no tail was changed."
            assert (y[:, tail] == 0).all(), f"The tail lives: {lives}"
            found = gradients(y, {"input": x, "n": n}, grad)["input"]
            assert same(found[:, rest], grad[:, rest]), "A gradient is lost."
            assert (found[:, tail] == 0).all(), (
                f"A gradient comes back from the tail: {lives}"
            )
    keeps_well(attempt, {"input": normal(3, 5), "n": 2})
    passes(gradcheck, attempt.apply, (normal(3, 5), 2))


report(check, KillTail)
