"""
11. And in CUDA
===============

The same operators on a GPU: forward and both backwards in one file,
``course/linear_extension/csrc/linear_cuda.cu``. Where there is an nvcc, the file is
compiled; where there is a GPU, it runs there; and where there is neither, it still
runs, on an emulator.
"""

import re
import shutil

import torch
from torch.autograd import gradcheck

from drawing import plt
from exercise import ROOT, about, parts, report, returned, size

torch.manual_seed(0)

# %%
# What a kernel is
# ----------------
# A kernel is the program of *one thread*. Thousands run it, in *blocks* that share a
# small, fast memory; a thread knows its number in its block, ``threadIdx.x``, and its
# block's, ``blockIdx.x``, and computes from them what is its own part.
#
# All three products of a linear layer are C = A B: of X and Wᵀ, of G and W, of Gᵀ and
# X. A transpose is no work: it is the same memory with other strides. So one kernel
# does it all. A block makes a tile of C of 16 x 16, each of its 256 threads one
# entry. For each tile of A and of B on the way, the threads first bring both into
# shared memory, one number each, wait for one another, and then each reads a row and
# a column of what all have brought. From the large memory, a number is read once per
# tile instead of once per entry: 16 times less.
#
# .. literalinclude:: /../course/linear_extension/csrc/linear_cuda.cu
#    :language: c++
#    :start-at: // C[r, c] = sum_k
#    :end-before: // a (rows, inner) times b (inner, columns)
#
# Where it is easy to go wrong:
#
# - ``__syncthreads()`` **twice**: nobody may read a tile that is not yet there, and
#   nobody may overwrite one that is still read.
# - all threads of a block must come to it: so it is the *numbers* that are left out
#   at the edge (``in_a``, ``in_b``), not the threads.
# - a grid of no blocks is an error: an empty result launches nothing.
# - a launch fails silently unless you ask: ``C10_CUDA_KERNEL_LAUNCH_CHECK()``.
# - tensors may be on another GPU than the current one: ``CUDAGuard``.
#
# The launch, on the *current stream*, so that it comes after what PyTorch has queued
# before:
#
# .. literalinclude:: /../course/linear_extension/csrc/linear_cuda.cu
#    :language: c++
#    :start-at: // a (rows, inner) times b (inner, columns)
#    :end-before: // Y = X W^T + b
#
# The schema, the fake kernel, the gradients: all stays as it was in lesson 10. A
# kernel for another device is registered for another dispatch key, and that is all.
#
# .. literalinclude:: /../course/linear_extension/csrc/linear_cuda.cu
#    :language: c++
#    :start-at: // Y = X W^T + b
#
# Does it run here?
# -----------------

nvcc = shutil.which("nvcc")
print("nvcc:", nvcc or "none: the file is compiled for the emulator alone")
print("torch is built for CUDA:", torch.version.cuda or "no")
print(
    "GPU:",
    torch.cuda.get_device_name()
    if torch.cuda.is_available()
    else "none: the tests run it on the emulator",
)

if torch.cuda.is_available() and torch.version.cuda:
    try:
        from linear_extension import linear
    except (
        ImportError
    ):  # where it is not installed, its folder beside this file is found
        print(
            "linear_extension is not installed (lesson 10): nothing is run on the GPU"
        )
    else:
        shapes = ((5, 3), (2, 3), (2,))
        given = [
            torch.randn(s, dtype=torch.double, device="cuda", requires_grad=True)
            for s in shapes
        ]
        assert gradcheck(linear, given)

# %%
# The emulator
# ------------
# ``course/linear_extension/tests/cuda_emulator.h`` makes of CUDA's words C++ of a CPU:
# a block's threads are coroutines, each runs until it comes to a ``__syncthreads()``,
# and then another's turn is. It has no speed to speak of. But it finds a barrier that
# is missing, an index that is wrong and a deadlock. The package's tests compile the
# file for it, run it on shapes that fill no tile, and then run it again with faults
# planted:

tests = ROOT / "course/linear_extension/tests/test_cuda.py"
if tests.exists():  # in a clone of this repository
    faults = re.findall(r'^    "(\w+)": \(', tests.read_text(encoding="utf-8"), re.M)
    print("planted, and found:", ", ".join(name.replace("_", " ") for name in faults))
    assert len(faults) >= 5

