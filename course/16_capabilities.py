"""
16. What each way of registering gives
======================================

Lesson 1's table says what a function needs. Today there are more ways to register one
than the table has cells: a Function in two styles, four forms of an operator in
Python, two in C++, ATen's own. They differ in what works afterwards, and in what a
call costs. This lesson finds out by running: one function, ``attn``, registered by
eleven *routes*, and twenty *probes*, each a short function that says whether a route
has a capability. :doc:`The table </capabilities>` is what came out, on three releases.

You need a clone of this repository, as this lesson reads the routes and the record of
the table, which are in ``course/capabilities/``.
"""

import io
import sys
from types import SimpleNamespace

import torch
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from drawing import plt
from exercise import ROOT, about, report, returned

sys.path.insert(0, str(ROOT / "course" / "capabilities"))
import probes
import record
import run

torch.manual_seed(0)

# %%
# One function, many routes
# -------------------------
# The function and its formulas are written once:
#
# .. literalinclude:: /../course/capabilities/formulas.py
#    :language: python
#    :start-at: def forward
#    :end-before: def vmap_rule
#
# Each route is a file in ``course/capabilities/routes/``, as short as it can be and
# complete: with a fake kernel, a vmap rule and a ``jvp`` where the route has a place for
# them. Here are all four registrations of ``torch.library.custom_op``:
#
# .. literalinclude:: /../course/capabilities/routes/custom_op.py
#    :language: python
#    :start-at: @torch
#
# Any operator can get a FLOP formula, autocast and a sharding strategy, by one more
# registration each. The routes have none of these: their columns say what you have before.
#
# How to read a cell
# ------------------
# *yes*: the probe compared what it got with autograd's result for the plain function.
# *no*: an error said so, and its first line is kept. *silently wrong*: no error, and
# another result. These are worse than a *no*. Try three of them:

custom_op = run.Route("custom_op")
for probe in (probes.gradient, probes.vmap, probes.forward_ad, probes.flop_counter):
    print(f"{probe.__name__:14}", record.said(run.outcome(probe, custom_op)))
assert run.outcome(probes.forward_ad, custom_op)["outcome"] == "wrong"
assert run.outcome(probes.flop_counter, custom_op)["outcome"] == "wrong"

# %%
# ``register_autograd`` knows a backward and no ``jvp``. Forward mode does not refuse: the
# tangent is lost, which means zero. A Function without a ``jvp`` says so:

function = run.Route("function_static")
print(record.said(run.outcome(probes.forward_ad, function)))
assert run.outcome(probes.forward_ad, function)["outcome"] == "no"

# %%
# A probe is a few lines; this is all of ``double_backward``:
#
# .. literalinclude:: /../course/capabilities/probes.py
#    :language: python
#    :pyobject: double_backward
#
# Each runs in a process of its own, a copy of one that has imported what compilers
# need, so that a crash is a *no* as well and the whole table takes a minute or two.
#
# The table
# ---------
# ``y`` is yes, ``-`` is no, ``W`` is silently wrong. The record is of this release;
# ``make course`` makes the table again and fails if a cell differs.

RELEASE = torch.__version__.partition("+")[0]
table = record.read(RELEASE)
LETTERS = {"yes": "y", "no": "-", "wrong": "W"}
for number, heading in enumerate(probes.PROBES.values(), 1):
    print(f"{number:2} {heading}")
print(" " * 32, *(f"{n:2}" for n in range(1, len(probes.PROBES) + 1)))
for route, cells in table["cells"].items():
    letters = (LETTERS[cell["outcome"]] for cell in cells.values())
    print(f"{run.ROUTES[route].title:32}", *(f"{letter:>2}" for letter in letters))


def outcomes(route, *names):
    """The set of the outcomes of some probes, or of all."""
    cells = table["cells"][route]
    return {cells[name]["outcome"] for name in names or cells}


DERIVATIVES = ("gradient", "double_backward", "forward_ad", "forward_over_reverse")
TRANSFORMS = ("vmap", "jacrev", "hessian")
COMPILERS = ("compile", "compile_gradient", "dynamic_shapes", "export", "aot_inductor")

# %%
# What a call costs
# -----------------
# Microseconds, at a size where nothing but the way to the kernel counts: q is (2, 3),
# k is (5, 3), v is (5, 4), one thread. The processor is the one that the record names.

costs = table["microseconds"]
figure, axes = plt.subplots(figsize=(5, 4.8))
record.draw_costs(axes, {run.ROUTES[name].title: costs[name] for name in costs})
axes.set_title(f"torch {RELEASE}, {table['cpu']}", fontsize=9)
figure.tight_layout()
print(table["cpu"])

# %%
# Two things are seen in it. Whatever passes through Python on its way to a kernel costs
# more than the products of such small matrices. And of the two styles of a Function it
# is the newer one that is dearer: with ``setup_context``, ``apply`` looks up the
# signature of ``forward`` at each call.

assert costs["native"]["inference"] < costs["composite"]["inference"]
assert costs["function_static"]["inference"] < costs["function"]["inference"]

# %%
# Which route for which need
# --------------------------
# Each line follows from cells, which are asserted below it.
#
# - *Your forward is tensor operations*: a composite. It has every derivative, every
#   transform, every compiler, even DTensor. It is no operator: nobody can intercept
#   the call as one, and C++ cannot call it.

assert outcomes("composite", *DERIVATIVES, *TRANSFORMS, *COMPILERS) == {"yes"}
assert outcomes("composite", "torch_function", "opcheck", "cpp") == {"no"}

# %%
# - *You have a formula that is better than autograd's, in tensor operations*: a Function
#   with ``setup_context``. With a ``jvp`` it has all derivatives and transforms, but
#   Dynamo does not compile its gradient. Without one it does; in the old style there
#   are no transforms.

