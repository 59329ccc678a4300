"""
10. Linear as a C++ extension
=============================

``course/linear_extension/`` is a package of its own, as you would publish it: a
kernel in C++ that reads and writes raw memory, declared as an operator, with its
gradients, a functional, a Module and tests. ``make course`` builds and installs it;
by hand, in any environment that has PyTorch, it is one command:

.. code-block:: sh

   pip install --no-build-isolation course/linear_extension

By lesson 1's table, a kernel on raw pointers outside PyTorch needs a Function. Here
it has today's form of one. You need a clone of this repository, in which ``make course``
has run, as this lesson reads and compiles the package's sources.
"""

import re
import subprocess
import sys

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    free_symbols,
)
from torch.utils import cpp_extension

from drawing import plt
from exercise import ROOT, about, report, returned, size

try:
    import linear_extension
    from linear_extension import ops
except ImportError:  # where it is not installed, its folder beside this file is found
    raise SystemExit(
        "This lesson needs linear_extension: run `make course`, or pip install "
        "--no-build-isolation course/linear_extension"
    ) from None

torch.manual_seed(0)
PACKAGE = ROOT / "course" / "linear_extension"


# %%
# A package
# ---------
# Three things make a folder of C++ a module that pip can build. ``pyproject.toml`` says
# what is needed to build it, PyTorch among it, and what it is called:
#
# .. literalinclude:: /../course/linear_extension/pyproject.toml
#    :language: toml
#
# ``setup.py`` says what is compiled. ``CppExtension`` knows PyTorch's headers and
# libraries, ``CUDAExtension`` those of CUDA too, and ``BuildExtension`` calls the
# compilers. The library becomes ``linear_extension/_C.abi3.so``: with
# ``py_limited_api``, one for all versions of Python.
#
# .. literalinclude:: /../course/linear_extension/setup.py
#    :language: python
#    :start-at: SOURCES
#
# And ``linear_extension/__init__.py`` loads it. That is what registers the operators:
#
# .. literalinclude:: /../course/linear_extension/linear_extension/__init__.py
#    :language: python
#    :start-at: LIBRARY =
#    :end-before: def linear(
#
# ``--no-build-isolation`` in the command above builds against the PyTorch that is
# installed. Without it pip would fetch another one to build with, and the library would
# belong to that.

print(linear_extension.LIBRARY.name)
assert linear_extension.LIBRARY.name == "_C.abi3.so"

# %%
# The operator is declared
# ------------------------
# ``TORCH_LIBRARY`` gives an operator its *schema*, ``TORCH_LIBRARY_IMPL`` a kernel
# for one dispatch key. From then on it is ``torch.ops.linear_extension.linear``, for
# Python, for C++ and for a compiler.
#
# .. literalinclude:: /../course/linear_extension/csrc/linear.cpp
#    :language: c++
#    :start-at: TORCH_LIBRARY(
#    :end-before: } // namespace linear_extension

print(ops.linear.default._schema)

# %%
# The kernel
# ----------
# It checks what it is given (an operator is called from everywhere), makes it
# contiguous, and shares the rows among threads with ``at::parallel_for``.
# ``AT_DISPATCH_FLOATING_TYPES`` compiles the body for float and for double.
#
# .. literalinclude:: /../course/linear_extension/csrc/linear.cpp
#    :language: c++
#    :start-at: // Y[n, o] = sum
#    :end-before: // G_X[n, i] = sum


try:
    ops.linear(torch.ones(5, 3), torch.ones(2, 4), None)
except RuntimeError as error:
    print(str(error).splitlines()[0])
else:
    raise AssertionError("sizes that do not fit")

# %%
# What a kernel does not say
# --------------------------
# Three things, all in ``linear_extension/autograd.py``: the shape of the result
# without data (``register_fake``: what a compiler runs instead), the gradients
# (``register_autograd``), and that both are of operators too. The three products, Y =
# X Wᵀ, G W and Gᵀ X, are closed: each one's gradients are made of the other two, so
# that double backward costs two more formulas and no kernel.
#
# .. literalinclude:: /../course/linear_extension/linear_extension/autograd.py
#    :language: python
#    :start-at: def linear_fake
#    :end-before: def backward_weight_backward


x, w, b = (
    torch.randn(s, dtype=torch.double, requires_grad=True)
    for s in ((5, 3), (2, 3), (2,))
)
assert gradcheck(linear_extension.linear, (x, w, b))
assert gradgradcheck(linear_extension.linear, (x, w, b))

