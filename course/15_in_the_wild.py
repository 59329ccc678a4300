"""
15. In the wild
===============

Where PyTorch and its ecosystem do each of what this course is about, by name and
place: read these next. Each is looked up here, in the PyTorch that is installed, so
that the list stays true.
"""

import importlib
import inspect
import re
from collections import Counter
from pathlib import Path

import torch
import torchgen

from drawing import plt
from exercise import about, report, returned, size

TORCH = Path(torch.__file__).parent

# %%
# Functions in Python
# -------------------
# .. list-table::
#    :header-rows: 1
#
#    * - name
#      - worth a look because
#    * - ``torch._lobpcg.LOBPCGAutogradFunction``
#      - a library's algorithm inside, an implicit formula outside
#    * - ``torch.utils.checkpoint.CheckpointFunction``
#      - a backward that runs the forward again
#    * - ``torch.nn.modules._functions.SyncBatchNorm``
#      - communication in forward and backward, ``needs_input_grad``
#    * - ``torch.nn.modules._functions.CrossMapLRN2d``
#      - a layer in Python, with its twin in C++ below
#    * - ``torch.distributed.nn.functional._AllReduce``
#      - a collective, whose gradient is a collective
#    * - ``torch.distributed.tensor._redistribute.Redistribute``
#      - DTensor: the gradient goes back to the placement it came from

FUNCTIONS = (
    "torch._lobpcg.LOBPCGAutogradFunction",
    "torch.utils.checkpoint.CheckpointFunction",
    "torch.nn.modules._functions.SyncBatchNorm",
    "torch.nn.modules._functions.CrossMapLRN2d",
    "torch.distributed.nn.functional._AllReduce",
    "torch.distributed.tensor._redistribute.Redistribute",
)
for name in FUNCTIONS:
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    assert issubclass(found, torch.autograd.Function), name
    place = Path(inspect.getsourcefile(found)).relative_to(TORCH)
    print(f"{name}: torch/{place}, line {inspect.getsourcelines(found)[1]}")

# %%
# In C++
# ------
# .. list-table::
#    :header-rows: 1
#
#    * - name
#      - place
#    * - ``CrossMapLRN2d``, a Function
#      - ``torch/csrc/api/include/torch/nn/modules/_functions.h``
#    * - ``MaxPool3dAutogradFunctionTS``, a Function for the lazy backend
#      - ``torch/csrc/lazy/ts_backend/ts_autograd_functions.h``
#    * - ``SendRpcBackward`` and ``RecvRpcBackward``, nodes of RPC's distributed autograd: their
#        ``apply`` sends gradients to another machine
#      - ``torch/csrc/distributed/autograd/functions/``
#    * - ``RoIAlignFunction``, a Function in another package, ``torchvision``
#      - ``torchvision/csrc/ops/autograd/roi_align_kernel.cpp``
#
# The headers of the first three are in the wheel:

HEADERS = {
    "csrc/api/include/torch/nn/modules/_functions.h": "CrossMapLRN2d : public",
    "csrc/lazy/ts_backend/ts_autograd_functions.h": "MaxPool3dAutogradFunctionTS",
    "csrc/distributed/autograd/functions/recvrpc_backward.h": "RecvRpcBackward : public",
}
for place, words in HEADERS.items():
    assert words in (TORCH / "include" / "torch" / place).read_text(encoding="utf-8"), (
        place
    )

# %%
# Composites and formulas in ATen
# -------------------------------
# All of ATen, by the table of lesson 1. A *public* operator is one that does not
# begin with an underscore; one that only writes into a tensor that it is given
# (``out=``, in place) is left out.

PACKAGED = Path(torchgen.__file__).parent / "packaged"


def entries(file, key):
    """The entries of a YAML file, each as text that begins with the schema."""
    text = (PACKAGED / file).read_text(encoding="utf-8")
    return re.split(rf"^- {key}: ", text, flags=re.M)[1:]


