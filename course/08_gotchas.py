"""
8. Gotchas
==========

Seven places where people new to autograd lose an afternoon. Each has a snippet that
fails, and beside it one that works.
"""

import sys
import warnings

import torch
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from drawing import plt
from exercise import (
    ROOT,
    Calls,
    about,
    apply,
    compare,
    keeps_well,
    normal,
    parts,
    passes,
    report,
    size,
    unchanged,
)

sys.path.insert(0, str(ROOT))

torch.manual_seed(0)


def refusal(function, *args):
    """What `function` raises, in a line; it must raise something."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    raise AssertionError("nothing was raised")


# %%
# None, zeros, undefined: three words for one thing
# -------------------------------------------------
# A gradient that is zero need not be a tensor of zeros. In Python it is ``None``, in
# C++ an *undefined* tensor. A backward that returns None for an input says: nothing
# comes from here. So whoever **reads** a gradient has to expect None.

x, unused = (torch.randn(3, requires_grad=True) for _ in range(2))
loss = x.sin().sum()
print(refusal(lambda: torch.autograd.grad(loss, (x, unused), retain_graph=True)))
grads = torch.autograd.grad(loss, (x, unused), retain_graph=True, allow_unused=True)
assert grads[1] is None
loss.backward(retain_graph=True)
assert unused.grad is None  # not zeros: an optimizer leaves it alone, momentum and all
grads = torch.autograd.grad(loss, (x, unused), materialize_grads=True)
assert not grads[1].any()

# %%
# Two results, and one of them is not used
# ----------------------------------------
# A Function with two results gets two gradients. If one result is not used, its
# gradient is undefined; by default autograd **materializes** it: makes zeros, and
# your backward multiplies by them. ``set_materialize_grads(False)`` leaves it None,
# and then your backward has to say what None means.


class Counter(TorchDispatchMode):
    """How often each operator is called."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


class TwoProducts(Function):
    @staticmethod
    def forward(ctx, a, b, c):
        ctx.save_for_backward(a, b, c)
        return a @ b, a @ c

    @staticmethod
    def backward(ctx, first, second):
        a, b, c = ctx.saved_tensors
        return first @ b.T + second @ c.T, a.T @ first, a.T @ second


class TwoProductsLazy(Function):
    @staticmethod
    def forward(ctx, a, b, c):
        ctx.save_for_backward(a, b, c)
        ctx.set_materialize_grads(False)
        return a @ b, a @ c

    @staticmethod
    def backward(ctx, first, second):
        a, b, c = ctx.saved_tensors
        grad_a = grad_b = grad_c = None
        if first is not None:
            grad_a, grad_b = first @ b.T, a.T @ first
        if second is not None:
            along = second @ c.T
            grad_a = along if grad_a is None else grad_a + along
            grad_c = a.T @ second
        return grad_a, grad_b, grad_c


square = [torch.randn(3, 3, dtype=torch.double, requires_grad=True) for _ in range(3)]
products = {}
for function in (TwoProducts, TwoProductsLazy):
    first, _ = function.apply(*square)
    with Counter() as counter:
        torch.autograd.grad(first.sum(), square, allow_unused=True)
    products[function.__name__] = counter.calls["mm"]
    assert gradcheck(function.apply, square)
print("products in the backward:", products)
assert products == {"TwoProducts": 4, "TwoProductsLazy": 2}

# %%
# The gradient that nobody wants
# ------------------------------
# ``ctx.needs_input_grad`` says for each input whether its gradient is wanted. A
# frozen weight wants none, and half of a layer's backward can be left out.