assert outcomes("function", *DERIVATIVES, *TRANSFORMS) == {"yes"}
assert outcomes("function", "compile_gradient") == {"no"}
assert outcomes("function_static", *COMPILERS) == {"yes"}
assert outcomes("function_static", "forward_ad", *TRANSFORMS) == {"no"}

# %%
# - *Your kernel is opaque, called from Python, and to be compiled*: define and impl with
#   a Function outside, if you want ``jacrev`` or per-sample gradients; ``custom_op``
#   with ``register_autograd``, if you want one object that ``opcheck`` can check.
#   Neither has forward mode, and ``custom_op`` does not say so.

for route in ("define_impl", "custom_op"):
    assert outcomes(route, "gradient", "vmap", *COMPILERS) == {"yes"}
assert outcomes("define_impl", "jacrev") == outcomes("custom_op", "opcheck") == {"yes"}
assert outcomes("define_impl", "forward_ad") == {"no"}
assert outcomes("custom_op", "forward_ad") == {"wrong"}

# %%
# - *C++ calls it too*: a C++ extension. With ``torch::autograd::Function`` the gradient
#   works without Python, for one release of PyTorch; no transform enters it. On the
#   stable ABI one wheel serves many releases, and the gradient is Python's. What is
#   registered in Python does not exist for a program without Python.

assert outcomes("cpp_extension", "gradient", "cpp", *COMPILERS) == {"yes"}
assert outcomes("cpp_extension", "vmap", "jacrev", "forward_ad") == {"no"}
for route in ("custom_op", "define_impl", "impl_autograd"):
    assert outcomes(route, "cpp") == {"no"}

# %%
# - *You want all of it*: a native operator. As CompositeImplicit it has all for three
#   lines; as an explicit one with a formula in ``derivatives.yaml`` it loses what the
#   parts had, until each is added: that is what the commits after 4 are for.

assert outcomes("implicit") == outcomes("native") == {"yes"}
assert outcomes("explicit", "forward_ad", "vmap", "autocast", "dtensor") == {"no"}

# %%
# One thing to know of named results: an exported program that returns the namedtuple
# itself, ``attn``'s or that of ``torch.max``, cannot be saved. The probe's module returns
# ``tuple(...)``.


class Named(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


q, k, v = probes.inputs(dtype=torch.float)
for name, function, given in (
    ("attn", torch.attn, (q, k, v)),
    ("max", lambda x: torch.max(x, 1), (q,)),
):
    program = torch.export.export(Named(function), given)
    try:
        torch.export.save(program, io.BytesIO())
    except Exception as error:
        print(run.first_line(error))
        assert f"torch.return_types.{name}" in str(error)
    else:
        raise AssertionError(f"that of {name} can be saved")

# %%
# What upstream could improve
# ---------------------------
# - ``register_autograd`` could refuse forward mode, or take a ``jvp``, of which there was
#   a draft (pytorch #131116). The Function that it makes could have ``setup_context`` as
#   a method, so that ``torch.func`` enters it (#168393, #179652).
# - Dynamo could honour a ``jvp``, or refuse it: it differentiates the forward that it
#   sees instead (#192985), which for an opaque kernel gives zeros; and a ``jvp`` that
#   nobody uses prevents compiling (#180284).
# - The FLOP counter could say which operators it counts as zero.
# - ``custom_op`` could cost what ``define`` and ``impl`` cost (#139500, #177109).
# - Which API has what is what people ask for (#141618, tutorials #3485). A table that
#   is made by running it cannot be out of date.
#
# Exercise
# --------
# One cell of ``custom_op`` is *silently wrong*, and a function puts it right: the number of
# floating-point operations that a call takes. Write ``flops``. It is given the shapes of
# q (\*, m, d), k (\*, n, d) and v (\*, n, e), of which ``*`` are batch dimensions, the same
# in all three. Count the two products, as PyTorch does for ``mm``: a multiplication and
# an addition are two. The checker registers it for an operator, and runs the probe
# ``flop_counter``. A solution is in :download:`course/solutions/16_capabilities.py
# </../course/solutions/16_capabilities.py>`.


def flops(q, k, v):
    """How many floating-point operations attn takes on tensors of these shapes, an int."""
    raise NotImplementedError  # your turn


made = []  # the operators of the attempts: each has a name of its own


def registered(attempt):
    """An operator like that of the route, with `attempt` as its FLOP formula."""

    name = f"attempt{len(made)}"

    @torch.library.custom_op(f"capabilities::{name}", mutates_args=())
    def attn(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return probes.forward(q, k, v)

    made.append(attn)

    @register_flop_formula(getattr(torch.ops.capabilities, name))
    def formula(q, k, v, *args, out_shape=None, **kwargs):
        return returned(attempt(q, k, v), int, "flops")

    return attn


def check(attempt):
    attn = registered(attempt)
    for batch in ((), (3,), (2, 3)):
        # No two are the same, so that none can stand for another.
        m, n, d, e = (2 + x for x in torch.randperm(8)[:4].tolist())
        q, k, v = (torch.randn(*batch, *s) for s in ((m, d), (n, d), (n, e)))
        words = f"with a batch of {batch}" if batch else "without a batch"
        wanted = 2 * m * n * (d + e) * torch.Size(batch).numel()
        with about(words), FlopCounterMode(display=False) as counter:
            attn(q, k, v)
        found = counter.get_total_flops()
        assert found == wanted, f"{words}: {found} FLOPs, where {wanted} are needed."
    try:
        probes.flop_counter(SimpleNamespace(attn=attn))
    except probes.Wrong as error:
        raise AssertionError(f"the probe finds {error}") from error


report(check, flops)
