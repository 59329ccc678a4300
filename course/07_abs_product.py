r"""
7. abs(u · v): two inputs, a kink, complex numbers, broadcasting
================================================================

One small function, :math:`f(u, v) = |u v|`, and nearly all that can happen to an
elementwise backward.
"""

import torch
from torch.autograd import Function, gradcheck, gradgradcheck

from drawing import plt
from exercise import (
    about,
    apply,
    compare,
    gradients,
    keeps_well,
    normal,
    passes,
    report,
    size,
)

torch.manual_seed(0)

# %%
# Both inputs are saved
# ---------------------
# :math:`|uv| = |u|\,|v|`, so
# :math:`\partial f / \partial u = \operatorname{sign}(u)\,|v|` and
# :math:`\partial f / \partial v = |u| \operatorname{sign}(v)`: each gradient needs
# both inputs.


class AbsProduct(Function):
    @staticmethod
    def forward(ctx, u, v):
        ctx.save_for_backward(u, v)
        return (u * v).abs()

    @staticmethod
    def backward(ctx, grad):
        u, v = ctx.saved_tensors
        return grad * u.sign() * v.abs(), grad * u.abs() * v.sign()


u, v = (torch.randn(6, dtype=torch.double, requires_grad=True) for _ in range(2))
assert gradcheck(AbsProduct.apply, (u, v)) and gradgradcheck(AbsProduct.apply, (u, v))

# %%
# They have to go through ``save_for_backward``, and not simply be attributes of
# ``ctx``. For an input that would work; but a change in place would go unnoticed, and
# a *result* that is kept as an attribute keeps itself alive.


class Careless(Function):
    @staticmethod
    def forward(ctx, u, v):
        ctx.u, ctx.v = u, v
        return (u * v).abs()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.u.sign() * ctx.v.abs(), grad * ctx.u.abs() * ctx.v.sign()


def gradient_after_a_change(function):
    other = v.detach().clone()
    y = function.apply(u, other)
    other.mul_(10)
    return torch.autograd.grad(y.sum(), u)[0]


assert torch.allclose(
    gradient_after_a_change(Careless), 10 * u.sign() * v.abs()
)  # 10 times too large
try:
    gradient_after_a_change(AbsProduct)
except RuntimeError as error:
    print(str(error).split(": [")[0])
else:
    raise AssertionError("the change went unnoticed")

# %%
# The kink
# --------
# At u = 0 there is no derivative: from the left the slope is ``-|v|``, from the right
# ``|v|``. ``sign(0) = 0`` picks the middle, and that is a *subgradient*, a good
# choice. And gradcheck? Its difference is *central*: it moves to both sides, sees
# ``|v| ε`` twice, and finds a slope of
# 0. It passes, by luck: had we chosen 1 for sign(0), it would not.

at_zero = torch.zeros(1, dtype=torch.double, requires_grad=True)
three = torch.full((1,), 3.0, dtype=torch.double)
assert gradcheck(AbsProduct.apply, (at_zero, three))


class OtherSlope(AbsProduct):
    @staticmethod
    def backward(ctx, grad):
        u, v = ctx.saved_tensors
        return grad * torch.where(u >= 0, 1.0, -1.0) * v.abs(), None


assert not gradcheck(OtherSlope.apply, (at_zero, three), raise_exception=False)

# %%
# The second derivative is worse. It does not exist there at all, but the formula
# gives 0 for it and gradgradcheck's differences a huge number. So an operator's
# samples keep away from a kink.

assert not gradgradcheck(
    AbsProduct.apply, (at_zero, three.clone().requires_grad_()), raise_exception=False
)

line = (torch.arange(-100, 101, dtype=torch.double) / 50).requires_grad_()
y = AbsProduct.apply(line, torch.tensor(1.5, dtype=torch.double).expand(201))
(slope,) = torch.autograd.grad(y.sum(), line)
figure, axes = plt.subplots(figsize=(5, 2.8))
axes.plot(line.detach(), y.detach(), label="|u v|, v = 1.5")
axes.plot(line.detach(), slope, ".", markersize=3, label="what backward says")
axes.set_xlabel("u")
axes.legend()
figure.tight_layout()
assert slope[100] == 0 and slope[101] == 1.5 and slope[99] == -1.5

