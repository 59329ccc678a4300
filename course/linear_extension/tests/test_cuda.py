"""The kernel for CUDA: compiled where there is an nvcc, and run on an emulator.

On a GPU it is run by test_linear.py.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils import cpp_extension

import linear_extension  # noqa: F401  # the operators

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent / "csrc"
REPLACED = [f"c10/cuda/CUDA{name}.h" for name in ("Exception", "Guard", "Stream")]
# A wheel for CPUs has all of c10/cuda but for this, which its build writes.
MACROS = "#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n"
# A kernel's three operators, on a CPU's tensors: %s is their namespace.
REGISTER = """
TORCH_LIBRARY(%s, m) {
  using namespace %s;
  m.def("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor", linear);
  m.def("linear_backward_input(Tensor grad, Tensor weight) -> Tensor", linear_backward_input);
  m.def("linear_backward_weight(Tensor grad, Tensor input) -> Tensor", linear_backward_weight);
  m.def("launches() -> int", [] { return int64_t(emulator::launches); });
}
"""
# What the tests must find, were it in the kernel.
FAULTS = {
    "leaves_out_the_last_tile": ("k < p.inner;", "k + kTile <= p.inner;"),
    "adds_another_bias": ("p.bias[column]", "p.bias[row]"),
    "sums_one_too_few": ("i < kTile", "i < kTile - 1"),
    "does_not_wait": ("__syncthreads(); // the tiles", "// the tiles"),
    "is_not_transposed": ("product(grad.t(), input)", "product(grad, input)"),
}


def nvcc():
    at_home = cpp_extension.CUDA_HOME and shutil.which(
        "nvcc", path=f"{cpp_extension.CUDA_HOME}/bin"
    )
    return at_home or shutil.which("nvcc")


@pytest.mark.skipif(
    not nvcc(), reason="no nvcc: the kernel is compiled for the emulator alone"
)
def test_it_compiles(tmp_path):
    """For the oldest architecture that lesson 11 names, and no register is spilled."""
    macros = tmp_path / "include" / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    macros.parent.mkdir(parents=True)
    macros.write_text(MACROS, encoding="utf-8")
    places = [*cpp_extension.include_paths(), tmp_path / "include"]
    done = subprocess.run(
        [
            *(
                nvcc(),
                "-c",
                "-std=c++20",
                "-O3",
                "-arch=sm_80",
                "-DAT_PER_OPERATOR_HEADERS",
            ),
            *("-Xptxas=-v", "-w", "-o", tmp_path / "linear_cuda.o"),
            *(f"-I{place}" for place in places),
            SOURCES / "linear_cuda.cu",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    kernels = re.findall(
        r"Compiling entry function '(\w*product_kernel\w*)'", done.stderr
    )
    assert len(kernels) == 2  # float and double
    assert set(re.findall(r"(\d+) bytes spill", done.stderr)) == {"0"}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernel, and a copy with each fault, on the emulator: namespaces of one library."""
    folder = tmp_path_factory.mktemp("emulated")
    launch = re.compile(r"(\w+)<<<(.*?)>>>\(", re.S)
    kernel, launches = launch.subn(
        r"emulator::launch(\1, \2)(",
        (SOURCES / "linear_cuda.cu").read_text(encoding="utf-8"),
    )
    assert launches == 1
    kernel = kernel.replace(
        "extern __shared__ double tiles[];", "double tiles[kShared / 8];"
    )
    kernel = kernel[: kernel.index("TORCH_LIBRARY_IMPL")] + "}\n"
    parts = ['#include "cuda_emulator.h"\n']
    for name, (right, wrong) in {"emulated": ("", ""), **FAULTS}.items():
        assert right in kernel
        changed = kernel.replace(right, wrong) if right else kernel
        mine = f"namespace {name} {{ using namespace linear_extension;"
        parts += [
            changed.replace("namespace linear_extension {", mine),
            REGISTER % (name, name),
        ]
    for name in REPLACED:
        place = folder / "include" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text('#include "cuda_emulator.h"\n', encoding="utf-8")
    source, made = folder / "emulated.cpp", folder / "emulated.so"
    source.write_text("\n".join(parts), encoding="utf-8")
    places = [folder / "include", HERE, SOURCES, *cpp_extension.include_paths()]
    torch_lib = cpp_extension.library_paths()[0]
    command = [
        *("g++", "-std=c++20", "-O2", "-w", "-shared", "-fPIC", "-U_FORTIFY_SOURCE"),
        *("-DAT_PER_OPERATOR_HEADERS", *(f"-I{place}" for place in places), source),
        *("-o", made, f"-L{torch_lib}", "-ltorch", "-ltorch_cpu", "-lc10"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


RUN = """
import sys, torch
torch.ops.load_library(sys.argv[1])
ops = getattr(torch.ops, sys.argv[2])
torch.manual_seed(0)
for rows, in_, out in {shapes}:
    for dtype in (torch.float, torch.double):
        x, w, b, grad = (torch.randn(s, dtype=dtype)
                         for s in ((rows, in_), (out, in_), (out,), (rows, out)))
        pairs = [(ops.linear(x, w, b), x.double() @ w.double().T + b.double()),
                 (ops.linear(x.T.contiguous().T, w, None), x.double() @ w.double().T),
                 (ops.linear_backward_input(grad, w), grad.double() @ w.double()),
                 (ops.linear_backward_weight(grad, x), grad.double().T @ x.double())]
        for found, exact in pairs:
            unit = torch.finfo(dtype).eps * (in_ + out + rows)
            scale = exact.abs().max().clamp(min=1) if exact.numel() else 1
            assert found.shape == exact.shape
            assert (found - exact).abs().le(unit * scale).all(), (rows, in_, out, dtype)
print("launches:", ops.launches())
"""
SHAPES = [
    (1, 1, 1),
    (16, 16, 16),
    (17, 19, 33),
    (5, 40, 2),
    (3, 0, 2),
    (0, 3, 2),
    (4, 3, 0),
]


def run(library, kernel):
    program = RUN.format(shapes=SHAPES)
    command = [sys.executable, "-c", program, str(library), kernel]
    return subprocess.run(command, capture_output=True, text=True)


def test_on_the_emulator(library):
    done = run(library, "emulated")
    assert done.returncode == 0, done.stderr
    # Two dtypes; four products of each of four shapes, and where a size is 0 those with a result.
    assert done.stdout == f"launches: {2 * (4 * 4 + 2 + 1 + 1)}\n"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(library, fault):
    done = run(library, fault)
    assert (
        re.search("AssertionError: |Error: .*size", done.stderr) or done.returncode < 0
    )


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: the emulator ran the kernel"
)
def test_gradients_on_a_gpu():
    shapes = ((5, 3), (2, 3), (2,))
    given = [
        torch.randn(s, dtype=torch.double, device="cuda", requires_grad=True)
        for s in shapes
    ]
    assert gradcheck(linear_extension.linear, given)
