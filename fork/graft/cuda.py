"""NVIDIA's compiler for a graft whose base is built for CUDA: where it is, what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from fork.graft.base import Base

# The kernels are compiled for these, if the compiler knows them. Code for x.0 runs on all x.y, and
# the PTX of the last one on whatever comes after it.
ARCHITECTURES = (80, 90, 100)
# On older architectures every kernel is compiled with an empty body: PyTorch is built for these
# too, but no kernel is launched there. Such a kernel uses at most this many registers.
EMPTY = 16
# What `ptxas -v` says of a kernel.
ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)' for '(?P<architecture>\w+)'"
    r"(?:(?!Compiling entry).)*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"(?:(?!Compiling entry).)*?"
    r"Used (?P<registers>\d+) registers",
    re.S,
)


@dataclass(frozen=True)
class Nvcc:
    """A compiler that fits the base."""

    path: Path
    release: str  # 13.0
    architectures: tuple[int, ...]
    oldest: int  # architecture that it knows

    def with_oldest(self) -> Nvcc:
        """Returns this compiler with its oldest architecture added to those it compiles for.

        The graft leaves that architecture out, but upstream's own build may compile for it.
        """
        return replace(self, architectures=tuple(sorted({self.oldest, *self.architectures})))


@dataclass(frozen=True)
class Kernel:
    """What the compiler made of a kernel for one architecture."""

    name: str  # rows<__nv_bfloat16, 64, true>
    architecture: str  # sm_90
    registers: int  # of a thread
    spilled: int  # bytes that a thread stores and loads for want of registers

    @property
    def capability(self) -> int:
        """90 of sm_90."""
        return int(self.architecture.removeprefix("sm_"))


def built_for(base: Base) -> str | None:
    """Returns the CUDA release that the base is built for; None for CPUs or AMD's GPUs."""
    found = re.search(r"^cuda\b.*= '([\d.]+)'", base.upstream.read("torch/version.py") or "", re.M)
    return found[1] if found else None


def find(base: Base) -> Nvcc | str:
    """Returns the compiler for the base's kernels, or why there is none."""
    wanted = built_for(base)
    if wanted is None:
        return f"torch {base.version} is not built for CUDA"
    homes = [os.environ.get("CUDA_HOME"), f"/usr/local/cuda-{wanted}", "/usr/local/cuda"]
    places = [os.environ.get("CUDACXX"), *(f"{home}/bin/nvcc" for home in homes if home), "nvcc"]
    seen = []
    for path in filter(None, (shutil.which(place) for place in places if place)):
        release = re.search(r"release ([\d.]+)", _says(path, "--version"))
        if release and release[1].split(".")[0] == wanted.split(".")[0]:
            known = {int(n) for n in re.findall(r"compute_(\d+)\b", _says(path, "--list-gpu-arch"))}
            ours = tuple(sorted(known.intersection(ARCHITECTURES)))
            return Nvcc(Path(path), release[1], ours, min(known))
        seen.append(f"; {path} is of {release[1] if release else 'an unknown release'}")
    return (
        f"torch {base.version} is built for CUDA {wanted}, for which there is no nvcc"
        f"{''.join(dict.fromkeys(seen))} (CUDACXX= or CUDA_HOME= says where): "
        "on a GPU the operators are composed of others"
    )


def kernels(log: str) -> list[Kernel]:
    """Finds the kernels in what the compiler said."""
    found = list(ENTRY.finditer(log))
    names = _says("c++filt", *(entry["symbol"] for entry in found)).splitlines()
    return [
        Kernel(
            # void namespace::name<arguments>(parameters)
            re.sub(r"(\w+::)+", "", name).removeprefix("void ").partition(">(")[0] + ">",
            entry["architecture"],
            int(entry["registers"]),
            int(entry["stores"]) + int(entry["loads"]),
        )
        for entry, name in zip(found, names, strict=True)
    ]


def table(found: list[Kernel]) -> Table:
    """Returns a line per kernel."""
    made = Table(box=None, pad_edge=False)
    made.add_column("kernel: registers, bytes spilled", no_wrap=True)
    # The compiler takes them side by side: the log has them in any order.
    architectures = [f"sm_{n}" for n in sorted({k.capability for k in found})]
    for architecture in architectures:
        made.add_column(architecture, justify="right")
    cells = {(k.name, k.architecture): f"{k.registers}, {k.spilled}" for k in found}
    for name in sorted({kernel.name for kernel in found}):
        row = (cells.get((name, architecture), "-") for architecture in architectures)
        made.add_row(name, *row)
    return made


def problems(found: list[Kernel], architectures: Iterable[int]) -> list[str]:
    """Returns what is wrong with the kernels: what one must not have, or lacks."""
    wanted = {f"sm_{n}" for n in architectures}
    by_name: dict[str, set[str]] = {}
    for kernel in found:
        by_name.setdefault(kernel.name, set()).add(kernel.architecture)
    lacking = [
        f"{name}: not compiled for {', '.join(sorted(wanted - have))}"
        for name, have in by_name.items()
        if wanted - have
    ]
    spilling = [
        f"{kernel.name}: spills {kernel.spilled} bytes on {kernel.architecture}"
        for kernel in found
        if kernel.spilled
    ]
    needless = [
        f"{kernel.name}: has a body on {kernel.architecture}, where it is not launched"
        for kernel in found
        if kernel.capability < ARCHITECTURES[0] and kernel.registers > EMPTY
    ]
    return ([] if found else ["no kernel was compiled"]) + lacking + spilling + needless


def _says(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
