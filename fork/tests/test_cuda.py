"""The kernels for CUDA without a GPU: on an emulator; and how their compiler is found."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fork import cuda
from fork.__main__ import ROOT
from fork.base import Base
from fork.tests.conftest import write_files

HERE = Path(__file__).parent
SOURCES = ROOT / "aten/src/ATen/native/cuda"
# What the emulator stands in for.
REPLACED = (
    *(f"c10/cuda/CUDA{name}.h" for name in ("Exception", "Functions", "Stream")),
    "ATen/native/cuda/AttnMma.cuh",
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


def run_tests(library, *options, device=(9, 227 << 10)):
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


def test_the_operators_own_tests(library):
    """Of bfloat16 and half, on the kernels; the emulator finds races and misaligned accesses."""
    passed, said, launches = run_tests(library, "-k", "float16")
    assert passed, said
    assert launches > 100


@pytest.mark.parametrize("device", [(7, 227 << 10), (9, 32 << 10)], ids=["old", "small"])
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


def base_of(folder, cuda_release):
    text = f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda_release!r}\n"
    return Base(write_files(folder, {"torch/version.py": text}))


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
