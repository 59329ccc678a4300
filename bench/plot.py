"""The plots: ratios of every case, percent of the roofline, time over n; random shapes."""

import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import matplotlib
import report
from cases import (
    ATTN,
    COMPILE,
    CUDNN,
    EAGER,
    FUNCTION,
    JAX,
    KERNEL,
    SDPA,
    SHORT,
    TITLES,
    TRITON,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

# The marks can be told apart without colours, on a light and on a dark ground.
LOOKS = {
    ATTN: ("#d55e00", "o"),
    EAGER: ("#7f8c8d", "s"),
    COMPILE: ("#2f8fd0", "^"),
    FUNCTION: ("#b07cc6", "D"),
    JAX: ("#1a9e77", "v"),
    SDPA: ("#e69f00", "P"),
    CUDNN: ("#56b4e9", "X"),
    KERNEL: ("#000000", "x"),
    TRITON: ("#8c564b", "*"),
}
# The site inverts what it shows on a dark page: only the README needs a dark plot.
GROUNDS = {"": ("#ffffff", "#1f2328"), "-dark": ("#0d1117", "#e6edf3")}
OVER_N = {"cpu": "float32", "cuda": "bfloat16"}  # the dtype whose times are drawn
STYLES = {"forward": "-", "step": "--"}


def times_as(x: float) -> str:
    return f"{x:g}×" if x >= 1 else f"1/{1 / x:g}×"


def ratios(axes: Axes, cases: list[str], rows: list[report.Row], title: str) -> None:
    """Draws a line per case, a mark per contender, and a bar at each target."""
    for other in report.OTHERS:
        color, marker = LOOKS[other]
        places = [(row, cases.index(row["case"])) for row in rows]
        found = [(report.value(row, other), y) for row, y in places]
        aims = [(row["target"].get(other), y) for row, y in places]
        if found := [point for point in found if point[0] is not None]:
            axes.plot(*zip(*found, strict=True), marker, color=color, markersize=5)
        if aims := [point for point in aims if point[0] not in (None, 1)]:
            bar = {"markersize": 12, "markeredgewidth": 2}
            axes.plot(*zip(*aims, strict=True), "|", color=color, **bar)
    axes.axvline(1, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: times_as(x)))
    axes.set_yticks(range(len(cases)), cases)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_title(f"{title}: how many times\nas fast torch.attn is as", loc="left")


def series(rows: list[report.Row], dtype: str, mode: str) -> list[report.Row]:
    """Returns the rows of square attn of one width and dtype, by n."""
    found = [
        row
        for row in rows
        if (row["dtype"], row["mode"]) == (dtype, mode)
        and row["m"] == row["n"]
        and row["d"] == row["e"] == 64
        and not row["batch"]
        and not row.get("tf32")
    ]
    return sorted(found, key=lambda row: row["n"])


def over_n(axes: Axes, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel("n = m, with d = e = 64")
    axes.set_title(title, loc="left")
    if axes.lines:
        axes.legend(frameon=False, fontsize="small")


def rooflines(axes: Axes, rows: list[report.Row]) -> None:
    colors = dict(zip(SHORT, ("#d55e00", "#2f8fd0", "#1a9e77", "#b07cc6"), strict=True))
    for dtype, color in colors.items():
        for mode, style in STYLES.items():
            points = [(r["n"], report.value(r, "roofline")) for r in series(rows, dtype, mode)]
            points = [point for point in points if point[1] is not None]
            if points:
                label = f"{SHORT[dtype]} {mode}"
                axes.plot(*zip(*points, strict=True), style, marker=".", color=color, label=label)
    axes.set_ylim(0, max(1, axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    over_n(axes, "torch.attn: percent of the roofline")


def times(axes: Axes, rows: list[report.Row], dtype: str, mode: str) -> None:
    found = series(rows, dtype, mode)
    for who, (color, marker) in LOOKS.items():
        points = [(r["n"], median(r["seconds"][who])) for r in found if who in r["seconds"]]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                marker=marker,
                markersize=4,
                color=color,
                label=TITLES[who],
            )
    limit = [(row["n"], row["roofline"]) for row in found if row.get("roofline")]
    if limit:
        axes.plot(*zip(*limit, strict=True), ":", label="roofline")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: report.duration(x)))
    over_n(axes, f"Time of a {mode}, {SHORT[dtype]}")