# %%
# How much of the hardware does such a kernel use?
# ------------------------------------------------
# A GPU does many operations for each byte that it reads, and a kernel must do as many
# to keep it busy: its *arithmetic intensity*. With tiles of T x T, a thread block
# reads two tiles, 2 T² numbers, for 2 T³ operations: T operations per number, T / 4
# per byte in float. The *roofline* says what is possible: bandwidth times intensity,
# but not more than the peak. An H200 has about 67 Tflop/s in float and 4.8 TB/s; its
# shared memory, which is what limits once a tile is there, is not in the picture.

peak, bandwidth = 67e12, 4.8e12
intensity = torch.logspace(-1, 3, 100, dtype=torch.double)
roof = (bandwidth * intensity).clamp(max=peak)
figure, axes = plt.subplots(figsize=(5, 3.4))
axes.loglog(intensity, roof / 1e12, color="#444444")
for tile in (1, 16, 64, 128):
    reached = min(peak, bandwidth * tile / 4)
    axes.plot(tile / 4, reached / 1e12, "o", label=f"tiles of {tile} x {tile}")
axes.set_xlabel("operations per byte read")
axes.set_ylabel("Tflop/s")
axes.legend()
figure.tight_layout()
assert bandwidth * 16 / 4 < peak < bandwidth * 64 / 4

# %%
# So 16 is too small, and nothing here uses the tensor cores: cuBLAS does both, and
# wins by far. Before you write the next kernel, ask whether a compiler can: in Triton
# you write what a *block* computes, with products of whole tiles, and tensor cores,
# shared memory and barriers are its business. ``attn``'s own kernels for GPUs are
# written so: ``torch/_native/ops/attn/triton_kernels.py``.
#
# Exercise
# --------
# Write the arithmetic of such a launch: how many blocks, and which entry of C (rows,
# columns) belongs to a thread. Blocks are numbered in one dimension, along the rows of
# tiles, so that block 1 is on the right of block 0. A thread with no entry gets None. A
# solution is in
# :download:`course/solutions/11_cuda.py </../course/solutions/11_cuda.py>`.


def launch(rows, columns, tile):
    """The number of blocks, and a function (block, thread) -> (row, column) or None."""
    raise NotImplementedError  # your turn


def check(attempt):
    drawn = [(size(1, 9), size(1, 9), size(1, 4)) for _ in range(10)]
    for rows, columns, tile in ((5, 3, 2), (0, 5, 4), (4, 8, 4), *drawn):
        with about(f"rows {rows}, columns {columns}, tile {tile}"):
            found = parts(attempt(rows, columns, tile), ["blocks", "entry"], "launch")
            blocks, entry = found["blocks"], found["entry"]
            returned(blocks, int, "launch, for the number of blocks,")
            across = -(-columns // tile)
            fewest = -(-rows // tile) * across
            assert blocks == fewest, f"{blocks} blocks, where {fewest} are needed."
            made = [[entry(b, t) for t in range(tile * tile)] for b in range(blocks)]
            made = [
                [e and tuple(returned(e, (tuple, list), "entry")) for e in own]
                for own in made
            ]
            entries = [e for own in made for e in own if e is not None]
            for row, column in entries:
                inside = 0 <= row < rows and 0 <= column < columns
                assert inside, f"{(row, column)} is outside of C."
            assert len({*entries}) == len(entries), "Two threads have the same entry."
            assert len(entries) == rows * columns, "Some entry has no thread."
            for block, own in enumerate(made):
                tiles = {(e[0] // tile, e[1] // tile) for e in own if e is not None}
                assert len(tiles) == 1, "A block's entries are not one tile."
                assert tiles == {divmod(block, across)}, (
                    f"Block {block} has the tile {tiles.pop()}, not {divmod(block, across)}."
                )
            if columns >= tile and rows:
                first = made[0][:tile]
                assert first == [(0, i) for i in range(tile)], (
                    f"Neighbouring threads read far apart: {first}."
                )


report(check, launch)