class Product(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad


class ProductLazy(Product):
    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        wants_a, wants_b = ctx.needs_input_grad
        return grad @ b.T if wants_a else None, a.T @ grad if wants_b else None


frozen = square[1].detach()
products = {}
for function in (Product, ProductLazy):
    y = function.apply(square[0], frozen)
    with Counter() as counter:
        torch.autograd.grad(y.sum(), square[0])
    products[function.__name__] = counter.calls["mm"]
print("products in the backward:", products)
assert products == {"Product": 2, "ProductLazy": 1}

# %%
# In ``derivatives.yaml`` the same is ``grad_input_mask``, and the generated node asks
# for it itself.
#
# What dtypes does it take?
# -------------------------
# An ``OpInfo`` describes an operator to PyTorch's test suites: its samples, its
# reference, and its dtypes. There are five fields for those, and the suite's
# ``test_dtypes`` compares what you say with what runs:
#
# .. list-table::
#    :header-rows: 1
#
#    * - field
#      - says
#    * - ``dtypes``
#      - of the forward on a CPU, and elsewhere if nothing else is said
#    * - ``dtypesIfCUDA``, ``dtypesIf={"cuda": ...}``
#      - the same on a GPU, where they differ
#    * - ``backward_dtypes``, ``backward_dtypesIfCUDA``
#      - of the backward, where it takes fewer
#
# To claim what does not run makes a test fail; so does *not* to claim what runs.

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

info = next(op for op in op_db if op.name == "attn")


def dtypes_that_run(function, shapes):
    found = set()
    for dtype in (
        torch.half,
        torch.bfloat16,
        torch.float,
        torch.double,
        torch.cfloat,
        torch.cdouble,
        torch.int64,
    ):
        try:
            function(*(torch.ones(shape, dtype=dtype) for shape in shapes))
            found.add(dtype)
        except RuntimeError:
            pass
    return found


run = dtypes_that_run(torch.attn, ((2, 3), (4, 3), (4, 5)))
print("attn takes:", sorted(str(dtype).removeprefix("torch.") for dtype in run))
assert set(info.dtypes) == run
first_guess = {torch.float, torch.double}
print(
    "and a first guess would miss:", sorted(str(dtype) for dtype in run - first_guess)
)
assert run - first_guess

# %%
# ``__torch_function__`` and the table of overrides
# -------------------------------------------------
# Whatever is in ``torch.*`` can be overridden by a class that has
# ``__torch_function__``. A native operator can, without a line of code; but PyTorch's
# own suite wants it in ``torch.overrides.get_testing_overrides()``, with a lambda of
# the same signature. A function in *Python* has to ask for it itself, otherwise the
# class only sees what is called inside.


class Logged:
    def __init__(self):
        self.seen = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args[0].seen.append(func.__name__)
        return args[0]


def versin(x):
    return 1 - torch.cos(x)


def versin_overridable(x):
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(versin_overridable, (x,), x)
    return 1 - torch.cos(x)


logged = Logged()
print(refusal(versin, logged))  # it got as far as cos, and then 1 - logged
versin_overridable(logged)
torch.attn(logged, logged, logged)
print(logged.seen)
assert logged.seen == ["cos", "versin_overridable", "attn"]
assert torch.attn in torch.overrides.get_testing_overrides()

# %%
# A size is not always a number
# -----------------------------
# Under ``torch.export`` and ``torch.compile`` a size may be a *symbol*. Whoever makes
# an ``int`` of it says: this size, and no other. In C++ the same is ``x.size(0)``
# instead of ``x.sym_size(0)``, ``IntArrayRef`` instead of ``SymIntArrayRef``.


class MeanOfRows(torch.nn.Module):
    def forward(self, x):
        return x.sum(0) / int(x.shape[0])


class MeanOfAnyRows(torch.nn.Module):
    def forward(self, x):
        return x.sum(0) / x.shape[0]


def export(module):
    dynamic = ({0: torch.export.Dim("rows", min=2)},)
    return torch.export.export(
        module, (torch.randn(5, 3),), dynamic_shapes=dynamic, strict=False
    )


print(refusal(export, MeanOfRows()))
exported = export(MeanOfAnyRows()).module()
assert torch.allclose(exported(torch.ones(7, 3)), torch.ones(3))

# %%
# What an explicit operator loses
# -------------------------------
# A composite has forward mode, vmap, autocast, sharding, all from what it is made of.
# An explicit operator has what you write. Its OpInfo has to say so
# (``supports_forward_ad=False``, ``supports_fwgrad_bwgrad=False``), and PyTorch's
# suites have an *expected failure* for each thing that is missing. A Function, the
# same:


class Sin(Function):
    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class SinForward(Sin):
    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0].cos()


x = torch.randn(3)
print(refusal(torch.func.jvp, Sin.apply, (x,), (torch.ones(3),)))
_, tangent = torch.func.jvp(SinForward.apply, (x,), (torch.ones(3),))
assert torch.equal(tangent, x.cos())
assert info.supports_forward_ad and info.supports_fwgrad_bwgrad

# %%
# In PyTorch itself, ``torch.pdist`` has a formula, and neither forward mode nor a batch
# rule. This is what you read of such an operator, in your own program and in the suites:

x = torch.randn(2, 4, 3)
no_jvp = refusal(torch.func.jvp, torch.pdist, (x[0],), (x[1],))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.vmap(torch.pdist)(x)
no_batch_rule = str(caught[0].message).split(". ")[0]
print(no_jvp, no_batch_rule, sep="\n")
assert "Trying to use forward AD with _pdist_forward that does not support it" in no_jvp
assert "not yet implemented the batching rule for aten::pdist" in no_batch_rule

