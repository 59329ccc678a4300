"""Tests how nvcc is found, what it says of kernels, and a graft with a kernel for CUDA."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fork.errors import ForkError
from fork.graft import build
from fork.graft.base import Base, get
from fork.graft.build import Graft, cuda
from fork.overlay import NATIVE, Stack, default_release
from fork.paths import BASES, ROOT
from fork.tests.conftest import write_files

KERNEL = """#include <ATen/cuda/CUDAContextLight.h>
__global__ void fill(float* x) { x[threadIdx.x] = 1; }
"""
MACROS = "#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n"


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
    assert found == cuda.Nvcc(nvcc, "13.1", (80, 90, 100), 75)
    assert found.with_oldest().architectures == (75, 80, 90, 100)


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
    assert why.endswith("on a GPU the operators are composed of others")


def said(symbol, architecture, registers, stores=0, loads=0):
    """Returns what ptxas prints for a kernel."""
    return f"""\
ptxas info    : Compiling entry function '{symbol}' for '{architecture}'
ptxas info    : Function properties for {symbol}
    8 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 8 bytes cumulative stack size
"""


ROWS = "_ZN2at6native4rowsI6__halfLi64ELb1EEEvPT_"
WIDE = "_ZN2at6native4wideIfLNS0_9PrecisionE1EEEvPT_"
CLEAN = said(ROWS, "sm_80", 209) + said(ROWS, "sm_90", 203)


def test_what_the_compiler_says():
    half, _, wide = cuda.kernels(CLEAN + said(WIDE, "sm_90", 228, 4, 8))
    assert half == cuda.Kernel("rows<__half, 64, true>", "sm_80", 209, 0)
    assert wide.name == "wide<float, (Precision)1>"
    assert wide.spilled == 12


@pytest.mark.parametrize(
    "log, problems",
    [
        ("", ["no kernel was compiled"]),
        (CLEAN, []),
        (said(ROWS, "sm_80", 1), ["rows<__half, 64, true>: not compiled for sm_90"]),
        (
            CLEAN + said(WIDE, "sm_80", 255) + said(WIDE, "sm_90", 255, 4, 8),
            ["wide<float, (Precision)1>: spills 12 bytes on sm_90"],
        ),
    ],
    ids=["nothing", "clean", "lacking", "spilling"],
)
def test_what_a_kernel_must_not_have(log, problems):
    assert cuda.problems(cuda.kernels(log), (80, 90)) == problems


@pytest.mark.parametrize(
    "log, problems",
    [
        (CLEAN, ["not compiled for sm_75"]),
        (CLEAN + said(ROWS, "sm_75", 4), []),
        (CLEAN + said(ROWS, "sm_75", 200), ["has a body on sm_75, where it is not launched"]),
    ],
    ids=["lacking", "empty", "body"],
)
def test_kernel_for_what_is_older(log, problems):
    expected = [f"rows<__half, 64, true>: {problem}" for problem in problems]
    assert cuda.problems(cuda.kernels(log), (75, 80, 90)) == expected


def test_table_of_kernels():
    console = Console(width=100, record=True)
    found = cuda.kernels(said(ROWS, "sm_100", 9) + CLEAN + said(WIDE, "sm_90", 228, 4, 8))
    console.print(cuda.table(found))
    lines = [re.split(r" {2,}", line.strip()) for line in console.export_text().splitlines()]
    assert lines[-3][-3:] == ["sm_80", "sm_90", "sm_100"]
    assert lines[-2][1:] == ["209, 0", "203, 0", "9, 0"]
    assert lines[-1][1:] == ["-", "228, 12", "-"]


def test_check_of_a_base_without_cuda(tmp_path):
    with pytest.raises(ForkError, match="torch 2.13.0 is not built for CUDA"):
        Graft(Stack(ROOT), base_of(tmp_path, None)).check_cuda()


def test_without_a_kernel_no_compiler_is_missed(tmp_path, monkeypatch, capsys):
    graft = Graft(Stack(ROOT), base_of(tmp_path, "13.0"))
    graft.tree = {path: file for path, file in graft.tree.items() if not path.endswith(".cu")}
    graft.nvcc = "no nvcc"
    graft.check_cuda()
    for step in ("prepare", "compile", "stage_products", "stage_version"):
        monkeypatch.setattr(graft, step, lambda *_: "")
    monkeypatch.setattr(build, "check_exports", lambda *_: None)
    graft.make()
    assert "no nvcc" not in capsys.readouterr().out
    graft.kernels = [KERNEL]
    graft.make()
    assert "no nvcc" in capsys.readouterr().out


@pytest.fixture
def graft(tmp_path):
    """Prepares a graft of the tip, with a kernel for CUDA, onto what looks like a base for CUDA."""
    real = get(os.environ.get("BASE") or default_release(), BASES).folder
    base = tmp_path / "base"
    for folder in ("", "torch", "torch/lib"):
        (base / folder).mkdir()
        for there in (real / folder).iterdir():
            if there.relative_to(real).as_posix() not in ("torch", "torch/lib", "torch/version.py"):
                (base / folder / there.name).symlink_to(there)
    version = (real / "torch/version.py").read_text(encoding="utf-8")
    native = (ROOT / NATIVE).read_text(encoding="utf-8").splitlines()
    at = native.index("    CPU: attn_cpu")
    files = {
        "base/torch/version.py": re.sub(r"^(cuda\b.*= ).*", r"\1'13.0'", version, flags=re.M),
        **{f"base/torch/lib/lib{name}_cuda.so": "" for name in ("torch", "c10")},
        NATIVE: "\n".join([*native[:at], "    CUDA: attn_cuda", *native[at:], ""]),
        "Fill.cu": KERNEL,
    }
    write_files(tmp_path, files)
    made = Graft(Stack(ROOT), Base(base))
    made.dir = tmp_path / "graft"
    made.stage, made.gen = made.dir / "stage", made.dir / "gen"
    made.tree = {**made.tree, NATIVE: tmp_path / NATIVE, "aten/Fill.cu": tmp_path / "Fill.cu"}
    return made


def compile_some(graft, *sources):
    """Compiles some of the sources as the graft's CMake says; returns what the compilers said."""
    graft.prepare()
    # A base for CUDA has this header; the build of its c10 writes it.
    macros = "torch/include/c10/cuda/impl/cuda_cmake_macros.h"
    config = {macros: MACROS, "../graft.cmake": graft.configuration()}
    write_files(graft.stage, config)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def run(*command):
        done = subprocess.run(command, cwd=graft.dir, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    option = f"-DGRAFT_CONFIG={graft.dir / 'graft.cmake'}"
    run("cmake", "-G", "Ninja", "-S", ROOT, "-B", "cmake", "-DCMAKE_BUILD_TYPE=Debug", option)
    targets = re.findall(r"^(\S+\.o):", run("ninja", "-C", "cmake", "-t", "targets", "all"), re.M)
    chosen = [t for t in targets if t.endswith(tuple(f"/{source}.o" for source in sources))]
    assert len(chosen) == len(sources)
    return run("ninja", "-C", "cmake", "-v", *chosen)


def test_architectures(graft):
    """The last one's PTX is there too, for what comes after it."""
    graft.nvcc = cuda.Nvcc(Path("nvcc"), "13.0", (80, 90, 100), 75)
    assert 'set(GRAFT_CUDA_ARCHITECTURES "80-real" "90-real" "100")' in graft.configuration()


def test_a_graft_with_a_kernel(graft):
    """The kernel and its registration compile; the other libraries of CUDA need not be there."""
    if isinstance(graft.nvcc, str):
        pytest.skip(graft.nvcc)
    graft.nvcc = cuda.Nvcc(graft.nvcc.path, graft.nvcc.release, (90,), graft.nvcc.oldest)
    said = compile_some(graft, "Fill.cu", "RegisterCUDAEverything.cpp")
    assert [(k.architecture, k.spilled) for k in cuda.kernels(said)] == [("sm_90", 0)]


def test_a_graft_without_the_compiler(graft):
    """It leaves the kernel out, and the C functions for CUDA compile without CUDA's headers."""
    graft.nvcc = "no nvcc"
    compile_some(graft, "c_shim_cuda.cpp")
    assert not (graft.gen / "op/RegisterCUDAEverything.cpp").exists()
    with pytest.raises(ForkError, match="^no nvcc$"):
        graft.check_cuda()


def test_check_is_for_the_oldest_too(tmp_path, monkeypatch):
    graft = Graft(Stack(ROOT), base_of(tmp_path, "13.0"))
    graft.dir = tmp_path
    graft.nvcc = cuda.Nvcc(Path("nvcc"), "13.0", (80, 90), 75)
    log = said(ROWS, "sm_75", 4) + CLEAN
    monkeypatch.setattr(
        graft, "make", lambda: (tmp_path / "ninja.log").write_text(log, encoding="utf-8")
    )
    assert [kernel.capability for kernel in graft.make_kernels()] == [75, 80, 90]
    assert graft.nvcc.architectures == (75, 80, 90)
