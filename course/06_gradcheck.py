r"""
6. gradcheck
============

How do you know that a backward is right? You compare it with the definition of a
derivative. We write that comparison ourselves, look at what can be wrong with *it*,
and then use PyTorch's, with all that it can check.
"""

import torch
from torch.autograd import Function, gradcheck, gradgradcheck

from drawing import plt
from exercise import about, report, returned, size

torch.manual_seed(0)

# %%
# A toy
# -----
# For :math:`f` from vectors to vectors, the Jacobian is
# :math:`J_{ij} = \partial f_i / \partial x_j`. Two ways to it:
#
# - *numerically*, a column at a time, by a central difference: move one :math:`x_j`
#   by :math:`\pm\varepsilon`;
# - *analytically*, a row at a time, by ``backward`` with a gradient of 1 for one
#   result and 0 for the others.
#
# .. math::
#
#    \left| \frac{f_i(x + \varepsilon e_j) - f_i(x - \varepsilon e_j)}{2 \varepsilon}
#    - J_{ij} \right| \le \alpha


def numerical_jacobian(function, x, eps):
    columns = []
    for j in range(x.numel()):
        step = torch.zeros_like(x).view(-1)
        step[j] = eps
        step = step.view_as(x)
        with torch.no_grad():
            columns.append(
                (function(x + step) - function(x - step)).flatten() / (2 * eps)
            )
    return torch.stack(columns, 1)


def analytical_jacobian(function, x):
    y = function(x)
    rows = []
    for one in torch.eye(y.numel(), dtype=y.dtype):
        (row,) = torch.autograd.grad(y, x, one.view_as(y), retain_graph=True)
        rows.append(row.flatten())
    return torch.stack(rows)


def toy_gradcheck(function, x, eps=1e-6, alpha=1e-5):
    difference = numerical_jacobian(function, x, eps) - analytical_jacobian(function, x)
    return bool((difference.abs() <= alpha).all())


class Cube(Function):
    """x³, with a factor in the backward that is right if it is 3."""

    factor = 3

    @classmethod
    def of(cls, factor):
        return type("Cube", (cls,), {"factor": factor}).apply

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx._forward_cls.factor * x**2


x = torch.randn(6, dtype=torch.double, requires_grad=True)
assert toy_gradcheck(Cube.of(3), x) and not toy_gradcheck(Cube.of(2), x)

# %%
# How large a step?
# -----------------
# The central difference has two errors. Cutting off Taylor's series leaves
# :math:`\varepsilon^2 f'''/6`: smaller steps are better. Rounding :math:`f` leaves
# about :math:`u\,|f| / \varepsilon`, :math:`u` the unit roundoff: larger steps are
# better. The sum has its least near :math:`\varepsilon \approx u^{1/3}`, and there
# the error is about :math:`u^{2/3}`. In double that is 2.3e-11; in float it is 1.5e-5,
# and at gradcheck's step of 1e-6 the error is 0.03, where the derivative is at most
# 0.88. **So gradients are checked in double.**

steps = torch.logspace(-12, 0, 49, dtype=torch.double)
figure, axes = plt.subplots(figsize=(5, 3.4))
best = {}
for dtype in (torch.double, torch.float):
    at = torch.linspace(0.5, 2, 20, dtype=dtype)
    errors = []
    for eps in steps.tolist():
        slope = ((at + eps).sin() - (at - eps).sin()) / (2 * eps)
        errors.append((slope.double() - at.double().cos()).abs().max().item())
    best[dtype] = steps[torch.tensor(errors).argmin()].item(), min(errors)
    axes.loglog(steps, errors, ".-", label=str(dtype))
    unit = torch.finfo(dtype).eps / 2
    axes.loglog(steps, steps**2 / 6 + unit / steps, "--", color="#999999", linewidth=1)
