"""
1. The decision table
=====================

You have a new function of tensors, and its gradient has to be right. What do you
write? It depends on two things: **where** the function will live, and at what
**level** its forward is written. The answer is one of three:

.. list-table::
   :header-rows: 1
   :stub-columns: 1
   :class: decision

   * - where
     - out of tensor operations
     - by a third-party library
     - on the raw data pointer
   * - in ATen, a native function
     - :ref:`composite <cell-aten-tensor>`
     - :ref:`derivatives.yaml <cell-aten-library>`
     - :ref:`derivatives.yaml <cell-aten-pointer>`
   * - in PyTorch, outside ATen
     - :ref:`composite <cell-inside-tensor>`
     - :ref:`Function <cell-inside-library>`
     - :ref:`Function, in C++ <cell-inside-pointer>`
   * - outside PyTorch
     - :ref:`composite <cell-outside-tensor>`
     - :ref:`Function <cell-outside-library>`
     - :ref:`Function <cell-outside-pointer>`

*Composite* means: not elementary for autograd. Nothing is written for the gradient,
since autograd follows what is called inside. A *custom Function*
(``torch.autograd.Function``) and an entry in ``derivatives.yaml`` both make the
function elementary: autograd does not look inside, and takes the formula that you
wrote.

The reason for the whole table is its last row, so that is where we begin: with one
function, written at all three levels. It is the versed sine, versin(x) = 1 - cos(x),
whose derivative is sin(x).
"""

import ctypes

import numpy as np
import torch
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.autograd.function import once_differentiable

from drawing import draw, plt
from exercise import (
    Calls,
    apply,
    by_a_function,
    compare,
    gradients,
    keeps_well,
    normal,
    passes,
    report,
    size,
)

torch.manual_seed(0)
x = torch.randn(4, dtype=torch.double, requires_grad=True)

# %%
# .. _cell-outside-tensor:
#
# Outside PyTorch, out of tensor operations: a composite
# ------------------------------------------------------
# Nothing to do. ``cos`` and ``rsub`` have their formulas, and the chain rule does the
# rest.


def versin(x):
    return 1 - torch.cos(x)


y = versin(x)
print(y.grad_fn.name(), "<-", y.grad_fn.next_functions[0][0].name())
assert gradcheck(versin, x) and gradgradcheck(versin, x)

# %%
# .. _cell-outside-library:
#
# Outside PyTorch, by a third-party library: a custom Function
# ------------------------------------------------------------
# NumPy knows nothing of autograd. PyTorch notices, and refuses:

try:
    1 - np.cos(x)
except RuntimeError as error:
    print(error)
else:
    raise AssertionError("NumPy took a tensor that requires grad")

# %%
# If you do what the message says, and detach, then the result has no gradient. So the
# forward is NumPy's, and the backward is what we know about it. The backward is made
# of tensor operations here, so that autograd can differentiate it once more.