# %%
# ``opcheck`` tests all that at once: whether the schema tells the truth, whether the
# fake kernel gives the real one's shapes, dtypes and strides, whether autograd is
# registered where it should be, and whether it compiles.

print(torch.library.opcheck(ops.linear.default, (x, w, b)))

compiled = torch.compile(linear_extension.linear, fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(x, w, b), linear_extension.linear(x, w, b))

exported = torch.export.export(linear_extension.Linear(3, 2), (torch.randn(5, 3),))
assert "linear_extension.linear" in exported.graph_module.code

# %%
# Its tests
# ---------
# The package has tests of its own. In an environment with the package and pytest, from
# the repository's root:
#
# .. code-block:: sh
#
#    python -m pytest course/linear_extension/tests
#    python -m pytest course/linear_extension/tests/test_linear.py -k gradcheck
#
# ``test_linear.py`` is a table of shapes, dtypes and devices, and a test for each thing
# that an operator promises: values and gradients beside ``F.linear``'s, gradcheck,
# opcheck, compile, export, batches, threads, errors. An error has a test too, with its
# words:
#
# .. literalinclude:: /../course/linear_extension/tests/test_linear.py
#    :language: python
#    :start-at: SHAPES = [
#    :end-before: def operands
#
# .. literalinclude:: /../course/linear_extension/tests/test_linear.py
#    :language: python
#    :start-at: BAD = {
#    :end-before: def test_errors_of_dtypes
#
# Here we run a few of them.

few = [PACKAGE / "tests" / "test_linear.py", "-k", "gradcheck or test_errors"]
done = subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *few],
    capture_output=True,
    text=True,
)
print(re.sub(r" in [\d.]+s", "", done.stdout.strip().splitlines()[-1]))
assert done.returncode == 0, done.stdout + done.stderr

# %%
# The same as a Function in C++
# -----------------------------
# Where there is no Python, or in older code, you will meet
# ``torch::autograd::Function``. It is the class of lesson 5, with an
# ``AutogradContext`` for ``ctx`` and undefined tensors for None. It gives you
# gradients, and no more: whoever traces it looks through to what it calls.
#
# .. literalinclude:: /../course/linear_extension/csrc/linear_function.cpp
#    :language: c++
#    :start-at: struct LinearFunction
#    :end-before: } // namespace

assert gradcheck(linear_extension.linear_cpp_function, (x, w, b))
print(linear_extension.linear_cpp_function(x, w, b).grad_fn.name())

# %%
# Without installing: JIT
# -----------------------
# ``torch.utils.cpp_extension.load`` compiles the same sources when it is called, with
# ninja, and caches what it made. Good while you try things; a user should not need a
# compiler. A library's operators can be defined once in a process, so we load it in
# another one.

JIT = """
import os, pathlib, sys, torch
beside = pathlib.Path(sys.executable).parent  # where pip has put ninja
os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ['PATH']}"
from torch.utils.cpp_extension import load
package, made = map(pathlib.Path, sys.argv[1:])
made.mkdir(parents=True, exist_ok=True)
load("linear_jit", [package / "csrc" / n for n in ("linear.cpp", "linear_function.cpp")],
     extra_cflags=["-O3", "-DAT_PER_OPERATOR_HEADERS"],
     build_directory=made, is_python_module=False)
x, w = torch.randn(5, 3), torch.randn(2, 3)
torch.testing.assert_close(torch.ops.linear_extension.linear(x, w, None), x @ w.T)
print("compiled, loaded, right")
"""
made = ROOT / "build" / "course" / "jit"
done = subprocess.run(
    [sys.executable, "-c", JIT, PACKAGE, made], capture_output=True, text=True
)
print(done.stdout.strip().splitlines()[-1] if done.returncode == 0 else done.stderr)
assert done.stdout.strip().endswith("compiled, loaded, right")

# %%
# Headers are what takes the time
# -------------------------------
# ``torch/extension.h`` is all of PyTorch, and Python's headers. Our sources include
# ``ATen/core/Tensor.h``, ``torch/library.h``, and for each operator that they call
# *its* header, ``ATen/ops/empty.h``. We let the compiler only read them, and count
# lines. (To compile them takes, where we tried, a quarter of the time.)