axes.axvline(1e-6, linestyle=":", color="#c0504d", label="gradcheck's eps")
axes.set_xlabel("eps")
axes.set_ylabel("error of the difference")
axes.set_ylim(1e-12, 10)
axes.legend(
    fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1)
)  # off the lines
figure.tight_layout()
print(
    {
        str(dtype): f"eps {eps:.0e}, error {error:.0e}"
        for dtype, (eps, error) in best.items()
    }
)
assert f"{(torch.finfo(torch.double).eps / 2) ** (2 / 3):.1e}" == "2.3e-11"
assert f"{(torch.finfo(torch.float).eps / 2) ** (2 / 3):.1e}" == "1.5e-05"
of_float = ((at + 1e-6).sin() - (at - 1e-6).sin()) / 2e-6  # `at` is float by now
print("float, eps 1e-06, error", f"{(of_float - at.cos()).abs().max().item():.2f}")
assert 0.02 < (of_float - at.cos()).abs().max() < 0.04 and at.cos().max() < 0.88
for dtype, (eps, error) in best.items():
    unit = torch.finfo(dtype).eps / 2
    assert unit ** (1 / 3) / 30 < eps < 30 * unit ** (1 / 3) and error < 30 * unit ** (
        2 / 3
    )

# %%
# The real one
# ------------
# ``gradcheck(function, inputs, eps, atol, rtol)`` *raises* if something is wrong,
# which is what a test wants, and says where; with ``raise_exception=False`` it
# returns False. It has a relative tolerance too: a difference may be
# ``atol + rtol * |numerical|``. Here it is on lesson 5's KillHead, as the lecture has it.


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


matrix = torch.randn(10, 20, dtype=torch.double, requires_grad=True)
assert gradcheck(KillHead.apply, (matrix, 4), eps=1e-6, atol=1e-4)

try:
    gradcheck(Cube.of(2), x)
except RuntimeError as error:  # a GradcheckError
    print(str(error).splitlines()[0])
else:
    raise AssertionError("a wrong backward went through")
assert gradcheck(Cube.of(3), x) and not gradcheck(Cube.of(2), x, raise_exception=False)

# %%
# In float it warns, and then fails though the formula is right:

import warnings  # noqa: E402

single = x.detach().float().requires_grad_()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    right = gradcheck(Cube.of(3), single, raise_exception=False)
print(str(caught[0].message).split(". ")[0])
assert not right and "double" in str(caught[0].message)

# %%
# A tolerance that hides
# ----------------------
# An error is only seen if it is larger than ``atol``. A gradient that is small
# everywhere passes with *any* backward.


def tiny(factor):
    return lambda x: Cube.of(factor)(x) * 1e-7


assert gradcheck(tiny(2), x)  # wrong, and not seen
assert not gradcheck(tiny(2), x, atol=1e-12, raise_exception=False)

# %%
# What else it can check
# ----------------------
# .. list-table::
#    :header-rows: 1
#
#    * - option
#      - what it does
#    * - ``fast_mode=True``
#      - one random direction instead of every entry: fast, for large inputs
#    * - ``check_undefined_grad`` (on)
#      - a result's gradient may be None, and then stands for zeros
#    * - ``check_batched_grad``
#      - the backward under vmap
#    * - ``check_forward_ad``, ``check_batched_forward_grad``
#      - jvp: forward mode; the same under vmap
#    * - ``gradgradcheck``
#      - the gradient of the gradient; ``check_fwd_over_rev`` by forward mode
#    * - complex inputs
#      - both real directions of each entry, by itself

assert gradcheck(Cube.of(3), x, fast_mode=True)
assert not gradcheck(Cube.of(2), x, fast_mode=True, raise_exception=False)
assert gradcheck(
    torch.sin,
    x,
    check_forward_ad=True,
    check_batched_grad=True,
    check_batched_forward_grad=True,
)
assert gradgradcheck(torch.sin, x, check_fwd_over_rev=True)
z = torch.randn(4, dtype=torch.cdouble, requires_grad=True)
assert gradcheck(torch.sin, z) and gradgradcheck(torch.sin, z)


