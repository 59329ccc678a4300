"""Where the time of torch.attn's forward goes: the cycles of each stage, by instruction set.

    python bench/stages.py

Writes cpu-stages.json, cpu-stages.md and a plot into the folder --out. One thread, float32.
"""

import ctypes
import shlex
import subprocess
import sys
import tempfile
from os import environ
from pathlib import Path
from statistics import median

import click
import plot
import report
import results
import torch
from machine import console, describe, use_threads
from matplotlib.figure import Figure
from torch.utils.cpp_extension import include_paths, library_paths

NAME = "cpu-stages"  # of the files
STAGES = ("pack k and v", "scores", "tanh", "store attn", "output")
COLORS = ("#7f8c8d", "#2f8fd0", "#d55e00", "#e69f00", "#1a9e77")
WIDTHS = (1, 8, 16, 32, 64, 128, 256)  # d = e
# The compiler's options, and the multiply-adds that start in a cycle on a processor with two units.
SETS = {
    "AVX2": (("-mavx2", "-mfma", "-mf16c"), 16),
    "AVX512": (
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
        32,
    ),
}


def available() -> list[str]:
    """Returns the instruction sets that torch may use here."""
    best = torch.backends.cpu.get_cpu_capability()
    return list(SETS)[: list(SETS).index(best) + 1] if best in SETS else []


def measure(capability: str) -> dict:
    """Compiles the kernel's headers for an instruction set, and times the stages."""
    options, per_cycle = SETS[capability]
    compiler = shlex.split(environ.get("CXX", "c++"))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "stages.so")
        source = Path(__file__).with_suffix(".cpp")
        defines = (f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}")
        paths = [f"-I{x}" for x in include_paths()] + [f"-L{x}" for x in library_paths()]
        command = [*compiler, "-std=c++20", "-O3", "-w", "-shared", "-fPIC", *options, *defines]
        subprocess.run(
            [*command, *paths, source, "-o", library, "-ltorch_cpu", "-lc10"], check=True
        )
        stages = ctypes.CDLL(str(library))
    stages.frequency.restype = ctypes.c_double
    rows = []
    for d in WIDTHS:
        frequency = stages.frequency()  # it varies by a few percent
        found = (ctypes.c_double * (len(STAGES) + 2))()
        stages.stages(ctypes.c_int64(d), found)
        *cycles, whole, aten = (x * frequency for x in found)
        row = {"d": d, "stages": cycles, "kernel": whole, "products": 2 * d / per_cycle}
        row["aten tanh"] = aten
        rows.append(row | {"frequency": frequency})
    return {"capability": capability, "rows": rows}


def markdown(result: dict) -> str:
    text = f"# The stages of torch.attn's forward\n\n{report.describe(result['machine'])}\n"
    text += "\nCycles for an element of `attn`, by tiles of 96 x 288 floats, one thread. *Kernel*: "
    text += "all of it as it runs. *Least*: the multiply-adds of both products, if two start in "
    text += "each cycle. *ATen's tanh*: `Vectorized::tanh` in the place of the kernel's.\n"
    for found in result["sets"]:
        frequency = median(row["frequency"] for row in found["rows"])
        text += f"\n## {found['capability']}, {frequency / 1e9:.1f} GHz\n\n"
        text += f"| d = e | {' | '.join(STAGES)} | kernel | least | ATen's tanh |\n"
        text += "|" + " ---: |" * (len(STAGES) + 4) + "\n"
        for row in found["rows"]:
            cells = [
                f"{x:.2f}"
                for x in (*row["stages"], row["kernel"], row["products"], row["aten tanh"])
            ]
            text += f"| {row['d']} | {' | '.join(cells)} |\n"
    return text


def draw(result: dict, narrow: bool) -> Figure:
    sets = result["sets"]
    shape = (len(sets), 1) if narrow else (1, len(sets))
    figure = Figure(figsize=(4, 4 * len(sets)) if narrow else (13, 4.5), layout="constrained")
    for axes, found in zip(figure.subplots(*shape, squeeze=False).flat, sets, strict=True):
        names = [str(row["d"]) for row in found["rows"]]
        whole = [row["kernel"] for row in found["rows"]]
        below = [0.0] * len(names)
        for i, (stage, color) in enumerate(zip(STAGES, COLORS, strict=True)):
            share = [row["stages"][i] / row["kernel"] for row in found["rows"]]
            axes.bar(names, share, bottom=below, label=stage, color=color)
            below = [x + y for x, y in zip(below, share, strict=True)]
        least = [row["products"] / row["kernel"] for row in found["rows"]]
        axes.plot(names, least, "k_", markersize=18, label="least for the products")
        for x, cycles in enumerate(whole):
            axes.text(x, below[x] + 0.02, f"{cycles:.1f}", ha="center", fontsize="small")
        axes.set_ylabel("part of the kernel's time")
        axes.set_xlabel("d = e; above each: the kernel's cycles for an element")
        axes.set_title(found["capability"], loc="left")
    handles, names = figure.axes[0].get_legend_handles_labels()
    columns = 2 if narrow else len(names)
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)
    return plot.finish(figure, result)


def write(result: dict, out: Path) -> None:
    results.write_page(NAME, result, markdown(result), draw, out)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="build/stages",
    show_default=True,
)
def main(out: Path) -> None:
    """Measure the stages of torch.attn's forward."""
    use_threads(1)
    if not available():
        console.print("no instruction set that is measured: AVX2 or AVX-512")
        sys.exit(1)
    result = {"machine": describe(1, with_jax=False), "sets": [measure(x) for x in available()]}
    write(result, out)
    console.print((out / f"{NAME}.md").read_text(encoding="utf-8"), markup=False)


if __name__ == "__main__":
    main(prog_name="stages.py")
