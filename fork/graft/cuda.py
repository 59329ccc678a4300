"""NVIDIA's compiler: where it is, and which one fits a base that is built for CUDA."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from fork.graft.base import Base

# What the kernels are compiled for: compute capability 9.0 with all that it alone has. In a source
# build cmake/Codegen.cmake says so, and other architectures get kernels without a body.
ARCHITECTURE = "90a"
OLDEST = 12  # of the compiler's releases: the first that knows it


@dataclass(frozen=True)
class Nvcc:
    """A compiler."""

    path: str
    release: str  # 13.0

    @property
    def major(self) -> int:
        return int(self.release.partition(".")[0])


def built_for(base: Base) -> str | None:
    """The release of CUDA that the base is built for; None for one for CPUs, or for AMD's GPUs."""
    found = re.search(r"^cuda\b.*= '([\d.]+)'", base.upstream.read("torch/version.py") or "", re.M)
    return found[1] if found else None


def compilers(wanted: str = "") -> list[Nvcc]:
    """Those at hand, the first one first: as the environment says, of the release, on the PATH."""
    homes = [os.environ.get("CUDA_HOME"), f"/usr/local/cuda-{wanted}", "/usr/local/cuda"]
    places = [os.environ.get("CUDACXX"), *(f"{home}/bin/nvcc" for home in homes if home), "nvcc"]
    paths = dict.fromkeys(filter(None, (shutil.which(place) for place in places if place)))
    said = {path: re.search(r"release ([\d.]+)", _says(path, "--version")) for path in paths}
    return [Nvcc(path, release[1]) for path, release in said.items() if release]


def find(base: Base) -> Nvcc | str:
    """The compiler for the base's kernels, or why there is none."""
    wanted = built_for(base)
    if wanted is None:
        return f"torch {base.version} is not built for CUDA"
    found = compilers(wanted)
    for nvcc in found:
        if nvcc.major == int(wanted.partition(".")[0]) >= OLDEST:
            return nvcc
    return (
        f"torch {base.version} is built for CUDA {wanted}, for which there is no nvcc of "
        f"{OLDEST} or newer{''.join(f'; {nvcc.path} is of {nvcc.release}' for nvcc in found)} "
        "(CUDACXX= or CUDA_HOME= says where): the kernels in CUDA C++ are left out"
    )


def _says(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