def sweep(axes: Axes, result: dict) -> None:
    """Draws how many times as fast as eager random shapes are, over their work."""
    looks = {1: ("#d55e00", "o"), 2: ("#2f8fd0", "^")}
    for found in result["sweeps"]:
        color, marker = looks.get(found["threads"], looks[2])
        points = [(r["flops"], report.value(r, EAGER)) for r in found["rows"]]
        label = f"{report.threads(found['threads'])}, seed {found['seed']}"
        if points:
            style = {"linestyle": "", "marker": marker, "markersize": 2.5}
            axes.plot(*zip(*points, strict=True), color=color, label=label, **style)
    axes.axhline(1, linewidth=1)
    axes.axhline(report.BELOW, linewidth=1, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: times_as(y)))
    axes.set_xlabel("multiply-adds x 2")
    axes.set_title("Random shapes: how many times as fast as eager", loc="left")
    if len(axes.lines) > 2:
        axes.legend(frameon=False, fontsize="small")


def finish(figure: Figure, result: dict) -> Figure:
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    machine = textwrap.fill(report.describe(result["machine"]), int(15 * figure.get_figwidth()))
    figure.suptitle(machine, fontsize="small", x=0.01, ha="left")
    return figure


def draw_sweeps(result: dict) -> Figure:
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    sweep(figure.subplots(), result)
    return finish(figure, result)


def draw(result: dict, narrow: bool = False) -> Figure:
    """Draws the ratios beside each other and the curves below; all in one column if `narrow`."""
    rows = result["rows"]
    by_mode = {mode: [r for r in rows if r["mode"] == mode] for mode in STYLES}
    cases = list(dict.fromkeys(row["case"] for row in rows))
    width, heights = 13, [1 + 0.24 * len(cases), 4]
    grids = [(1, 2), (1, 3)]
    if narrow:
        width, heights = 4, [2 * heights[0], 12]
        grids = [(2, 1), (3, 1)]
    figure = Figure(figsize=(width, sum(heights) + 0.5), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=heights)
    left, right = upper.subplots(*grids[0], sharey=True)
    ratios(left, cases, by_mode["forward"], "Forward")
    ratios(right, cases, by_mode["step"], "Step")
    marks = [
        left.plot([], [], LOOKS[who][1], color=LOOKS[who][0], label=TITLES[who])[0]
        for who in report.OTHERS
        if any(who in row["seconds"] for row in rows)
    ]
    marks += left.plot([], [], "|", color="gray", markersize=12, label="target")
    columns = 2 if narrow else len(marks)
    upper.legend(handles=marks, loc="outside upper center", ncols=columns, frameon=False)
    first, second, third = lower.subplots(*grids[1])
    rooflines(first, rows)
    dtype = OVER_N[report.device_of(result)]
    times(second, rows, dtype, "forward")
    times(third, rows, dtype, "step")
    return finish(figure, result)


def settings(ground: str, ink: str) -> dict:
    inked = (
        "text.color",
        "axes.labelcolor",
        "axes.edgecolor",
        "xtick.color",
        "ytick.color",
    )
    return {
        **dict.fromkeys((*inked, "lines.color"), ink),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), ground),
        "axes.prop_cycle": matplotlib.cycler(color=[ink]),
        "font.size": 9,
        "svg.fonttype": "none",
        "svg.hashsalt": "attn",  # the same plot gives the same file
    }


def save(drawn_by: Callable[[], Figure], file: Path, ground: str = "") -> None:
    """Writes a plot for one of GROUNDS."""
    with matplotlib.rc_context(settings(*GROUNDS[ground])):
        drawn_by().savefig(file, metadata={"Date": None})


def write(result: dict, out: Path) -> list[str]:
    """Writes the plots; returns the files' names."""
    device = report.device_of(result)
    plots = {}
    if result["rows"]:
        plots = {device: draw, f"{device}-narrow": partial(draw, narrow=True)}
    if result.get("sweeps"):
        plots[f"{device}-sweep"] = draw_sweeps
    for plot, drawn_by in plots.items():
        save(partial(drawn_by, result), out / f"{plot}.svg")
    return [f"{plot}.svg" for plot in plots]