HEADERS = {
    "torch/extension.h": "#include <torch/extension.h>\n",
    "ATen/ATen.h, torch/library.h": "#include <ATen/ATen.h>\n#include <torch/library.h>\n",
    "per operator": "#include <ATen/core/Tensor.h>\n#include <ATen/ops/empty.h>\n"
    "#include <torch/library.h>\n",
}
places = [f"-I{place}" for place in cpp_extension.include_paths()]
places.append(f"-I{cpp_extension.sysconfig.get_paths()['include']}")
lines = {}
for name, text in HEADERS.items():
    read = subprocess.run(
        ["g++", "-std=c++20", "-E", "-P", "-DAT_PER_OPERATOR_HEADERS", *places, "-xc++", "-"],
        input=text, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines[name] = read.stdout.count("\n")
print(lines)
assert (
    lines["per operator"]
    < lines["ATen/ATen.h, torch/library.h"]
    < lines["torch/extension.h"]
)

figure, axes = plt.subplots(figsize=(5, 2))
axes.barh(list(lines), list(lines.values()), color="#8fb0d9")
axes.invert_yaxis()
axes.set_xlabel("lines for the compiler to read")
figure.tight_layout()

# %%
# Exercise
# --------
# An operator ``pairwise(x, y)`` takes x (\\*, n, d) and y (\\*, m, d), with the same
# batch dimensions, and returns all inner products (\\*, n, m), in **float**, whatever
# the dtype, but double for double. Write its fake kernel: the result without data. It
# is called with tensors that have none, so it cannot compute, and for a compiler whose
# program must fit all sizes. A solution is in
# :download:`course/solutions/10_cpp_extension.py
# </../course/solutions/10_cpp_extension.py>`.


def pairwise_fake(x, y):
    """An empty tensor of the result's shape, dtype and device."""
    raise NotImplementedError  # your turn


def pairwise(x, y):
    """The real one."""
    return torch.matmul(x, y.mT).to(torch.promote_types(x.dtype, torch.float))


def check(attempt):
    for turn in range(12):
        n, m, d = size(1, 4), size(1, 4), size(0, 3)
        batch = [size(1, 3) for _ in range(size(0, 2))]
        dtype = (torch.float, torch.bfloat16, torch.double)[turn % 3]
        given = [torch.randn(*batch, rows, d).to(dtype) for rows in (n, m)]
        real = pairwise(*given)
        kind = f"x {tuple(given[0].shape)}, y {tuple(given[1].shape)}, {dtype}"
        for device in ("meta", "cpu"):  # the second as a compiler has it, without data
            with FakeTensorMode() as mode, about(f"{kind}, {device}"):
                inputs = [mode.from_tensor(t).to(device) for t in given]
                fake = attempt(*inputs)
                returned(fake, torch.Tensor, "pairwise_fake")
                for form in ("shape", "dtype", "device"):
                    ours = getattr(fake, form)
                    theirs = getattr(inputs[0] if form == "device" else real, form)
                    assert ours == theirs, f"The {form} is {ours}, not {theirs}."
                pairs = zip(fake.stride(), real.stride(), real.shape, strict=True)
                # Where a size is 1, no step is ever made.
                assert all(ours == theirs for ours, theirs, n in pairs if n != 1), (
                    f"The strides are {fake.stride()}, not {real.stride()}."
                )
        far = torch.device("cuda", 0)  # a fake tensor's may be one that is not here
        empty = [t.to("meta") for t in given]
        with FakeTensorMode() as mode, about(f"{kind}, {far}"):
            inputs = [FakeTensor(mode, t, far) for t in empty]
            try:
                fake = attempt(*inputs)
            except (
                RuntimeError
            ) as error:  # torch can compute nothing for it, not even fakes
                if "not linked with support" not in str(error):
                    raise
            else:
                assert fake.device == far, f"The device is {fake.device}, not {far}."
    mode, sizes = FakeTensorMode(shape_env=ShapeEnv()), [DimDynamic.DYNAMIC] * 3
    inputs = [
        mode.from_tensor(
            torch.randn(2, rows, 5),
            static_shapes=False,
            source=ConstantSource(name),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes),
        )
        for name, rows in (("x", 3), ("y", 4))
    ]
    with mode, about("sizes that are not known yet"):
        shape = attempt(*inputs).shape
        assert all(free_symbols(n) for n in shape), (
            f"Sizes became fixed numbers, {tuple(shape)}: pass them on as they are, "
            "without int()."
        )


report(check, pairwise_fake)