class Double(Function):
    """2x: its backward is right, but for a gradient that is None (lesson 8)."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


assert gradcheck(Double.apply, x, check_undefined_grad=False)
try:
    gradcheck(Double.apply, x)
except TypeError as error:
    print(error)
else:
    raise AssertionError("None went through")

# %%
# And ``attn``, with all of it:

q, k, v = (
    torch.randn(s, dtype=torch.double, requires_grad=True)
    for s in ((2, 3), (4, 3), (4, 2))
)
assert gradcheck(
    torch.attn, (q, k, v),
    check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True,
)  # fmt: skip
assert gradgradcheck(torch.attn, (q, k, v), check_fwd_over_rev=True)

# %%
# Exercise
# --------
# Write a gradcheck of your own, for functions of **two** inputs of any sizes, whose
# result is one tensor of any size: True if the gradients of both are right, False if
# one is not. Afterwards your caller's tensors must be as they were. That includes their
# ``.grad``: one that has none must have none, and one that has one must keep it, for
# your caller may be adding up gradients. A solution is in
# :download:`course/solutions/06_gradcheck.py </../course/solutions/06_gradcheck.py>`.


def two_inputs_gradcheck(function, x, y):
    """Whether the gradients of function(x, y) for x and for y agree with central differences."""
    raise NotImplementedError  # your turn


class Product(Function):
    """x · y, each gradient times factors that are right if they are 1."""

    @staticmethod
    def forward(ctx, x, y, fx, fy):
        ctx.save_for_backward(x, y, fx, fy)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y, fx, fy = ctx.saved_tensors
        return fx * grad * y, fy * grad * x, None, None


class Mixes(Function):
    """2x + y, whose second gradient belongs to the wrong entries."""

    @staticmethod
    def forward(ctx, x, y):
        return 2 * x + y

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, grad.roll(1)


def check(attempt):
    def far_from_zero(*shape):
        drawn = torch.rand(*shape, dtype=torch.double) + 0.5
        return (drawn * (torch.randn(shape) + 0.1).sign()).requires_grad_()

    def verdict(function, x, y):
        before = x.detach().clone(), y.detach().clone()
        held = [t.grad for t in (x, y)]
        sums = [grad is not None and grad.clone() for grad in held]
        with about("two_inputs_gradcheck"):
            found = attempt(function, x, y)
        found = returned(found, (bool, torch.Tensor), "two_inputs_gradcheck")
        assert torch.equal(x, before[0]) and torch.equal(y, before[1]), (
            "The inputs were changed."
        )
        for name, t, had, was in zip("xy", (x, y), held, sums, strict=True):
            assert had is None or t.grad is not None, (
                f"The .grad that {name} had is lost."
            )
            assert had is not None or t.grad is None, (
                "The inputs have a .grad afterwards."
            )
            assert had is None or torch.equal(t.grad, was), (
                f"The .grad that {name} had is another afterwards."
            )
        assert x.requires_grad and y.requires_grad, (
            "The inputs don't require grad any more."
        )
        return bool(found)

    for _ in range(3):
        shape = size(2, 3), size(1, 3)
        x, y = far_from_zero(*shape), far_from_zero(*shape)
        right = torch.ones(shape, dtype=torch.double)

        def product(fx, fy, end=lambda z: z, x=x, y=y):
            return verdict(lambda x, y: end(Product.apply(x, y, fx, fy)), x, y)

        for name, both in (("x", (1.01 * right, right)), ("y", (right, 1.01 * right))):
            with about("a right backward"):
                assert product(right, right), "It refuses it."
            assert not product(*both), (
                f"It does not see that the gradient of {name} is wrong."
            )
            for place in (0, size(1, right.numel() - 1), -1):
                one = right.clone()
                one.view(-1)[place] = 1.01
                both = (one, right) if name == "x" else (right, one)
                assert not product(*both), (
                    f"It does not see that the gradient of {name} is wrong in one entry."
                )
        assert not verdict(Mixes.apply, x, y), (
            "It does not see that entries are mixed up."
        )
        with about("a right backward of a function that is curved"):
            assert verdict(lambda x, y: torch.exp(3 * x) * torch.sin(5 * y), x, y), (
                "It refuses it."
            )
        with about("a result with another number of entries than x"):
            assert product(right, right, torch.sum), "It refuses a right backward."
            assert not product(right, one, torch.sum), (
                "It does not see a wrong backward."
            )
        with about("inputs that have a .grad"):
            x.grad, y.grad = torch.randn_like(x), torch.randn_like(y)
            assert product(right, right), "It refuses a right backward."
        with about("inputs of different sizes"):
            other = far_from_zero(size(4, 5))
            assert verdict(
                lambda x, y: torch.outer(x.flatten(), y.flatten()), x, other
            ), "It refuses a right backward."


report(check, two_inputs_gradcheck)