# %%
# Complex numbers: a new derivation
# ---------------------------------
# For complex z, ``sign`` is not defined; ``sgn(z) = z / |z|`` is what takes its
# place. The result :math:`|z|` is real, and PyTorch's gradient of a real function is
# :math:`\partial L / \partial x + i\,\partial L / \partial y`, which for :math:`|z|`
# is sgn(z). With z = u v, by the rule for products, which conjugates the factor that
# stands beside (lesson 3):
#
# .. math::
#
#    G_u = g \operatorname{sgn}(uv)\,\bar v = g \operatorname{sgn}(u)\,|v|,
#    \qquad G_v = g\,|u| \operatorname{sgn}(v)
#
# The same formula with sgn for sign; but that had to be derived, not guessed.

z, w = (torch.randn(5, dtype=torch.cdouble, requires_grad=True) for _ in range(2))
try:
    AbsProduct.apply(z, w).sum().backward()
except RuntimeError as error:
    print(error)
else:
    raise AssertionError("sign of a complex number")


class AbsProductComplex(AbsProduct):
    @staticmethod
    def backward(ctx, grad):
        u, v = ctx.saved_tensors
        return grad * u.sgn() * v.abs(), grad * u.abs() * v.sgn()


assert gradcheck(AbsProductComplex.apply, (z, w)) and gradgradcheck(
    AbsProductComplex.apply, (z, w)
)
assert gradcheck(AbsProductComplex.apply, (u, v))

# %%
# Broadcasting: a reduction
# -------------------------
# u of shape (4, 1) and v of shape (3) give a result (4, 3), and a gradient of that
# shape comes in. Each gradient that goes out must have the shape of its *input*: what
# was repeated is summed (lesson 3). Autograd checks the shape, and would even sum for
# us; it is better to say so ourselves. ``sum_to_size`` does it.

column = torch.randn(4, 1, dtype=torch.double, requires_grad=True)
row = torch.randn(3, dtype=torch.double, requires_grad=True)


class AbsProductBroadcast(AbsProduct):
    @staticmethod
    def backward(ctx, grad):
        u, v = ctx.saved_tensors
        grad_u, grad_v = grad * u.sgn() * v.abs(), grad * u.abs() * v.sgn()
        return grad_u.sum_to_size(u.shape), grad_v.sum_to_size(v.shape)


y = AbsProductBroadcast.apply(column, row)
assert y.shape == (4, 3)
(grad,) = torch.autograd.grad(y.sum(), column)
assert torch.allclose(grad, column.sign() * row.abs().sum())
assert gradcheck(AbsProductBroadcast.apply, (column, row))
assert gradgradcheck(AbsProductBroadcast.apply, (column, row))

# %%
# Exercise
# --------
# Write :math:`h(u, v) = |u|\,v`, for real and complex numbers, with broadcasting.
# Derive the gradient of u for complex numbers first: there the result is complex, and
# u's part in it real, so a real part has to be taken somewhere. A solution is in
# :download:`course/solutions/07_abs_product.py
# </../course/solutions/07_abs_product.py>`.


class AbsTimes(Function):
    @staticmethod
    def forward(ctx, u, v):
        raise NotImplementedError  # your turn

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError  # your turn


def check(attempt):
    for turn in range(24):
        dtype = (torch.double, torch.cdouble)[turn % 2]
        n, m = size(2, 4), size(2, 4)
        shapes = (((n,), (n,)), ((n, 1), (m,)), ((n, m), ()), ((), (n,)))[turn // 2 % 4]
        pair = [normal(*shape, dtype=dtype) for shape in shapes]
        with about(f"{'complex' if dtype.is_complex else 'real'}, {shapes}"):
            small = (None, 0, 1e-20)[turn // 8]
            if small is not None and shapes[0]:
                pair[0].detach()[0] *= small
            u, v = pair
            y, wanted = apply(attempt, u, v), u.abs() * v
            at = f", where u is {small} in places," if turn >= 8 else ""
            compare(f"The result{at}", y, wanted)
            grad = torch.randn_like(wanted)
            apply(attempt, v, u)  # what the first call keeps, it keeps for itself
            found = gradients(y, {"u": u, "v": v}, grad)
            truths = torch.autograd.grad(wanted, pair, grad)
            for name, truth in zip("uv", truths, strict=True):
                compare(f"The gradient of {name}{at}", found[name], truth)
    u, v = normal(5, dtype=torch.cdouble), normal(5, dtype=torch.cdouble)
    passes(gradgradcheck, attempt.apply, (u, v))
    keeps_well(attempt, {"u": u, "v": v})


report(check, AbsTimes)
