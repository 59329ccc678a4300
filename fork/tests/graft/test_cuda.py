"""Tests how nvcc is found, and a graft with a kernel for CUDA."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fork.errors import ForkError
from fork.graft import build
from fork.graft.base import Base, get
from fork.graft.build import Graft, cuda
from fork.overlay import Stack, default_release
from fork.paths import BASES, ROOT
from fork.tests.conftest import write_files

KERNEL = """#include <ATen/cuda/CUDAContextLight.h>
__global__ void fill(float* x) { x[threadIdx.x] = 1; }
"""
SHIM = "op/c_shim_cuda.cpp"  # AOTInductor's C functions call the kernel, or else the dispatcher
MACROS = "#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n"


def base_of(folder, cuda_release):
    text = f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda_release!r}\n"
    return Base(write_files(folder, {"torch/version.py": text}))


def compiler(folder, release):
    text = f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n"
    nvcc = write_files(folder, {"bin/nvcc": text}) / "bin/nvcc"
    nvcc.chmod(0o755)
    return nvcc


def test_compiler_of_the_bases_release(tmp_path, monkeypatch):
    nvcc = compiler(tmp_path / "cuda", "13.1")
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert cuda.find(base_of(tmp_path / "base", "13.0")) == cuda.Nvcc(str(nvcc), "13.1")


def test_base_without_cuda(tmp_path):
    assert cuda.find(base_of(tmp_path, None)) == "torch 2.13.0 is not built for CUDA"


@pytest.mark.parametrize("release, wanted", [("11.8", "99.0"), ("11.8", "11.8")])
def test_compiler_of_another_release(tmp_path, monkeypatch, release, wanted):
    """Or one that does not know the architecture."""
    nvcc = compiler(tmp_path / "cuda", release)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDACXX", str(nvcc))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    why = cuda.find(base_of(tmp_path / "base", wanted))
    assert why.startswith(
        f"torch 2.13.0 is built for CUDA {wanted}, for which there is no nvcc of 12 or newer; "
        f"{nvcc} is of {release}"
    )
    assert why.endswith("the kernels in CUDA C++ are left out")


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
    files = {
        "base/torch/version.py": re.sub(r"^(cuda\b.*= ).*", r"\1'13.0'", version, flags=re.M),
        **{f"base/torch/lib/lib{name}_cuda.so": "" for name in ("torch", "c10")},
        "Fill.cu": KERNEL,
    }
    write_files(tmp_path, files)
    made = Graft(Stack(ROOT), Base(base))
    made.dir = tmp_path / "graft"
    made.stage, made.gen = made.dir / "stage", made.dir / "gen"
    made.tree = {**made.tree, "aten/Fill.cu": tmp_path / "Fill.cu"}
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


def test_architecture(graft):
    """It has no PTX: what is for 9.0 alone runs nowhere else."""
    graft.nvcc = cuda.Nvcc("nvcc", "13.0")
    assert 'set(GRAFT_CUDA_ARCHITECTURES "90a-real")' in graft.configuration()


def test_a_graft_with_a_kernel(graft):
    """The kernel and its registration compile; the other libraries of CUDA need not be there."""
    if isinstance(graft.nvcc, str):
        pytest.skip(graft.nvcc)
    said = compile_some(graft, "Fill.cu", "RegisterCUDAEverything.cpp")
    assert re.findall(r"'_Z\w+' for '(\w+)'", said) == ["sm_90a"]
    shim = (graft.gen / SHIM).read_text(encoding="utf-8")
    assert "= at::cuda::attn_output(" in shim and "= at::cuda::attn(" in shim


def test_a_graft_without_the_compiler(graft):
    """It leaves the kernel out, and the C functions for CUDA compile without CUDA's headers."""
    graft.nvcc = "no nvcc"
    compile_some(graft, "c_shim_cuda.cpp")
    shim = (graft.gen / SHIM).read_text(encoding="utf-8")
    assert "= at::attn_output(" in shim and "= at::attn(" in shim
    assert not (graft.gen / "op/RegisterCUDAEverything.cpp").exists()
    graft.check_cuda()  # others run on a GPU
