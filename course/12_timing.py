"""
12. Testing it, and timing it
=============================

Four linear layers now: Python's Function (lesson 9), the C++ operator (lesson 10),
the C++ Function, and PyTorch's own. Are they right, and which one is fast?
"""

import torch
import torch.utils.benchmark as benchmark
from torch.autograd import Function, gradcheck, gradgradcheck

from drawing import plt
from exercise import report, returned, size

torch.manual_seed(0)


class LinearFunction(Function):
    @staticmethod
    def forward(ctx, input, weight, bias):
        ctx.save_for_backward(input, weight)
        return input @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ input, grad.sum(0)


CONTENDERS = {
    "F.linear": torch.nn.functional.linear,
    "Function in Python": LinearFunction.apply,
}
try:
    from linear_extension import linear, linear_cpp_function
except ImportError:  # where it is not installed, its folder beside this file is found
    print(
        "linear_extension is not installed (lesson 10): nothing in C++ is tested and timed"
    )
else:
    CONTENDERS["operator in C++"] = linear
    CONTENDERS["Function in C++"] = linear_cpp_function

# %%
# First: right
# ------------
# In double, gradcheck. In float, the question is how wrong it may be. Two
# computations of the same sum in another order differ; no fixed tolerance fits all
# sizes. The rule that the stack's tests use is:
# *not more than twice as wrong as the plain computation in that precision*, both
# against the exact result, which double gives.

SHAPES = {
    "tiny": (4, 8, 4),
    "small": (32, 64, 32),
    "medium": (128, 256, 128),
    "large": (256, 512, 512),
}


def operands(rows, inputs, outputs, dtype=torch.float):
    shapes = ((rows, inputs), (outputs, inputs), (outputs,))
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


def step(function, given):
    """Forward and backward, as a training step does it."""
    return torch.autograd.grad(function(*given).sum(), given)


def error(found, exact):
    return max(
        (a.double() - b).abs().max().item() for a, b in zip(found, exact, strict=True)
    )


for name, function in CONTENDERS.items():
    given = operands(4, 3, 2, torch.double)
    assert gradcheck(function, given) and gradgradcheck(function, given), name
    for shape in SHAPES.values():
        given = operands(*shape)
        exact = [t.detach().double().requires_grad_() for t in given]
        truth = [
            torch.nn.functional.linear(*exact),
            *step(torch.nn.functional.linear, exact),
        ]
        plain = [LinearFunction.apply(*given), *step(LinearFunction.apply, given)]
        found = [function(*given), *step(function, given)]
        scale = max(t.abs().max().item() for t in truth) * torch.finfo(torch.float).eps
        assert error(found, truth) <= 2 * max(error(plain, truth), 4 * scale), (
            name,
            shape,
        )

# %%
# Then: fast
# ----------
# A time alone says little: it is this machine's, this minute's. What can be compared
# is a *ratio* of two that run side by side. So: all contenders in one run, several
# rounds, the order turned around in each, the median of each contender's rounds, and
# one of them as the measure. ``torch.utils.benchmark.Timer`` sees to warming up and
# to threads.


def measure(shape, rounds=5):
    """How many times as fast as F.linear each is: the medians of its rounds compared."""
    given, times = operands(*shape), {name: [] for name in CONTENDERS}
    for turn in range(rounds):
        for name in list(CONTENDERS)[:: 1 if turn % 2 else -1]:
            names = {"step": step, "function": CONTENDERS[name], "given": given}
            timer = benchmark.Timer("step(function, given)", globals=names)
            number = max(2, int(2e6 / (shape[0] * shape[1] * shape[2] + 2e4)))
            times[name].append(timer.timeit(number).median)
    medians = {name: torch.tensor(of).median().item() for name, of in times.items()}
    return {name: medians["F.linear"] / median for name, median in medians.items()}


ratios = {name: measure(shape) for name, shape in SHAPES.items()}
for shape, of in ratios.items():
    print(f"{shape:8}", {name: round(ratio, 2) for name, ratio in of.items()})

