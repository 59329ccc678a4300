r"""
4. Composites, and when a formula is worth writing
==================================================

A composite costs nothing to write. Lesson 1 said where it is enough; this one looks
at what it is made of, in ATen, in Python and in the backward formulas themselves, and
measures what a hand-written formula buys.
"""

import sys

import torch
import torch.utils.benchmark as benchmark
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drawing import plt, recorded
from exercise import (
    ROOT,
    about,
    apply,
    by_a_function,
    compare,
    gradients,
    keeps_well,
    normal,
    passes,
    report,
)

torch.manual_seed(0)

# %%
# What a composite calls
# ----------------------
# A dispatch mode sees every operator that is elementary *below* autograd. A
# CompositeImplicit operator is gone by then: only what it called arrives.


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def calls(function, *args):
    with Calls() as seen:
        function(*args)
    return seen.names


signal = torch.rand(1, 2, 6)
print("narrow:", calls(torch.narrow, signal, 2, 1, 3))
print("lp_pool1d:", calls(torch.nn.functional.lp_pool1d, signal, 3, 2))
print("attn:", calls(torch.attn, *(torch.rand(2, 2) for _ in range(3))))
assert calls(torch.narrow, signal, 2, 1, 3) == ["slice"]
assert "pow" in calls(torch.nn.functional.lp_pool1d, signal, 3, 2)
assert calls(torch.attn, *(torch.rand(2, 2) for _ in range(3))) == ["attn"]

# %%
# Backward formulas are composites too
# ------------------------------------
# Most of what ``FunctionsManual.cpp`` holds is made of differentiable operators. That
# is what gives double backward: with ``create_graph``, autograd records the backward
# like any other computation. Here is the graph behind the gradient of ``mm``.

a, b = (torch.rand(3, 3, dtype=torch.double, requires_grad=True) for _ in range(2))
(grad,) = torch.autograd.grad((a @ b).sin().sum(), a, create_graph=True)
names = sorted({name for _, name in recorded(grad.grad_fn).nodes(data="name")})
print(names)
assert "MmBackward0" in names and "CosBackward0" in names

# %%
# Reason 1: numerics
# ------------------
# softplus(x) = log(1 + exp(x)). Composed, it overflows, though neither its value nor
# its slope is large: the chain rule multiplies 1 / inf by inf.


def composed_softplus(x):
    return torch.log(1 + torch.exp(x))


x = torch.tensor([0.0, 1000.0], dtype=torch.double, requires_grad=True)
(slope,) = torch.autograd.grad(composed_softplus(x).sum(), x)
print("composed:", composed_softplus(x).tolist(), slope.tolist())
assert slope[1].isnan()


class Softplus(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x)


(slope,) = torch.autograd.grad(Softplus.apply(x).sum(), x)
assert torch.equal(slope, torch.tensor([0.5, 1.0], dtype=torch.double))
small = torch.tensor([-3.0, -0.1, 0.2, 4.0], dtype=torch.double, requires_grad=True)
assert gradcheck(Softplus.apply, small) and gradgradcheck(Softplus.apply, small)

# %%
# Reason 2: memory
# ----------------
# A composite saves what *each* of its steps needs. We count it for ``attn`` as the
# stack builds it up: composed (commit 3), with its own formula in Python (commit 2's
# Function, the formula of commit 4), and the native operator at the tip.
# ``saved_tensors_hooks`` sees every tensor that is saved; the inputs, which exist
# anyway, do not count.

sys.path.insert(0, str(ROOT / "test"))
from attn_function import Attn, attn_reference  # noqa: E402

CONTENDERS = {
    "composed": attn_reference,
    "Function": Attn.apply,
    "torch.attn": torch.attn,
}