class VersinNumpy(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(1 - np.cos(x.numpy()))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.sin(x)


assert not torch.from_numpy(1 - np.cos(x.detach().numpy())).requires_grad
assert gradcheck(VersinNumpy.apply, x) and gradgradcheck(VersinNumpy.apply, x)

# %%
# .. _cell-outside-pointer:
#
# Outside PyTorch, on the raw data pointer: a custom Function
# -----------------------------------------------------------
# This is the dangerous one: *nobody refuses*. Here we read and write memory from
# Python, by ``ctypes``; a C++ or CUDA kernel does just the same.


def doubles(tensor):
    """The memory of a contiguous tensor of doubles, as an array of C."""
    return (ctypes.c_double * tensor.numel()).from_address(tensor.data_ptr())


def versin_by_pointer(x):
    x = x.contiguous()
    result = torch.empty_like(x)
    source, target = doubles(x), doubles(result)
    for i in range(x.numel()):
        target[i] = 1 - np.cos(source[i])
    return result


y = versin_by_pointer(x)
print(
    "the right values:",
    torch.equal(y, VersinNumpy.apply(x)),
    "- requires grad:",
    y.requires_grad,
)
assert not y.requires_grad

# %%
# The values are right, the gradient is silently not there: in a model, the parameters
# before this function would never move. The same remedy:


class VersinPointer(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return versin_by_pointer(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.sin(x)


assert gradcheck(VersinPointer.apply, x) and gradgradcheck(VersinPointer.apply, x)

# %%
# What autograd has recorded, of each:

figure, axes = plt.subplots(3, 1, figsize=(5, 6), layout="constrained")
graphs = [
    draw(axes[0], "tensor operations", versin(x).grad_fn),
    draw(axes[1], "raw pointer", versin_by_pointer(x).grad_fn),
    draw(axes[2], "raw pointer, in a Function", VersinPointer.apply(x).grad_fn),
]
assert [len(graph) for graph in graphs] == [3, 0, 2]

# %%
# .. _cell-inside-tensor:
#
# In PyTorch, outside ATen, out of tensor operations: a composite
# ---------------------------------------------------------------
# Most of ``torch/nn/functional.py`` is like this. ``lp_pool1d`` is a few lines of
# Python that call ``avg_pool1d`` and ``pow``; nobody ever wrote its derivative.

signal = torch.rand(1, 2, 6, dtype=torch.double, requires_grad=True)


def pool(signal):
    return torch.nn.functional.lp_pool1d(signal, norm_type=3, kernel_size=2)


print(pool(signal).grad_fn.name())
assert gradcheck(pool, signal) and gradgradcheck(pool, signal)

# %%
# .. _cell-inside-library:
#
# In PyTorch, outside ATen, by a library: a custom Function
# ---------------------------------------------------------
# ``torch.lobpcg`` finds a few eigenvalues by an iteration. Differentiating all of its
# steps would be slow and inaccurate, so ``torch/_lobpcg.py`` has a Function,
# ``LOBPCGAutogradFunction``, with the known formula.

matrix = torch.randn(9, 9, dtype=torch.double)
matrix = (matrix @ matrix.mT + 9 * torch.eye(9)).requires_grad_()


def largest_eigenvalues(matrix):
    symmetric = (matrix + matrix.mT) / 2
    return torch.lobpcg(symmetric, k=2, niter=300, tol=1e-12)[0]


print(torch.lobpcg(matrix, k=2)[0].grad_fn.name())
assert gradcheck(largest_eigenvalues, matrix, atol=1e-4)

# %%
# .. _cell-inside-pointer:
#
# In PyTorch, outside ATen, on the raw pointer: a Function in C++
# ---------------------------------------------------------------
# ``torch::autograd::Function`` is the same class for C++. PyTorch's C++ module
# ``CrossMapLRN2d`` is one (``torch/csrc/api/include/torch/nn/modules/_functions.h``).
# The one that we run is ours: lesson 10 builds the package ``linear_extension``,
# whose kernel reads and writes pointers.

try:
    from linear_extension import linear_cpp_function
except ImportError:  # where it is not installed, its folder beside this file is found
    print("not here: linear_extension is not installed (lesson 10)")
else:
    inputs = normal(5, 3), normal(2, 3), normal(2)
    print(linear_cpp_function(*inputs).grad_fn.name())
    assert gradcheck(linear_cpp_function, inputs)

# %%
# .. _cell-aten-tensor:
#
# In ATen, out of tensor operations: a composite
# ----------------------------------------------
# ``aten/src/ATen/native/`` is full of functions that only call others. Their entry in
# ``native_functions.yaml`` names no kernel, or says ``CompositeImplicitAutograd``,
# and they have no entry in ``derivatives.yaml``. ``narrow`` is one; ``torch.attn``
# was one in :doc:`commit 3 of the stack </generated/stack/03-composite-op>`.


def composite(name):
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CompositeImplicitAutograd"
    )


print({name: composite(f"aten::{name}") for name in ("narrow", "sin", "attn")})
assert (
    composite("aten::narrow")
    and not composite("aten::sin")
    and not composite("aten::attn")
)
assert gradcheck(lambda x: torch.narrow(x, 0, 1, 2), x)
assert torch.narrow(x, 0, 1, 2).grad_fn.name() == "SliceBackward0"  # what it calls

# %%
# .. _cell-aten-library:
#
# In ATen, by a third-party library: derivatives.yaml
# ---------------------------------------------------
# A Cholesky factorization is LAPACK's. Autograd cannot look into that either; in
# ATen, the formula stands in ``derivatives.yaml``, from which PyTorch's code
# generator writes the node. ``torch.attn`` has such a kernel for low precision: where
# a processor has AMX, its products are oneDNN's (brgemm).


def factor(matrix):
    return torch.linalg.cholesky((matrix + matrix.mT) / 2)


print(factor(matrix).grad_fn.name(), torch.linalg.cholesky_ex(matrix)[0].grad_fn.name())
assert gradcheck(factor, matrix)

low = [torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
output, attn = torch.attn(*low)
exact = [t.detach().double().requires_grad_() for t in low]
scores = torch.tanh(exact[0] @ exact[1].T)
found = torch.autograd.grad(output.sum(), low)
wanted = torch.autograd.grad((scores @ exact[2]).sum(), exact)
plain_scores = torch.tanh(low[0] @ low[1].T)
plain = torch.autograd.grad((plain_scores @ low[2]).sum(), low)
for ours, theirs, truth in zip(found, plain, wanted, strict=True):
    # The rule for what may go wrong: twice what the plain computation in that precision gets wrong.
    assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max()

# %%
# .. _cell-aten-pointer:
#
# In ATen, on the raw pointer: derivatives.yaml
# ---------------------------------------------
# Nearly all that is elementary: ``sin``, ``acos``, ``mm``, and ``attn``'s kernel for
# float and double. ``AttnBackward0`` is generated from our entry in ``derivatives.yaml``,
# :doc:`commit 4 </generated/stack/04-explicit-op>`.

q, k, v = (
    torch.randn(s, dtype=torch.double, requires_grad=True)
    for s in ((2, 3), (4, 3), (4, 5))
)
print(torch.sin(x).grad_fn.name(), torch.attn(q, k, v).output.grad_fn.name())
assert gradcheck(torch.attn, (q, k, v)) and gradgradcheck(torch.attn, (q, k, v))

# %%
# .. _today:
#
# The modern alternative
# ----------------------
# For what lives *outside* PyTorch there is a better way today than a bare Function:
# declare an **operator**. Then ``torch.compile``, ``torch.export`` and the rest treat
# it as one of their own, and ``opcheck`` tests that.
#
# .. list-table::
#    :header-rows: 1
#    :stub-columns: 1
#
#    * - cell
#      - the table
#      - today, beside it
#    * - out of tensor operations
#      - composite
#      - composite: still the best
#    * - by a library, from Python
#      - Function
#      - ``torch.library.custom_op`` + ``register_autograd``
#    * - a kernel in Triton
#      - Function
#      - ``torch.library.triton_op``: Inductor sees the kernel
#    * - in C++ or CUDA
#      - Function in C++
#      - ``TORCH_LIBRARY`` + ``register_autograd``, lessons 10 and 11
#    * - in ATen
#      - derivatives.yaml
#      - derivatives.yaml
#
# A ``triton_op`` wants a GPU to run; this is the same in NumPy:


@torch.library.custom_op("course::versin", mutates_args=())
def versin_op(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(1 - np.cos(x.numpy()))


@versin_op.register_fake
def _(x):
    return torch.empty_like(x)


def backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad * torch.sin(x)


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


versin_op.register_autograd(backward, setup_context=setup_context)

assert gradcheck(versin_op, x) and gradgradcheck(versin_op, x)
assert set(torch.library.opcheck(versin_op, (x,)).values()) == {"SUCCESS"}
compiled = torch.compile(
    lambda x: versin_op(x) + 1, fullgraph=True, backend="aot_eager"
)
assert torch.equal(compiled(x), versin(x) + 1)

# %%
# A trap
# ------
# ``once_differentiable`` says: my backward may not be differentiated. It is honest
# for a backward in NumPy, and double backward then raises. But only where the
# incoming gradient itself requires grad! With a constant one the result has
# *no graph at all*, and what you compute from it is silently a constant.


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(1 - np.cos(x.numpy()))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.from_numpy(np.sin(x.numpy()))


assert gradcheck(Once.apply, x)
(slope,) = torch.autograd.grad(Once.apply(x).sum(), x, create_graph=True)
print("a graph for the second derivative:", slope.requires_grad)
assert not slope.requires_grad

# %%
# ``gradgradcheck`` catches it. Run it on whatever you write, also if you think that
# nobody will ever differentiate twice.

try:
    gradgradcheck(Once.apply, x)
except RuntimeError as error:  # GradcheckError is one
    print(str(error).splitlines()[0])
else:
    raise AssertionError("gradgradcheck is content with Once")

# %%
# Words that older texts use
# --------------------------
# .. list-table::
#    :header-rows: 1
#
#    * - you may read
#      - today
#    * - ``Variable(x, volatile=True)``
#      - a tensor; ``with torch.no_grad():``
#    * - ``MyFunction()(x)``, ``self.save_for_backward``
#      - ``MyFunction.apply(x)``, static methods, ``ctx.save_for_backward``
#    * - ``from distutils.core import setup``
#      - ``pyproject.toml`` and setuptools, lesson 10
#    * - ``common_methods_invocations.py``, for a new operator's tests
#      - a file of its own in ``torch/testing/_internal/opinfo/definitions/``
#
# Exercise
# --------
# Your forward has to be NumPy's ``np.arctan``, which autograd cannot look into. Write
# the Function, for float and double, such that it can be differentiated twice. The
# derivative of arctan(x) is 1 / (1 + x²). A solution is in
# :download:`course/solutions/01_decision_table.py
# </../course/solutions/01_decision_table.py>`.


class Arctan(Function):
    @staticmethod
    def forward(ctx, x):
        raise NotImplementedError  # your turn

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError  # your turn


MOVES = {
    *("_local_scalar_dense", "_reshape_alias", "cat", "copy_", "fill_", "index_put_"),
    *("new_empty", "new_zeros", "ones_like", "scalar_tensor", "stack", "zeros"),
    *(
        "resize_",
        "unbind",
        "view_as",
        "zeros_like",
        "empty_strided",
        "new_empty_strided",
    ),
}  # numbers are carried from one tensor to another, none is computed


def check(attempt):
    for turn in range(6):
        dtype, near = ((torch.float, (1e-5, 1e-6)), (torch.double, (1e-9, 1e-12)))[
            turn % 2
        ]
        shape = size(1, 3), size(1, 3)
        x, other = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
        y = apply(attempt, x, within=(calls := Calls()))
        computes = [name for name in calls.names if name not in MOVES]
        assert not computes, (
            f"forward calls torch's {computes[0]}: it has to be NumPy's arctan."
        )
        compare("The result", y, torch.arctan(x), *near)
        apply(attempt, other)  # what the first call keeps, it keeps for itself
        grad = torch.randn_like(x)
        found = gradients(y, {"x": x}, grad)["x"]
        assert by_a_function(y), "No Function made the result."
        # Autograd casts a gradient to its tensor's dtype.
        compare("The gradient of x", found.to(dtype), grad / (1 + x**2), *near)
    keeps_well(attempt, {"x": x})
    (slope,) = torch.autograd.grad(apply(attempt, x).sum(), x, create_graph=True)
    assert slope.requires_grad, (
        "The gradient has no graph: it cannot be differentiated again."
    )
    passes(gradgradcheck, attempt.apply, x)


report(check, Arctan)
