"""The kernels for CUDA without a GPU: on an emulator; and how their compiler is found."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fork import cuda
from fork.__main__ import ROOT
from fork.base import Base
from fork.errors import ForkError
from fork.graft import Graft
from fork.stack import Stack
from fork.tests.conftest import write_files

HERE = Path(__file__).parent
SOURCES = ROOT / "aten/src/ATen/native/cuda"
# What the emulator stands in for.
REPLACED = (
    *(f"c10/cuda/CUDA{name}.h" for name in ("Exception", "Functions", "Stream")),
    *(f"ATen/native/cuda/{name}.cuh" for name in ("AttnMma", "AttnWideMma")),
)
# A program like test/test_attn.py, but that CPU tensors go to the kernels for CUDA.
RUN = """
import atexit, runpy, sys, torch
library, sys.argv = sys.argv[1], sys.argv[2:]
torch.ops.load_library(library)
atexit.register(lambda: print("launches:", torch.ops.attn_emulated.device(*DEVICE)))
torch.ops.attn_emulated.device(*DEVICE)
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def emulate(folder, change=lambda text: text):
    """The library with the kernels, each of whose sources is changed first."""
    sources = {f"ATen/native/cuda/{s.name}": change(s.read_text()) for s in SOURCES.glob("*.cuh")}
    host = (SOURCES / "Attn.cu").read_text()
    launch = re.compile(r"(\w+)<<<(.*?)>>>\(", re.S)
    sources["Attn.cu"], launches = launch.subn(r"emulator::launch(\1, \2)(", host)
    assert launches == 1
    sources |= dict.fromkeys(REPLACED, '#include "cuda_emulator.h"\n')
    write_files(folder / "include", sources)
    torch = Path(importlib.util.find_spec("torch").origin).parent
    library = folder / "emulated.so"
    places = [folder / "include", HERE, torch / "include", torch / "include/torch/csrc/api/include"]
    subprocess.run(
        [
            *("g++", "-std=c++20", "-O2", "-w", "-shared", "-fPIC", "-U_FORTIFY_SOURCE"),
            *(f"-I{place}" for place in places),
            *(HERE / "cuda_emulated.cpp", "-o", library),
            *(f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"),
        ],
        check=True,
    )
    return library


def run_tests(library, *options, device=(9, 227 << 10, 1)):
    """The operator's own tests: whether they passed, what they said, the kernels launched."""
    program = f"DEVICE = {device}\n{RUN}"
    command = [sys.executable, "-c", program, library, ROOT / "test/test_attn.py", *options]
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT / "test",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    launches = re.search(r"^launches: (\d+)$", done.stdout, re.M)
    return done.returncode == 0, done.stdout, int(launches[1])


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return emulate(tmp_path_factory.mktemp("emulated"))


# The more multiprocessors, the smaller the blocks of matrices as small as the tests': with so
# many, the tests for which that makes a difference.
EACH = "values_and_gradients_"
OWN_TESTS = [
    ("float16", 1, ""),
    ("float16", 3, f"{EACH}large_cpu"),
    ("float16", 5, f"{EACH}long_"),
    ("float16", 1000, f"{EACH}b"),
    ("float32", 1, ""),
    ("float32", 3, f"{EACH}long_"),
    ("float32", 6, f"{EACH}batch_of_large_"),
    ("float32", 1000, f"{EACH}b"),
    ("float64", 1, EACH),
    ("float64", 3, f"{EACH}long_"),
    ("float64", 1000, f"{EACH}b"),
]


@pytest.mark.parametrize("dtype, processors, tests", OWN_TESTS)
def test_the_operators_own_tests(library, dtype, processors, tests):
    """On the kernels, bfloat16 with half; the emulator finds races and misaligned accesses."""
    device = (9, 227 << 10, processors)
    passed, said, launches = run_tests(library, "-k", f"*{tests}*{dtype}", device=device)
    assert passed, said
    assert launches > 0


@pytest.mark.parametrize("processors", [1, 1000])
def test_a_device_with_less_shared_memory(library, processors):
    """As GPUs of capability 8.6 and 8.9 have: the kernels take smaller blocks."""
    cases = ("large_cpu_float16", "large_cpu_float32", "long_cpu_float64")
    only = [option for case in cases for option in ("-k", f"values_and_gradients_{case}")]
    passed, said, launches = run_tests(library, *only, device=(8, 99 << 10, processors))
    _, _, usual = run_tests(library, *only, device=(8, 227 << 10, processors))
    assert passed, said
    assert launches == usual > 0


TF32 = """
import sys, torch
torch.ops.load_library(sys.argv[1])
torch.manual_seed(0)
q, k, v = (torch.randn(size) for size in ((70, 33), (90, 33), (90, 17)))

def to_tf32(x):
    bits = x.view(torch.int32) + 0x1000 & ~0x1FFF
    return bits.view(torch.float).double()

def attn(q, k, v, rounded):
    attn = torch.tanh(rounded(q) @ rounded(k).T)
    return rounded(attn.float()) @ rounded(v), attn

def error(x, y):
    return (x - y).abs().max().item()

exact = attn(q, k, v, torch.Tensor.double)
for setting in ("pass", "cuda.matmul.allow_tf32 = True", "cuda.matmul.allow_tf32 = False",
                "cuda.matmul.fp32_precision = 'tf32'"):
    exec(setting if setting == "pass" else f"torch.backends.{setting}")
    # Twice what that precision costs the plain computation, and what float does anyway.
    allowed = setting.endswith(("True", "'tf32'"))
    plain = attn(q, k, v, to_tf32) if allowed else exact
    for x, y, z in zip(torch.attn(q, k, v), plain, exact):
        assert error(x, z) <= 2 * error(y, z) + 1e-5, setting
        assert (error(x, z) > 1e-4) == allowed, setting
"""


def test_tf32_where_it_is_allowed(library):
    """By the older setting and by the newer one, which the older does not know."""
    done = subprocess.run(
        [sys.executable, "-c", TF32, library], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("device", [(7, 227 << 10, 1), (9, 32 << 10, 1)], ids=["old", "small"])
def test_a_device_without_kernels_composes(library, device):
    passed, said, launches = run_tests(library, "-k", "large_cpu_bfloat16", device=device)
    assert passed, said
    assert launches == 0


def test_a_missing_barrier_is_found(tmp_path):
    """What the emulator says of a race: it is not that it sees none."""
    library = emulate(tmp_path, lambda text: text.replace("__syncthreads();", ""))
    passed, said, _ = run_tests(library, "-k", "large_cpu_bfloat16")
    assert not passed
    assert "race: a " in said


def base_of(folder, cuda_release, context="enum class Float32Backend { CUDA };"):
    text = f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda_release!r}\n"
    files = {"torch/version.py": text, "torch/include/ATen/Context.h": context}
    return Base(write_files(folder, files))


def compiler(folder, release):
    text = f"""#!/bin/sh
case $1 in
    --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
    *) printf 'compute_%s\\n' 75 80 86 90 100 120 ;;
esac
"""
    nvcc = write_files(folder, {"bin/nvcc": text}) / "bin/nvcc"
    nvcc.chmod(0o755)
    return nvcc


def test_compiler_of_the_bases_release(tmp_path, monkeypatch):
    nvcc = compiler(tmp_path / "cuda", "13.1")
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    found = cuda.find(base_of(tmp_path / "base", "13.0"))
    assert found == cuda.Nvcc(nvcc, "13.1", (80, 90, 100))


def test_base_without_cuda(tmp_path):
    assert cuda.find(base_of(tmp_path, None)) == "torch 2.13.0 is not built for CUDA"


def test_base_that_cannot_tell_of_tf32(tmp_path):
    why = cuda.find(base_of(tmp_path, "13.0", context="bool allowTF32CuBLAS() const;"))
    assert why.startswith("torch 2.13.0 cannot tell the kernels whether TF32 is allowed")


def test_compiler_of_another_release(tmp_path, monkeypatch):
    nvcc = compiler(tmp_path / "cuda", "11.8")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDACXX", str(nvcc))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    why = cuda.find(base_of(tmp_path / "base", "99.0"))
    assert why.startswith(
        f"torch 2.13.0 is built for CUDA 99.0, for which there is no nvcc; {nvcc} is of 11.8"
    )
    assert why.endswith("on a GPU torch.attn is composed of matmul and tanh")


def said(symbol, architecture, registers, stores=0, loads=0):
    """As ptxas says it."""
    return f"""\
ptxas info    : Compiling entry function '{symbol}' for '{architecture}'
ptxas info    : Function properties for {symbol}
    8 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 8 bytes cumulative stack size
"""


ROWS = "_ZN2at6native10attn_tiles9attn_rowsI6__halfLi64ELb1ELi4EEEvNS1_7RowArgsIT_EE"
WIDE = (
    "_ZN2at6native10attn_tiles17attn_wide_columnsIfLi128ELNS1_9PrecisionE1ELNS1_9GradientsE2ELi1E"
    "EEvNS1_10ColumnArgsIT_EE"
)
CLEAN = said(ROWS, "sm_80", 209) + said(ROWS, "sm_90", 203)


def test_what_the_compiler_says():
    half, _, wide = cuda.kernels(CLEAN + said(WIDE, "sm_90", 228, 4, 8))
    assert half == cuda.Kernel("attn_rows<__half, 64, true, 4>", "sm_80", 209, 0)
    assert half.sweep == "RowSweep<64, 4>"
    assert wide.name == "attn_wide_columns<float, 128, (Precision)1, (Gradients)2, 1>"
    assert wide.sweep == "WideColumnSweep<float, 128, 1>" and wide.spilled == 12


@pytest.mark.parametrize(
    "log, problems",
    [
        ("", ["no kernel was compiled"]),
        (CLEAN, []),
        (said(ROWS, "sm_80", 1), ["attn_rows<__half, 64, true, 4>: not compiled for sm_90"]),
        (
            CLEAN + said(WIDE, "sm_80", 255) + said(WIDE, "sm_90", 255, 4, 8),
            [
                "attn_wide_columns<float, 128, (Precision)1, (Gradients)2, 1>: spills 12 bytes "
                "on sm_90"
            ],
        ),
    ],
    ids=["nothing", "clean", "lacking", "spilling"],
)
def test_what_a_kernel_must_not_have(log, problems):
    assert cuda.problems(cuda.kernels(log), (80, 90)) == problems


def test_table_of_kernels():
    console = Console(width=100, record=True)
    found = cuda.kernels(said(ROWS, "sm_100", 9) + CLEAN + said(WIDE, "sm_90", 228, 4, 8))
    console.print(cuda.table(found, dict.fromkeys((k.sweep for k in found), 3 << 10)))
    lines = [re.split(r" {2,}", line.strip()) for line in console.export_text().splitlines()]
    assert lines[-3][-3:] == ["sm_80", "sm_90", "sm_100"]
    assert lines[-2][1:] == ["3.0", "209, 0", "203, 0", "9, 0"]
    assert lines[-1][1:] == ["3.0", "-", "228, 12", "-"]


def test_check_without_a_compiler(tmp_path):
    with pytest.raises(ForkError, match="torch 2.13.0 is not built for CUDA"):
        Graft(Stack(ROOT), base_of(tmp_path, None)).make_kernels()
