"""`make cuda-check`: compiles the kernels for compute capability 9.0, which need not be there.

No kernel may spill registers, and ptxas may not have made its products wait for each other, of
which it gives a remark. The instructions then show whether a kernel keeps to its registers, has the
products that its plan says, and makes tanh while products are under way.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import click

from fork import paths
from fork.commands import Command, report
from fork.console import console, new_table, print_wide, run, step
from fork.graft import ARCHITECTURE, OLDEST, Nvcc, compilers

INCLUDES = paths.ROOT / "aten/src"
HEADER = INCLUDES / "ATen/native/cuda/AttnSweep.cuh"
FOLDER = paths.BUILD / "cuda-check"
DISASSEMBLER = "nvidia-cuda-nvdisasm==13.2.78"
SOURCE = """#include <ATen/native/cuda/AttnSweep.cuh>
using namespace at::native::attn_sweep;
using P = {plan};
template __global__ void at::native::attn_sweep::attn_sweep<P>(const __grid_constant__ Args<P::T>);
static_assert(P::kSweep == Sweep::{sweep} && P::kWidth == {width} && P::kTile == {tile});
static_assert(P::kLate == {late} && P::kGroups == {groups});
"""
JOBS = 2  # compilers at a time
# What ptxas says if products are serialized: C7508 to C7514.
SERIALIZED = re.compile(r"\((C75\d\d)\) Potential Performance Loss: (.*?) (?:in|for) the function")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
LABEL = re.compile(r"(\.L_\w+):")


class Kernel(NamedTuple):
    """A plan of AttnSweep.cuh, for a data type."""

    dtype: str
    sweep: str
    width: int
    tile: int
    groups: int = 2
    late: bool = False
    stored: str = "kNothing"

    @property
    def name(self) -> str:
        what = "" if self.stored == "kNothing" else f" {self.stored.removeprefix('k')}"
        return f"{self.dtype} {self.sweep.removeprefix('k')} {self.width} {self.groups}{what}"

    @property
    def plan(self) -> str:
        if self.groups == 3:
            return f"LongForward<{self.dtype}>"
        about = f"{self.dtype}, Sweep::{self.sweep}, {self.width}, Stored::{self.stored}"
        return f"PlanOf<{about}>::type"

    @property
    def budgets(self) -> tuple[int, int]:
        """Registers of a thread of the producer, and of a consumer."""
        return (24, 240) if self.groups == 2 else (32, 160)

    @property
    def reads_attn(self) -> bool:
        return self.sweep != "kForward" and self.stored != "kNothing"

    @property
    def double(self) -> bool:
        """Whether two sets of fragments are in use, by turns."""
        if self.stored != "kNothing":
            return self.sweep == "kRows"
        return self.late

    @property
    def products(self) -> int:
        """wgmma instructions: a tile's stand once or more in the program."""
        operands = 1 if self.sweep == "kForward" or self.reads_attn else 2
        results = 2 if self.sweep == "kColumns" else 1
        scores, sums = operands * self.width // 16, results * self.tile // 16
        if not self.double:  # the first scores; a tile of the loop; the last sums
            return 2 * (scores + sums) + (results if self.late else 0)
        # The first scores, and an empty group for each result; two tiles of the loop; the last
        # two tiles, or one.
        return scores + results + 2 * (scores + sums) + (scores + 2 * sums) + sums


KERNELS = [
    Kernel(dtype, *plan)
    for dtype in ("__nv_bfloat16", "__half")
    for plan in (
        ("kForward", 64, 128, 2, True),
        ("kForward", 64, 128, 3),
        ("kForward", 128, 128),
        ("kRows", 64, 128),
        ("kRows", 128, 64, 2, True),
        ("kColumns", 64, 64),
        ("kColumns", 128, 64),
        ("kForward", 64, 128, 2, True, "kAttn"),
        ("kForward", 128, 128, 2, False, "kAttn"),
        *(
            (sweep, width, 64, 2, True, stored)
            for sweep in ("kRows", "kColumns")
            for width in (64, 128)
            for stored in ("kAttn", "kAttnAndGradient")
        ),
    )
]


class Program(NamedTuple):
    """What nvdisasm says of a kernel."""

    instructions: list[str]
    labels: dict[str, int]

    @classmethod
    def parse(cls, text: str) -> Program:
        instructions, labels = [], {}
        for line in text.splitlines():
            if found := LABEL.match(line):
                labels[found[1]] = len(instructions)
            elif found := INSTRUCTION.match(line):
                instructions.append(found[1])
        return cls(instructions, labels)

    def reached(self, start: int) -> list[str]:
        """The instructions that may run after that of this number."""
        todo, seen = [start], set()
        while todo:
            i = todo.pop()
            if i in seen or i >= len(self.instructions):
                continue
            seen.add(i)
            line = self.instructions[i]
            todo += [self.labels[label] for label in re.findall(r"`\((\.L_\w+)\)", line)]
            if not re.match(r"EXIT|BRA `|BRA\.U `", line):
                todo.append(i + 1)
        return [self.instructions[i] for i in sorted(seen)]

    def roles(self) -> tuple[list[str], list[str]]:
        """The instructions of the producer and of the consumers, from where they part."""
        found = {}
        for i, line in enumerate(self.instructions):
            if match := re.search(r"USETMAXREG\.(DEALLOC|TRY_ALLOC)", line):
                found[match[1]] = self.reached(i)
        return found["DEALLOC"], found["TRY_ALLOC"]


