"""Time and memory of attn_output over the length of a sequence, beside others.

    python bench/lengths.py                  # n = m from 512 to 65,536, 25 minutes
    python bench/lengths.py --largest 2048   # a part of it

Writes cpu-lengths.json, cpu-lengths.md, a plot of them, and the bars of the manual's first page
into the folder --out.
"""

from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click
import matplotlib
import memory
import plot
import report
import results
import roofline
import torch
from cases import ATTN, COMPILE, CPU, EAGER, FLEX, SDPA, Case
from contenders import MORE_RUNS, RUNS, Absent, Problem
from machine import console, describe, use_threads
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from measure import host_clock, interleaved


class Curve(NamedTuple):
    contender: str
    modes: dict[str, str]  # what each of MODES is to it; it has no part in others
    color: str
    marker: str
    largest: int = 1 << 14  # n: beyond it takes too long, or too much memory


SECOND_ORDER = {"tangent": "tangent", "double backward": "double backward"}
OUTPUT = {"forward": "output", "step": "output step"}
CAUSAL = {"forward": "causal", "step": "causal step"} | {
    mode: f"causal {mode}" for mode in SECOND_ORDER
}
CURVES = {
    "torch.attn_output": Curve(ATTN, OUTPUT | SECOND_ORDER, "#d55e00", "o", 1 << 16),
    "the same, causal": Curve(ATTN, CAUSAL, "#e69f00", "P", 1 << 16),
    "torch.attn": Curve(ATTN, {"forward": "forward", "step": "step"}, "#b07cc6", "D"),
    "eager": Curve(EAGER, OUTPUT | SECOND_ORDER, "#7f8c8d", "s"),
    "torch.compile": Curve(COMPILE, OUTPUT, "#2f8fd0", "^"),
    "SDPA (softmax)": Curve(SDPA, OUTPUT, "#1a9e77", "v"),
    "FlexAttention": Curve(FLEX, OUTPUT, "#000000", "x"),
}
OURS = next(iter(CURVES))
# The table has all of CURVES, the plot these.
PLOTTED = (OURS, "torch.attn", "eager", "torch.compile", "SDPA (softmax)")
BARS = (("torch.attn", "step"), (OURS, "step"), (OURS, "double backward"))
NAME = "cpu-lengths"  # of the files
MODES = ("forward", "step", *SECOND_ORDER)
SHORTEST = 512
LONG = 1 << 14  # from here on a row has few rounds
# Second derivatives take three times as long, and eager has a dozen matrices.
LARGEST_OF_SECOND_ORDER = {EAGER: 1 << 13, ATTN: 1 << 14}
SAME = (OURS, "eager", "torch.compile", "FlexAttention")  # the same function


def case_of(n: int) -> Case:
    return Case("float32", n)


def largest(curve: Curve, mode: str) -> int:
    if mode not in curve.modes:
        return 0
    return LARGEST_OF_SECOND_ORDER[curve.contender] if mode in SECOND_ORDER else curve.largest


def runs_of(n: int, mode: str) -> dict:
    """Returns the contenders that go so far."""
    runs = {}
    for name, curve in CURVES.items():
        if n <= largest(curve, mode):
            try:
                problem = Problem(case_of(n), curve.modes[mode])
                runs[name] = (RUNS | MORE_RUNS)[curve.contender](problem)
            except Absent as e:
                console.print(f"{name} left out of {mode}: {e}", markup=False)
    return runs


def errors(n: int) -> dict[str, float]:
    """Returns the relative error of each output, beside the composed maths in double."""
    q, k, v = (x.double() for x in Problem(case_of(n), "output").inputs)
    exact = torch.tanh(q @ k.mT) @ v
    runs = runs_of(n, "forward")
    found = {name: runs[name]()[0].double() for name in SAME}
    return {name: ((x - exact).norm() / exact.norm()).item() for name, x in found.items()}