formulas = {e.split("(")[0] for e in entries("autograd/derivatives.yaml", "name")}
kinds = {}
for entry in entries("ATen/native/native_functions.yaml", "func"):
    schema, name = entry.partition("\n")[0], entry.split("(")[0]
    keys = re.findall(r"^    (\w[\w, ]*):", entry, re.M)  # below `dispatch:`
    if name.startswith("_") or "!" in schema:
        continue
    if name in formulas:
        kinds[name] = "formula in derivatives.yaml"
    elif not keys or "CompositeImplicitAutograd" in ", ".join(keys):
        kinds[name] = "composite"
    else:
        kinds[name] = "no derivative: factories, indices, tests"
counts = Counter(kinds.values())
print(dict(counts))
figure, axes = plt.subplots(figsize=(5, 2))
axes.barh(list(counts), list(counts.values()), color="#8fb0d9")
axes.set_xlabel("operators")
figure.tight_layout()
assert kinds["narrow"] == kinds["einsum"] == kinds["kron"] == "composite"
assert (
    kinds["sin"]
    == kinds["mm"]
    == kinds["linalg_cholesky_ex"]
    == "formula in derivatives.yaml"
)
assert all(count > 100 for count in counts.values())

# %%
# A good first one to read from end to end is ``cdist``: schema, kernel for two
# devices, formula, and its own backward as an operator. Then ``torch.attn``, of which
# :doc:`the stack </stack>` shows each of these as a commit.
#
# Operators of other packages
# ---------------------------
# - ``torchvision``: ``torchvision/csrc/ops/`` declares with ``TORCH_LIBRARY``, has
#   kernels for CPU and CUDA, Functions in C++ under ``autograd/``, and fake kernels
#   in ``torchvision/_meta_registrations.py``.
# - ``flash-attention``: ``flash_attn/flash_attn_interface.py`` has both, a
#   ``torch.autograd.Function`` and ``torch.library.custom_op``.
# - ``xformers`` and ``fairscale``: Functions around Triton kernels and collectives.
#
# Exercise
# --------
# Write ``kind``, which says by the *dispatcher*, without a file, what an operator of
# ATen is: ``"composite"`` if autograd follows what it calls, ``"formula"`` if it has
# an entry in ``derivatives.yaml``, else ``"none"``. The function
# ``torch._C._dispatch_has_kernel_for_dispatch_key(name, key)`` says whether
# ``"aten::sin"`` has a kernel for ``"CPU"``, ``"AutogradCPU"``,
# ``"CompositeImplicitAutograd"`` or ``"CompositeExplicitAutograd"``. Mind that a
# generated formula is registered for an *alias*, ``"Autograd"``, if at all; and that
# every operator that is no composite gets a kernel for it, also where nothing is to
# be recorded. Look at a result instead: what does its ``grad_fn`` say? A solution is
# in :download:`course/solutions/15_in_the_wild.py
# </../course/solutions/15_in_the_wild.py>`.


def kind(operator, *args):
    """What `operator`, of torch.ops.aten, is; `args` are some that it can be called with."""
    raise NotImplementedError  # your turn


def check(attempt):
    aten = torch.ops.aten
    rows, columns = size(2, 4), size(2, 4)
    x, square = torch.rand(rows, columns), torch.rand(rows, rows)
    cases = [
        ("composite", aten.narrow.default, (x, 0, 0, 2)),
        ("composite", aten.kron.default, (x, square)),
        ("composite", aten.einsum.default, ("ij,jk", [square, x])),
        ("formula", aten.sin.default, (x,)),
        ("formula", aten.mm.default, (square, x)),
        ("formula", aten.attn.default, (x, x, x)),
        ("formula", aten.sort.default, (x,)),
        ("formula", aten.embedding.default, (x, torch.tensor([0, rows - 1]))),
        ("none", aten.eq.Tensor, (x, x)),
        ("none", aten.argmax.default, (x,)),
        ("none", aten.zeros_like.default, (x,)),
    ]
    for wanted, operator, args in cases:
        with about(str(operator)):
            found = returned(attempt(operator, *args), str, "kind")
            assert found == wanted, f"{wanted}, not {found}."
            assert not any(t.requires_grad for t in (x, square)), (
                "the caller's tensors changed."
            )


report(check, kind)
