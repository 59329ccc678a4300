r"""
9. A linear layer: Function, functional, Module
===============================================

PyTorch has every layer three times: a Function or an operator that knows its
gradient, a *functional* that people call, and a ``Module`` that owns the parameters.
We build the three for a linear layer, :math:`Y = X W^\top + b`, beside PyTorch's own.
"""

import inspect
import math

import torch
from torch import nn
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from drawing import draw, plt
from exercise import (
    Calls,
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
# The Function
# ------------
# Lesson 3 derived it for X (N, i), W (o, i) and b (o): :math:`G_X = G W`,
# :math:`G_W = G^\top X`, :math:`G_b = \sum_n G_n`. With batch dimensions, X is (\*,
# i), and all of them together are the N: flattened for the two sums, kept for
# :math:`G_X`. The bias may be None, which is no tensor, and gets None back; and a
# gradient that nobody wants is not computed (lesson 8).


class LinearFunction(Function):
    @staticmethod
    def forward(input, weight, bias):
        output = input @ weight.t()
        return output if bias is None else output + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, weight, bias = inputs
        ctx.save_for_backward(input, weight)  # the bias is not needed

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[0]:
            grad_input = grad @ weight
        if ctx.needs_input_grad[1]:
            grad_weight = rows.t() @ input.reshape(-1, input.shape[-1])
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_input, grad_weight, grad_bias


# %%
# The functional
# --------------
# ``apply`` works, but nobody wants to call it: it has no docstring and no signature,
# and until some releases ago it took no keywords and no defaults. So one wraps it, if
# only in a line:

linear_apply = LinearFunction.apply


def linear(input, weight, bias=None):
    """input @ weight.T + bias.

    Args:
        input (Tensor): (\\*, in_features).
        weight (Tensor): (out_features, in_features).
        bias (Tensor, optional): (out_features).

    Returns:
        Tensor: (\\*, out_features).
    """
    return linear_apply(input, weight, bias)


weight, bias = normal(2, 3), normal(2)
for input in (normal(5, 3), normal(3), normal(2, 4, 3)):
    for b in (bias, None):
        assert torch.allclose(
            linear(input, weight, b), nn.functional.linear(input, weight, b)
        )
        assert gradcheck(linear, (input, weight, b)) and gradgradcheck(
            linear, (input, weight, b)
        )
assert torch.equal(linear(input, weight=weight, bias=bias), linear(input, weight, bias))
print("apply:", inspect.signature(linear_apply), "- linear:", inspect.signature(linear))
assert str(inspect.signature(linear_apply)) == "(*args, **kwargs)"

# %%
# Only what is wanted: how many products does the backward run?


class Count(TorchDispatchMode):
    """How often operators of these names are called."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.count = names, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in self.names
        return func(*args, **(kwargs or {}))


def products(input, weight, bias):
    loss = linear(input, weight, bias).sum()
    with Count("mm", "bmm", "addmm") as mode:
        loss.backward()
    return mode.count


x = normal(5, 3)
counted = {
    "all": products(x, weight, bias),
    "the weight is frozen": products(x, weight.detach(), bias),
    "the first layer": products(x.detach(), weight, bias),
    "only the bias": products(x.detach(), weight.detach(), bias),
}
print(counted)
assert list(counted.values()) == [2, 1, 1, 0]

# %%
# The Module
# ----------
# A ``Module`` owns its parameters. An ``nn.Parameter`` that is set as an attribute is
# found by ``parameters()``, ``state_dict()`` and ``to()``; a plain tensor is not. A
# bias that is left out is *registered as None*: the attribute is there, and nothing
# is saved for it.


class Linear(nn.Module):
    """:func:`linear` with a weight and a bias of its own.

    Args:
        in_features (int): the last size of the input.
        out_features (int): the last size of the output.
        bias (bool): whether there is one.

    Both are drawn evenly from ±1 / sqrt(in_features), like those of :class:`torch.nn.Linear`.
    """

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        about = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **about))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, **about))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input):
        return linear(input, self.weight, self.bias)

    def extra_repr(self):
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


layer = Linear(3, 2)
print(layer, "|", Linear(3, 2, bias=False))
assert str(layer) == str(nn.Linear(3, 2))
assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
assert list(Linear(3, 2, bias=False).state_dict()) == ["weight"]
assert Linear(3, 2, bias=False).bias is None
assert layer.weight.abs().max() <= 1 / math.sqrt(3)

# %%
# It takes the place of PyTorch's: the same seed gives the same parameters, the
# parameters of one can be loaded by the other, and they learn the same.

torch.manual_seed(1)
ours = nn.Sequential(Linear(4, 8), nn.Tanh(), Linear(8, 1))
torch.manual_seed(1)
theirs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
    assert torch.equal(a, b)
theirs.load_state_dict(ours.state_dict())

data = torch.randn(64, 4)
target = (data[:, :1] * data[:, 1:2]).tanh()


def learn(model, steps=60):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


losses = learn(ours), learn(theirs)
assert (
    torch.allclose(*map(torch.tensor, losses), rtol=1e-3)
    and losses[0][-1] < losses[0][0]
)

figure, (above, below) = plt.subplots(2, 1, figsize=(5, 6))
above.plot(losses[1], color="#bbbbbb", linewidth=5, label="nn.Linear")
above.plot(losses[0], color="#2d5fa0", linewidth=1.5, label="ours")
above.set_xlabel("step")
above.set_title("loss", fontsize=10)
above.legend()
graph = draw(below, "the graph of one layer", Linear(4, 2)(data).grad_fn)
figure.tight_layout()
assert len(graph) == 3  # the Function's node, the weight, the bias

# %%
# Whether such a layer is worth it is lesson 12's question; by lesson 1's table it is
# a composite, and needs no Function at all. In lesson 10 it gets a kernel, and then
# it does.
#
# Exercise
# --------
# Write ``Scale``, a Function: :math:`y = x \circ s + t` for x (\*, n), s (n) and t
# (n) or None, on any device. It computes no gradient that is not wanted. A solution
# is in :download:`course/solutions/09_linear.py </../course/solutions/09_linear.py>`.


class Scale(Function):
    @staticmethod
    def forward(ctx, input, scale, shift):
        raise NotImplementedError  # your turn

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError  # your turn


def check(attempt):
    for turn in range(8):
        n = size(2, 4)
        shape = ((n,), (size(2, 4), n), (2, size(2, 4), n), (1, n))[turn % 4]
        input, scale, shift = normal(*shape), normal(n), normal(n) if turn < 4 else None
        given = {"input": input, "scale": scale, "shift": shift}
        with about(f"input {shape}, {'no shift' if shift is None else 'a shift'}"):
            wanted = input * scale + (0 if shift is None else shift)
            y = apply(attempt, input, scale, shift)
            compare("The result", y, wanted)
            apply(attempt, normal(3, 2), normal(2), None)
            grad = torch.randn_like(wanted)
            found = gradients(y, given, grad)
            truths = torch.autograd.grad(wanted, [given[name] for name in found], grad)
            for name, truth in zip(found, truths, strict=True):
                compare(f"The gradient of {name}", found[name], truth)

    def work(given):
        """How many operators the backward calls."""
        grad = torch.randn_like(given["input"])
        y = apply(attempt, *given.values())
        wanted = [t for t in given.values() if t is not None and t.requires_grad]
        with about("backward"), Calls() as calls:
            torch.autograd.grad(y, wanted, grad)
        return len(calls.names)

    given = {"input": normal(4, 3), "scale": normal(3), "shift": normal(3)}
    for name in given:
        frozen = given | {name: given[name].detach()}
        assert work(frozen) < work(given), (
            f"The {name} is frozen, and the backward does as much as before."
        )
    assert work(given | {"shift": None}) < work(given), (
        "There is no shift, and the backward does as much as before."
    )
    keeps_well(attempt, given)
    for shift in (given["shift"], None):
        # The device "meta" is everywhere. It has shapes, and no numbers.
        far = (given["input"], given["scale"], shift)
        far = [None if t is None else t.to("meta") for t in far]
        with about("It is given tensors of another device than the CPU, and fails"):
            attempt.apply(*far)
    passes(gradgradcheck, attempt.apply, tuple(given.values()))


report(check, Scale)