def peak(case: Case, mode: str, contender: str, threads: int) -> int:
    """Returns the bytes above inputs, output and gradients: attn counts also as a result."""
    found = memory.peak(case, mode, contender, threads)
    return found + (case.attn_bytes if mode in ("forward", "step") else 0)


def measure(n: int, mode: str, threads: int) -> dict:
    """Times the contenders, and measures their memory."""
    case = case_of(n)
    rounds = 0 if n < LONG else 3 if n == LONG else 1
    runs = runs_of(n, mode)
    times = interleaved(runs, host_clock(threads, CPU), seconds=3, rounds=rounds)
    modes = {name: CURVES[name].modes[mode] for name in runs}
    return {
        "n": n,
        "mode": mode,
        "seconds": times.seconds,
        "disturbed": round(times.disturbed, 3),
        "flops": {name: sum(x.flops for x in case.passes(modes[name])) for name in runs},
        "memory": {name: peak(case, modes[name], CURVES[name].contender, threads) for name in runs},
    }


def markdown(result: dict) -> str:
    text = f"# attn_output over the length\n\n{report.describe(result['machine'])}\n"
    text += f"\nd = e = 64, float32. The FMA peak is {result['peak'] / 1e9:.0f} GFLOP/s"
    if "disturbed peak" in result:
        text += ", by an earlier run: in this one other work disturbed it, and it was measured as "
        text += f"{result['disturbed peak'] / 1e9:.0f}"
    text += f". A figure is the time as a multiple of that of `{OURS}`, and the peak of memory "
    text += "above inputs, output and gradients; a compiler that runs in the first call counts, "
    text += "with 70 MiB.\n"
    listed = ", ".join(f"{name} {x:.1e}" for name, x in result["errors"]["found"].items())
    text += f"\nRelative error at n = {result['errors']['n']}: {listed}.\n"
    text += "\nA tangent comes with its output. A double backward is that alone, and its memory is "
    text += "without what the backward keeps for it.\n"
    for mode in MODES:
        rows = [r for r in result["rows"] if r["mode"] == mode]
        names = [x for x in CURVES if any(x in r["seconds"] for r in rows)]
        text += f"\n## {mode.capitalize()}\n\n"
        text += f"| n | time | of the peak | {' | '.join(names)} |\n"
        text += "|" + " ---: |" * (len(names) + 3) + "\n"
        for row in rows:
            ours = median(row["seconds"][OURS])
            cells = [str(row["n"]), report.duration(ours)]
            cells.append(f"{row['flops'][OURS] / ours / result['peak']:.0%}")
            for name in names:
                if name in row["seconds"]:
                    held = f"{row['memory'][name] / 2**20:.0f} MiB"
                    cells.append(f"{median(report.ratios(row, name, OURS)):.2f}, {held}")
                else:
                    cells.append("")
            text += f"| {' | '.join(cells)} |\n"
    return text


def curves(axes: Axes, rows: list[dict], values, title: str) -> None:
    for name in PLOTTED:
        curve = CURVES[name]
        points = [(r["n"], values(r, name)) for r in rows if name in r["seconds"]]
        if points:
            look = {"color": curve.color, "marker": curve.marker, "markersize": 4}
            axes.plot(*zip(*points, strict=True), label=name, **look)
    axes.set_yscale("log")
    plot.over_n(axes, title)
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x:g}" if x < 1024 else f"{x / 1024:g} Ki")
    )