@click.command("cuda-check", cls=Command, section="Test")
def cuda_check() -> None:
    """Compile the kernels for Hopper without a GPU, and look at their code (`make cuda-check`).

    Without an nvcc it says so, and passes.
    """
    found = [nvcc for nvcc in compilers() if nvcc.major >= OLDEST]
    if not found:
        console.print(f"no nvcc of {OLDEST} or newer (CUDACXX= says where): nothing is checked")
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    disassembler = nvdisasm()
    with (
        step(f"{len(KERNELS)} kernels by nvcc {found[0].release}"),
        ThreadPoolExecutor(JOBS) as pool,
    ):
        made = list(pool.map(lambda kernel: compiled(found[0], kernel, disassembler), KERNELS))
    table = new_table(f"sm_{ARCHITECTURE}: the highest register")
    for title in ("kernel", "producer", "consumer", "products"):
        table.add_column(title)
    problems = []
    for kernel, (said, program) in zip(KERNELS, made, strict=True):
        producer, consumer = program.roles()
        table.add_row(
            kernel.name, f"{highest(producer)}", f"{highest(consumer)}", f"{products(consumer)}"
        )
        problems += [f"{kernel.name}: {what}" for what in faults(kernel, said, program)]
    print_wide(table)
    report(problems)


def nvdisasm() -> Path:
    """NVIDIA's disassembler: beside the compiler, or PyPI's."""
    if found := shutil.which("nvdisasm"):
        return Path(found)
    folder = FOLDER / DISASSEMBLER.replace("==", "-")
    if not (found := sorted(folder.rglob("bin/nvdisasm"))):
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", folder]
        run([*pip, DISASSEMBLER], FOLDER / "pip.log", f"{DISASSEMBLER} cannot be installed")
        found = sorted(folder.rglob("bin/nvdisasm"))
    return found[0]


def compiled(nvcc: Nvcc, kernel: Kernel, disassembler: Path) -> tuple[str, Program]:
    """What ptxas says of a kernel, and its program."""
    stem = FOLDER / re.sub(r"\W+", "-", kernel.name)
    source, code, log = (stem.with_suffix(suffix) for suffix in (".cu", ".cubin", ".log"))
    about = {**kernel._asdict(), "late": f"{kernel.late}".lower(), "plan": kernel.plan}
    source.write_text(SOURCE.format(**about), encoding="utf-8")
    target = f"arch=compute_{ARCHITECTURE},code=sm_{ARCHITECTURE}"
    command = [nvcc.path, "-O3", "-std=c++17", f"-I{INCLUDES}", f"-gencode={target}"]
    command += ["-Xptxas=-v", "-cubin"]
    run([*command, source, "-o", code], log, f"{kernel.name}: the compiler stopped")
    text = subprocess.check_output([disassembler, "-c", code], text=True)
    return log.read_text(encoding="utf-8"), Program.parse(text)


def highest(lines: list[str]) -> int:
    """The highest register that instructions name."""
    return max(int(number) for line in lines for number in re.findall(r"\bR(\d+)\b", line))


def products(lines: list[str]) -> int:
    return sum("HGMMA" in line for line in lines)


def faults(kernel: Kernel, said: str, program: Program) -> Iterator[str]:
    """What is wrong with a kernel."""
    for remark, why in SERIALIZED.findall(said):
        yield f"{remark}: {why}"
    spilled = [sum(map(int, found)) for found in SPILLS.findall(said)]
    if spilled != [0]:
        yield f"spills {spilled} bytes"
    for role, lines, budget in zip(
        ("producer", "consumer"), program.roles(), kernel.budgets, strict=True
    ):
        if (most := highest(lines)) >= budget:
            yield f"the {role} has register {most}, of {budget}"
    _, consumer = program.roles()
    if (found := products(consumer)) != kernel.products:
        yield f"{found} products, not {kernel.products}"
    # In half tanh is a quotient, whose instructions divide integers too.
    is_seen = kernel.late and kernel.dtype == "__nv_bfloat16"
    if is_seen and (late := tanh_without_products(consumer)):
        yield f"{late} of tanh's instructions follow the wait for all products"


def tanh_without_products(lines: list[str]) -> int:
    """How many of tanh's instructions come when no product is under way."""
    found, pending = 0, 0
    for line in lines:
        if wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", line):
            pending = int(wait[1], 16)
        elif "HGMMA" in line:
            pending = 1
        elif "MUFU.TANH" in line and pending == 0:
            found += 1
    return found