def saved_beside_inputs(function, inputs):
    """Bytes that the graph of function(*inputs) keeps, beside the inputs and the results."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = function(*inputs)
    for tensor in (*inputs, *results):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(kept.values())


inputs = [torch.randn(64, 32, requires_grad=True) for _ in range(3)]
print({name: saved_beside_inputs(f, inputs) for name, f in CONTENDERS.items()})
assert not any(saved_beside_inputs(f, inputs) for f in CONTENDERS.values())

# %%
# Nothing! All that tanh and the products need is an input or a result. For ``attn``
# memory is no reason, as long as the caller keeps ``attn``. In softplus it is one:


def kept(function):
    return saved_beside_inputs(
        lambda x: (function(x),), [torch.randn(1000, requires_grad=True)]
    )


print(
    "softplus, composed:",
    kept(composed_softplus),
    "bytes; Function:",
    kept(Softplus.apply),
)
assert kept(composed_softplus) == 2 * 4000 and kept(Softplus.apply) == 0

# %%
# Reason 3: kernels
# -----------------
# Each step of a composite is a kernel: a pass over memory, and on small tensors an
# overhead. How many does ``attn`` run, forward and backward?


def step(function, inputs):
    output, attn = function(*inputs)
    return torch.autograd.grad(
        (output, attn), inputs, (torch.ones_like(output), torch.ones_like(attn))
    )


counts = {}
for name, function in CONTENDERS.items():
    names = calls(step, function, inputs)
    views = {"t", "transpose", "detach", "ones_like", "view", "expand"}
    counts[name] = len([n for n in names if n not in views])
print(counts)
assert counts["torch.attn"] == 2 < counts["composed"]

# %%
# A formula alone does not help: written in Python out of tensor operations it runs
# more kernels than the composite, whose ``tanh_backward`` is one kernel where the
# Function has three. It is the two *fused* kernels, for which the formula makes room,
# that count.
#
# And the time, all of them in one run, the order turned around in each round, as a
# ratio to the composed one: a machine that is busy is busy for all. Your figures will
# be others; :doc:`/speed` has many sizes and machines.

rounds = {name: [] for name in CONTENDERS}
for turn in range(6):
    for name in list(CONTENDERS)[:: 1 if turn % 2 else -1]:
        timer = benchmark.Timer(
            "step(f, x)", globals={"step": step, "f": CONTENDERS[name], "x": inputs}
        )
        rounds[name].append(timer.timeit(50).median)
medians = {name: torch.tensor(times).median().item() for name, times in rounds.items()}
ratios = {name: medians["composed"] / t for name, t in medians.items()}

figure, (above, below) = plt.subplots(2, 1, figsize=(5, 4.4))
above.barh(list(counts), list(counts.values()), color="#8fb0d9")
above.set_title("kernels, forward and backward", fontsize=10)
below.barh(list(ratios), list(ratios.values()), color="#8fb0d9")
below.set_title("times as fast as composed", fontsize=10)
for axes in (above, below):
    axes.invert_yaxis()
figure.tight_layout()

# %%
# So: write a composite first. Write a formula when the composite is inaccurate, keeps
# too much, or runs too many kernels; and then test it against the composite, which is
# what the stack does with commit 3 from commit 4 on.
#
# Exercise
# --------
# Write log(sigmoid(x)) = -log(1 + exp(-x)) as a Function that is accurate from -1000
# to 1000, values, gradients and second derivatives, and that saves one tensor. A
# solution is in
# :download:`course/solutions/04_composites.py
# </../course/solutions/04_composites.py>`.


class LogSigmoid(Function):
    @staticmethod
    def forward(ctx, x):
        raise NotImplementedError  # your turn

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError  # your turn


def check(attempt):
    ends = torch.tensor([-1000.0, 0.0, 1000.0], dtype=torch.double)
    for reach in (1, 40, 1000):
        drawn = reach * (2 * torch.rand(20, dtype=torch.double) - 1)
        x = torch.cat([ends, drawn]).requires_grad_()
        y, wanted = apply(attempt, x), torch.nn.functional.logsigmoid(x)
        with about(f"x from {-reach} to {reach}, -1000, 0 and 1000"):
            assert y.isfinite().all(), f"Not finite at {x[~y.isfinite()].tolist()}."
            compare("The result", y, wanted, rtol=1e-12, atol=1e-300)
            apply(attempt, drawn)
            grad = torch.randn_like(x)
            slope = gradients(y, {"x": x}, grad)["x"]
            assert slope.isfinite().all(), (
                f"The gradient is not finite at {x[~slope.isfinite()].tolist()}."
            )
            truth = grad * torch.sigmoid(-x)
            compare("The gradient of x", slope, truth, rtol=1e-12, atol=1e-300)
    assert by_a_function(y), "No Function made the result."
    kept = tree_leaves([y.grad_fn.saved_tensors, vars(y.grad_fn)])
    kept = sum(isinstance(one, torch.Tensor) for one in kept)
    assert kept == 1, f"It keeps {kept} tensors, not one."
    keeps_well(attempt, {"x": normal(5)})
    x = ends.clone().requires_grad_()
    (slope,) = torch.autograd.grad(apply(attempt, x).sum(), x, create_graph=True)
    assert slope.requires_grad, (
        "The gradient has no graph: it cannot be differentiated again."
    )
    (curve,) = torch.autograd.grad(slope.sum(), x)
    assert curve.isfinite().all(), (
        f"The second derivative is not finite at {x[~curve.isfinite()].tolist()}: where "
        "exp overflows, its gradient is 0 times infinity, also in a branch not taken."
    )
    passes(gradgradcheck, attempt.apply, normal(5))


report(check, LogSigmoid)