# %%
# The OpInfo has a mark for each, and the suites hold it to its word, both ways:
#
# .. list-table::
#    :header-rows: 1
#
#    * - the suites say
#      - what is wrong
#      - mark
#    * - ``Trying to use forward AD with attn that does not support it``
#      - no formula for forward mode
#      - ``supports_forward_ad=False``
#    * - ``Running forward AD for an OP that has does not support it did not raise any error``
#      - there is one, and the mark is still there
#      - take ``supports_forward_ad=False`` out
#    * - ``performance drop because we have not yet implemented the batching rule for aten::attn``
#      - no batch rule: vmap is a loop
#      - an expected failure of ``test_op_has_batch_rule``
#    * - ``Unexpected success``
#      - an expected failure that does not fail
#      - take it out
#
# An expected failure stands in the OpInfo's ``skips``, with the class and the name of
# the test, and above it the reason:
#
# .. code-block:: python
#
#    # attn has no batch rule: vmap falls back to a loop
#    DecorateInfo(unittest.expectedFailure, "TestVmapOperatorsOpInfo", "test_op_has_batch_rule"),
#
# In the stack you can watch it. ``attn`` becomes explicit in commit 4, and owes six
# things; commits 5 to 13 pay them. At the tip nothing is owed.

if (ROOT / "stack").is_dir():  # in a clone of this repository
    from fork.overlay import Stack

    stack = Stack(ROOT)
    debts = [stack.debts(commit.number).total() for commit in stack.commits]
    figure, axes = plt.subplots(figsize=(5, 2.6))
    axes.bar([commit.number for commit in stack.commits], debts, color="#c0504d")
    axes.set_xticks(range(1, len(debts) + 1, 4))
    axes.set_xlabel("commit")
    axes.set_ylabel("expected failures")
    figure.tight_layout()
    assert debts[2] == 0 < debts[3] == max(debts) and debts[-1] == 0

# %%
# Exercise
# --------
# Write a Function with one input x and two results, sin(x) and cos(x), that never
# computes with a gradient that is None, and returns None if both are. A solution is
# in :download:`course/solutions/08_gotchas.py </../course/solutions/08_gotchas.py>`.


class SinCos(Function):
    @staticmethod
    def forward(ctx, x):
        raise NotImplementedError  # your turn

    @staticmethod
    def backward(ctx, grad_sin, grad_cos):
        raise NotImplementedError  # your turn


class Discard(Function):
    """Uses what it gets, and has no gradient for it."""

    @staticmethod
    def forward(ctx, *tensors):
        return sum(tensor.sum() for tensor in tensors)

    @staticmethod
    def backward(ctx, grad):
        return None, None


def check(attempt):
    def both(x):
        return parts(apply(attempt, x), ["sin", "cos"], "forward").values()

    for _ in range(3):
        x = normal(size(1, 3), size(1, 3))
        for name, found, wanted in zip(
            ("sin", "cos"), both(x), (x.sin(), x.cos()), strict=True
        ):
            compare(f"The result {name}", found, wanted)
        slopes, grads = (x.cos(), -x.sin()), [torch.randn_like(x) for _ in range(2)]
        for used, name in enumerate(("sin", "cos")):
            result = list(both(x))[used]
            both(normal(2))  # what the first call keeps, it keeps for itself
            with about(f"only {name} is used"):
                came = {"The gradient that came in": grads[used]}
                with unchanged(came), Calls() as calls:
                    (found,) = torch.autograd.grad(
                        result, x, grads[used], allow_unused=True
                    )
                compare("The gradient of x", found, grads[used] * slopes[used])
                zeros = any("zero" in call or "full" in call for call in calls.names)
                assert not zeros, "Zeros were made for the other."
                times = calls.names.count("mul")
                assert times <= 1, (
                    f"The backward multiplies {times} times: what is None is computed with."
                )
        with about("neither is used"):
            (found,) = torch.autograd.grad(
                Discard.apply(*both(x)), x, allow_unused=True
            )
            assert found is None, "The gradient is not None."
        with about("both are used"):
            (found,) = torch.autograd.grad(list(both(x)), x, grads, allow_unused=True)
            truth = sum(g * slope for g, slope in zip(grads, slopes, strict=True))
            compare("The gradient of x", found, truth)
    keeps_well(attempt, {"x": normal(3)})
    passes(gradgradcheck, attempt.apply, normal(3))


report(check, SinCos)