def draw(result: dict, narrow: bool) -> Figure:
    figure = Figure(figsize=(4, 21) if narrow else (7.5, 9.5), layout="constrained")
    all_axes = iter(figure.subplots(*((6, 1) if narrow else (3, 2))).flat)
    by_mode = {mode: [r for r in result["rows"] if r["mode"] == mode] for mode in MODES}
    least = 1 << 20  # below, it is a buffer of a library
    for mode in MODES:
        axes = next(all_axes)
        curves(axes, by_mode[mode], lambda row, name: median(row["seconds"][name]), f"Time: {mode}")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: report.duration(x)))
    for mode in ("step", "double backward"):
        axes, title = next(all_axes), f"Memory: {mode}"
        curves(axes, by_mode[mode], lambda r, x: max(least, r["memory"][x]) / 2**20, title)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} MiB"))
    for axes in figure.axes[1:]:
        if legend := axes.get_legend():
            legend.remove()  # the first one's is for all
    return plot.finish(figure, result)


def draw_bars(result: dict, narrow: bool = False) -> Figure:
    """Draws how many times as fast as eager the BARS are, at the largest n that all have."""
    rows = {(row["n"], row["mode"]): row for row in result["rows"] if "eager" in row["seconds"]}
    n = max(n for n, mode in rows if mode == BARS[-1][1])
    figure = Figure(figsize=(4, 3.2) if narrow else (7.5, 2.7), layout="constrained")
    axes = figure.subplots()
    for place, (name, mode) in enumerate(BARS):
        row = rows[n, mode]
        times = median(report.ratios(row, "eager", name))
        held = [f"{row['memory'][x] / 2**20:.0f} MiB" for x in (name, "eager")]
        axes.barh(place, times, 0.5, color=CURVES[name].color)
        axes.annotate(
            f"{name}, {mode}: {plot.times_as(round(times, 1))}, {held[0]} (eager: {held[1]})",
            *((0, place - 0.42), (0, 0)),
            textcoords="offset points",
            fontsize="small" if narrow else "medium",
            # The line at 1 ends there.
            bbox={
                "facecolor": matplotlib.rcParams["axes.facecolor"],
                "edgecolor": "none",
                "pad": 0,
            },
        )
    axes.axvline(1, linewidth=1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: plot.times_as(x) if x else ""))
    axes.set_yticks([])
    axes.set_ylim(len(BARS) - 0.6, -0.8)
    axes.set_title(
        "How many times as fast as eager, and peak memory\n"
        f"n = m = {n}, d = e = 64, float32, {report.threads(result['machine']['threads'])}",
        loc="left",
    )
    return plot.finish(figure, result)


def write(result: dict, out: Path) -> None:
    results.write_page(NAME, result, markdown(result), draw, out)
    if any(row["mode"] == BARS[-1][1] and "eager" in row["seconds"] for row in result["rows"]):
        bars = partial(draw_bars, result)
        for ground in plot.GROUNDS:  # the README needs a dark one
            plot.save(bars, out / f"{NAME}-bars{ground}.svg", ground)
        plot.save(partial(bars, narrow=True), out / f"{NAME}-bars-narrow.svg")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--threads", type=click.IntRange(1), default=torch.get_num_threads())
@click.option(
    *("--largest", "largest_n"), type=click.IntRange(SHORTEST), default=1 << 16, show_default=True
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="build/lengths",
    show_default=True,
)
def main(threads: int, largest_n: int, out: Path) -> None:
    """Measure attn_output over n, beside torch.attn, eager, torch.compile, SDPA, FlexAttention."""
    use_threads(threads)
    lengths = [1 << i for i in range(17) if SHORTEST <= 1 << i <= largest_n]
    n = min(2048, lengths[-1])
    result = {
        "machine": describe(threads, with_jax=False),
        "peak": roofline.measure(threads).flops["float32"],
        "errors": {"n": n, "found": errors(n)},
        "rows": [],
    }
    for n in lengths:
        for mode in (x for x in MODES if n <= largest(CURVES[OURS], x)):
            row = measure(n, mode, threads)
            result["rows"].append(row)
            found = {name: report.duration(median(x)) for name, x in row["seconds"].items()}
            console.print(n, mode, *(f"{name} {x}" for name, x in found.items()), markup=False)
            write(result, out)


if __name__ == "__main__":
    main(prog_name="lengths.py")
