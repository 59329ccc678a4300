"""NVIDIA's compiler for a graft whose base is built for CUDA: where it is, and what it can do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fork.base import Base

# Those that the kernels are compiled for, if the compiler knows them. What is compiled for x.0 runs
# on all x.y, and the last one's PTX on what comes after it.
ARCHITECTURES = (80, 90, 100)
COMPOSED = "on a GPU torch.attn is composed of matmul and tanh"


@dataclass(frozen=True)
class Nvcc:
    """A compiler that fits the base."""

    path: Path
    release: str  # 13.0
    architectures: tuple[int, ...]


def built_for(base: Base) -> str | None:
    """The release of CUDA that the base is built for; None for one for CPUs, or for AMD's GPUs."""
    found = re.search(r"^cuda\b.*= '([\d.]+)'", base.upstream.read("torch/version.py") or "", re.M)
    return found[1] if found else None


def find(base: Base) -> Nvcc | str:
    """The compiler for the base's kernels, or why there is none."""
    wanted = built_for(base)
    if wanted is None:
        return f"torch {base.version} is not built for CUDA"
    if "Float32Backend" not in (base.upstream.read("aten/src/ATen/Context.h") or ""):
        return (
            f"torch {base.version} cannot tell the kernels whether TF32 is allowed, as later "
            f"releases can: {COMPOSED}"
        )
    homes = [os.environ.get("CUDA_HOME"), f"/usr/local/cuda-{wanted}", "/usr/local/cuda"]
    places = [os.environ.get("CUDACXX"), *(f"{home}/bin/nvcc" for home in homes if home), "nvcc"]
    seen = []
    for path in filter(None, (shutil.which(place) for place in places if place)):
        release = re.search(r"release ([\d.]+)", _says(path, "--version"))
        if release and release[1].split(".")[0] == wanted.split(".")[0]:
            known = {int(n) for n in re.findall(r"compute_(\d+)\b", _says(path, "--list-gpu-arch"))}
            return Nvcc(Path(path), release[1], tuple(sorted(known.intersection(ARCHITECTURES))))
        seen.append(f"; {path} is of {release[1] if release else 'an unknown release'}")
    return (
        f"torch {base.version} is built for CUDA {wanted}, for which there is no nvcc"
        f"{''.join(dict.fromkeys(seen))} (CUDACXX= or CUDA_HOME= says where): "
        f"{COMPOSED}"
    )


def _says(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
