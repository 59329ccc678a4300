"""The least time that this machine could take: its peaks, a CPU's measured by peaks.cpp."""

import os
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from cases import Case, Work

SOURCE = Path(__file__).with_name("peaks.cpp")
# The compiler must not replace loops by memset or memcpy, which choose their own kind of store.
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-tree-loop-distribute-patterns"]
# The instructions that torch does without, by what it has: ATEN_CPU_CAPABILITY=avx2 asks for that.
WITHOUT = {"AVX2": ["-mno-avx512f"]}

# glibc's malloc returns blocks from this size on to the system, and asks for them anew.
NEVER_KEPT = 32 << 20


class NoRoofline(Exception):
    """Why the peaks cannot be measured, in one line."""


@dataclass
class Peaks:
    flops: dict[str, float]  # by dtype or tf32, per second
    bandwidth: dict[str, dict[int, float]]  # by kind and working set, bytes per second

    @classmethod
    def parse(cls, text: str) -> "Peaks":
        """Makes it from the output of peaks.cpp."""
        peaks = cls({}, {})
        for line in text.splitlines():
            name, value = line.split()
            kind, _, what = name.partition(".")
            if kind == "flops":
                peaks.flops[what] = float(value)
            else:
                peaks.bandwidth.setdefault(kind, {})[int(what)] = float(value)
        return peaks

    def best(self, other: "Peaks") -> "Peaks":
        """Takes the higher of each peak, because a disturbed measurement is only ever too low."""
        flops = {key: max(x, other.flops[key]) for key, x in self.flops.items()}
        bandwidth = {
            kind: {size: max(x, other.bandwidth[kind][size]) for size, x in by.items()}
            for kind, by in self.bandwidth.items()
        }
        return Peaks(flops, bandwidth)

    def at(self, prefix: str, working_set: int) -> float:
        """Returns the highest bandwidth for a working set, among the kinds that begin so."""
        found = []
        for kind, by_size in self.bandwidth.items():
            if kind.startswith(prefix):
                # This is the next smaller set measured, so it may be too high, but not too low.
                held = [size for size in by_size if size <= working_set]
                found.append(by_size[max(held, default=min(by_size))])
        return max(found)

    def pass_seconds(self, arithmetic: str, work: Work) -> float:
        """Returns the time to compute or the time to move, whichever is larger."""
        moved = work.moved
        return max(
            work.flops / self.flops.get(arithmetic, self.flops["float32"]),
            work.written / self.at("store", moved),
            moved / max(self.at(kind, moved) for kind in ("read", "store", "copy")),
        )

    def seconds(self, case: Case, mode: str) -> float:
        passes = case.passes(mode)
        return sum(self.pass_seconds(case.arithmetic, work) for work in passes)

    def pages_seconds(self, case: Case) -> float:
        """Returns the seconds that the system needs to provide the pages of attn."""
        if case.attn_bytes < NEVER_KEPT or "fresh" not in self.bandwidth:
            return 0.0
        fresh, store = (self.at(x, case.attn_bytes) for x in ("fresh", "store"))
        return max(0.0, case.attn_bytes / fresh - case.attn_bytes / store)

    def as_dict(self) -> dict:
        return asdict(self)


def build(folder: Path) -> Path:
    """Compiles peaks.cpp."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if not shutil.which(compiler[0]):
        raise NoRoofline(f"no C++ compiler {compiler[0]}: install one, or set CXX")
    program = folder / "peaks"
    without = WITHOUT.get(torch.backends.cpu.get_cpu_capability(), [])
    command = [*compiler, *FLAGS, *without, "-pthread", SOURCE, "-o", program]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        raise NoRoofline(f"peaks.cpp does not compile: {(lines or ['no message'])[0]}")
    return program


def measure(threads: int) -> Peaks:
    """Measures the peaks of this machine with `threads` threads, in a few seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [build(Path(folder)), str(threads)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoRoofline(f"peaks.cpp ended with status {done.returncode}")
    return Peaks.parse(done.stdout)