figure, axes = plt.subplots(figsize=(5, 3.8))
for place, name in enumerate(CONTENDERS):
    xs = [i + 0.2 * (place - 1.5) for i in range(len(SHAPES))]
    axes.bar(xs, [ratios[shape][name] for shape in SHAPES], width=0.18, label=name)
axes.set_xticks(
    range(len(SHAPES)), [f"{k}\n{v}" for k, v in SHAPES.items()], fontsize=8
)
axes.axhline(1, color="#888888", linewidth=1)
axes.set_ylabel("times as fast as F.linear")
axes.legend(
    fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1)
)  # off the bars
figure.tight_layout()
assert all(of["F.linear"] == 1 for of in ratios.values())

# %%
# Read the plot of your machine. Two things hold on any:
#
# - The larger the matrices, the further our kernel falls behind: ``F.linear`` calls a
#   library whose authors have spent years on one product, with blocks for every cache
#   and each instruction set. **Do not write a matrix product.** A hand-written kernel
#   wins where there is *no* library for what you do, by not doing what a composition
#   must: storing what lies between two steps, and reading it again. This is the case
#   of ``attn``, whose scores never have to leave the cache between product and tanh;
#   :doc:`/speed` has its plots.
# - The smaller they are, the more you measure the *call*: Python, the dispatcher, the
#   graph's node. A Function in Python costs about as much again as the call itself,
#   and ``register_autograd`` more: it runs Python in every call, kernel in C++ or not.
#   A Function in C++, or an operator in ATen with an entry in ``derivatives.yaml``,
#   pays least.
#
# Here is that overhead, with nothing to compute:

nothing = operands(1, 1, 1)
overhead = {}
for name, function in CONTENDERS.items():
    names = {"function": function, "given": nothing}
    timer = benchmark.Timer("function(*given)", globals=names)
    overhead[name] = min(timer.timeit(300).median for _ in range(3))
least = min(overhead.values())
print({name: f"{value / least:.1f} x" for name, value in overhead.items()})

# %%
# Exercise
# --------
# Write the measurement: how many times as fast ``f`` is as ``g``. You get a
# ``clock``, a function without arguments that says what time it is. The machine is a
# bad one: it becomes slower and slower while you measure, and now and then something
# else runs and a single call takes a hundred times as long. The checker has such a
# machine, and no real time in it. A solution is in
# :download:`course/solutions/12_timing.py </../course/solutions/12_timing.py>`.


def times_as_fast(f, g, clock):
    """The time of g() divided by that of f(), measured fairly over many calls of both."""
    raise NotImplementedError  # your turn


class Machine:
    """A computer with a clock of its own, which goes on only while a program runs.

    With `wears`, each call is slower than the one before it. With `hiccups`, one call in
    14 takes a hundred times as long.
    """

    def __init__(self, wears, hiccups, first):
        self.now, self.calls, self.wears, self.hiccups = 0.0, 0, wears, hiccups
        self.first = first  # call that takes long, then each 14th after it

    def clock(self):
        return self.now

    def program(self, cost):
        def run():
            self.calls += 1
            slow = 1 + self.wears * self.calls
            hiccup = self.hiccups and self.calls % 14 == self.first % 14
            self.now += cost * slow * (100 if hiccup else 1)

        return run


def check(attempt):
    for wears, hiccups, what in (
        (0, False, "on a quiet machine"),
        (
            0.05,
            False,
            "on a machine that becomes slower: do not measure one after the other",
        ),
        (0, True, "on a machine with hiccups: a mean is not robust"),
        (0.05, True, "on a machine with both"),
    ):
        drawn = 2 ** (size(-20, 20) / 10)
        for ratio, first in (
            (2.0, 1),
            (0.5, 2),
            (1.0, size(1, 14)),
            (drawn, size(1, 14)),
        ):
            machine, unit = Machine(wears, hiccups, first), size(1, 5)
            f, g = machine.program(unit), machine.program(ratio * unit)
            found = attempt(f, g, machine.clock)
            returned(found, (float, int), "times_as_fast")
            assert machine.calls >= 10, "Too few calls for a measurement."
            close = abs(found / ratio - 1) < 0.1
            assert close, f"{found:.2f} instead of {ratio:.2f} {what}."


report(check, times_as_fast)
