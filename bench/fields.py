"""Training a neural field on its second derivatives: time and memory of a step, beside others.

    python bench/fields.py                  # ten minutes
    python bench/fields.py --most 20000     # fewer points

The field is u(x) = tanh(x W1ᵀ) W2, a layer of tanh, of points x with four coordinates, the last
of which is 1, so that W1 has the biases. A step is the loss, the mean of the square of u's
Laplacian, and its gradients by W1 and W2. functorch/examples/attn/field.py, which solves Poisson's
equation, is run as well. Writes cpu-fields.json, cpu-fields.md and plots into the folder --out.
"""

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click
import memory
import plot
import report
import results
import torch
from cases import ATTN, COMPILE, CPU, EAGER, JAX
from contenders import Run
from machine import console, describe, use_threads
from matplotlib.figure import Figure
from measure import host_clock, interleaved
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

NAME = "cpu-fields"  # of the files
COORDINATES = 4  # the last one is 1
EXAMPLE = Path(__file__).resolve().parents[1] / "functorch/examples/attn/field.py"
SIDE = 33  # points of a grid over the square


class Size(NamedTuple):
    points: int
    hidden: int
    outputs: int

    @property
    def name(self) -> str:
        return f"{self.points:,} points, {self.hidden} hidden, {self.outputs} out"


SIZES = (Size(100_000, 256, 1), Size(100_000, 64, 1), Size(10_000, 64, 1), Size(100_000, 256, 32))
NAMES = {ATTN: "attn_output", EAGER: "eager", COMPILE: "torch.compile", JAX: "jax.jit"}
COLORS = {ATTN: "#d55e00", EAGER: "#7f8c8d", COMPILE: "#2f8fd0", JAX: "#1a9e77"}
Field = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.tanh(x @ first.mT) @ second


def tensors(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Points, and the weights of both layers."""
    torch.manual_seed(0)
    x = torch.rand(size.points, COORDINATES)
    x[:, -1] = 1
    first = torch.randn(size.hidden, COORDINATES)
    return x, first, torch.randn(size.hidden, size.outputs) / size.hidden**0.5


def units(x: Tensor) -> list[Tensor]:
    """The directions in which a point moves."""
    return [torch.eye(COORDINATES)[i].expand_as(x) for i in range(COORDINATES - 1)]


# Ways to the Laplacian of the sum of u's columns, for each point.
def loop(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gradient = grad(lambda x: u(x).sum())
    return sum(jvp(gradient, (x,), (unit,))[1][:, i] for i, unit in enumerate(units(x)))


def vmapped(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gradient = grad(lambda x: u(x).sum())
    rows = vmap(lambda unit: jvp(gradient, (x,), (unit,))[1])(torch.stack(units(x)))
    return rows.diagonal(dim1=0, dim2=2).sum(1)


def nested_jvp(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    def along(unit: Tensor) -> Tensor:
        return jvp(lambda x: jvp(u, (x,), (unit,))[1], (x,), (unit,))[1]

    return sum(along(unit).sum(1) for unit in units(x))


def hessian_of_points(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    of_point = hessian(lambda point: u(point[None]).sum())
    return vmap(of_point)(x)[:, :-1, :-1].diagonal(dim1=1, dim2=2).sum(1)


WAYS = {
    "a loop of jvp(grad)": loop,
    "vmap of jvp(grad)": vmapped,
    "jvp of jvp": nested_jvp,
    "vmap of hessian": hessian_of_points,
}
LAPLACIAN, STEP = "Laplacian", "step"


def torch_run(field: Field, size: Size, way: Callable, mode: str) -> Run:
    x, *weights = tensors(size)

    def laplacian(first: Tensor, second: Tensor) -> Tensor:
        return way(lambda x: field(x, first, second), x)

    def loss(first: Tensor, second: Tensor) -> Tensor:
        return laplacian(first, second).square().mean()

    function = laplacian if mode == LAPLACIAN else grad(loss, argnums=(0, 1))
    return partial(function, *weights)


def compiled_run(size: Size, way: Callable, mode: str) -> Run:
    torch._dynamo.reset()
    run = torch_run(eager, size, way, mode)
    compiled = torch.compile(run.func, dynamic=False)
    return partial(compiled, *run.args)


def jax_run(size: Size, way: Callable, mode: str) -> Run:
    import jax
    import jax.numpy as jnp

    given = tensors(size)
    x, *weights = (jnp.asarray(t.numpy()) for t in given)
    directions = [jnp.asarray(unit.numpy()) for unit in units(given[0])]

    def laplacian(first, second):
        def u(x):
            return (jnp.tanh(x @ first.T) @ second).sum()

        return sum(
            jax.jvp(jax.grad(u), (x,), (unit,))[1][:, i] for i, unit in enumerate(directions)
        )

    def loss(first, second):
        return (laplacian(first, second) ** 2).mean()

    function = jax.jit(laplacian if mode == LAPLACIAN else jax.grad(loss, argnums=(0, 1)))
    return lambda: jax.block_until_ready(function(*weights))


RUNS = {
    ATTN: partial(torch_run, torch.attn_output),
    EAGER: partial(torch_run, eager),
    COMPILE: compiled_run,
    JAX: jax_run,
}
MODES = (LAPLACIAN, STEP)


def measure(size: Size, mode: str, threads: int) -> dict:
    """Times the contenders, and measures their memory."""
    runs, failed = {}, {}
    for name, make in RUNS.items():
        run = make(size, loop, mode)
        try:
            run()
        except RuntimeError as e:  # torch.compile takes no gradient of a jvp in 2.13
            failed[name] = str(e).partition(".")[0]
        else:
            runs[name] = run
    times = interleaved(runs, host_clock(threads, CPU), seconds=10)
    return {
        "size": size._asdict(),
        "mode": mode,
        "seconds": times.seconds,
        "disturbed": round(times.disturbed, 3),
        "memory": {name: peak(size, mode, name, threads) for name in runs},
        "failed": failed,
    }


def measure_ways(size: Size, threads: int) -> dict:
    """Times a step of attn_output and of eager, by each way to the Laplacian."""
    runs = {
        f"{name}, {way}": RUNS[name](size, WAYS[way], STEP)
        for way in WAYS
        for name in (ATTN, EAGER)
    }
    times = interleaved(runs, host_clock(threads, CPU), seconds=20)
    return {"size": size._asdict(), "seconds": times.seconds}


def peak(size: Size, mode: str, contender: str, threads: int) -> int:
    """Returns the bytes above points, weights and results, of a process of its own."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--peak", json.dumps([*size, mode, contender, threads])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return int(done.stdout)


def peak_of_this_process(*given) -> int:
    *size, mode, contender, threads = given
    use_threads(threads)
    run = RUNS[contender](Size(*size), loop, mode)
    RUNS[contender](Size(100, 8, 1), loop, mode)()  # starts threads, autograd, compilers
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    before = memory.status()
    run()
    after = memory.status()
    code = sum(after[x] - before[x] for x in ("RssFile", "RssShmem"))
    return max(0, after["VmHWM"] - before["VmRSS"] - code)


def solve() -> dict:
    """Runs the example with attn_output and composed, from the same weights."""
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    side = torch.linspace(0, 1, SIDE, dtype=torch.double)
    grid = torch.cartesian_prod(side, side)
    found = {"exact": example.solution(grid).tolist(), "runs": {}}
    for name, layer in ((ATTN, torch.attn_output), (EAGER, example.composed)):
        torch.manual_seed(0)
        field = example.Field(layer=layer)
        start = time.perf_counter()
        losses = example.train(field, 2000, 500, 500)
        found["runs"][name] = {
            "seconds": time.perf_counter() - start,
            "losses": [float(f"{x:.3g}") for x in losses],
            "error": example.error(field),
            "field": field(grid).tolist(),
        }
    return found


def medians(row: dict) -> dict[str, float]:
    return {name: median(times) for name, times in row["seconds"].items()}


def markdown(result: dict) -> str:
    text = f"# Training a field on its Laplacian\n\n{report.describe(result['machine'])}\n"
    text += (
        "\nu(x) = tanh(x W1ᵀ) W2 in float32, of points with three coordinates and a 1. A *step* "
    )
    text += "is the mean of the square of u's Laplacian, made by a loop of jvp(grad), and its "
    text += "gradients by W1 and W2. A figure is how many times as long as `torch.attn_output` the "
    text += "others take, the median of the rounds' ratios, and the peak of memory above points, "
    text += "weights and results; what a compiler takes in its first call counts.\n"
    for mode in MODES:
        text += f"\n## {mode.capitalize()}\n\n| | {' | '.join(NAMES.values())} |\n"
        text += "| --" + " | ---:" * len(RUNS) + " |\n"
        for row in result["rows"]:
            if row["mode"] == mode:
                cells = (cell(row, name) for name in RUNS)
                text += f"| {Size(**row['size']).name} | {' | '.join(cells)} |\n"
    failed = {name: why for row in result["rows"] for name, why in row["failed"].items()}
    for name, why in failed.items():
        text += f"\n{NAMES[name]} fails where it has no figure: {why}.\n"
    ways = medians(result["ways"])
    text += f"\n## Ways to the Laplacian: a step at {Size(**result['ways']['size']).name}\n\n"
    text += f"| | {NAMES[ATTN]} | {NAMES[EAGER]} |\n| -- | ---: | ---: |\n"
    for way in WAYS:
        found = (report.duration(ways[f"{name}, {way}"]) for name in (ATTN, EAGER))
        text += f"| {way} | {' | '.join(found)} |\n"
    text += (
        "\n## Poisson's equation\n\n`functorch/examples/attn/field.py`: 2,000 points, 64 hidden, "
    )
    text += (
        "float64.\n\n| | seconds | gradients | loss | error |\n| -- | ---: | ---: | ---: | ---: |\n"
    )
    for name, run in result["solved"]["runs"].items():
        text += f"| {NAMES[name]} | {run['seconds']:.1f} | {len(run['losses'])} | "
        text += f"{run['losses'][-1]:.1e} | {run['error']:.1e} |\n"
    return text


def cell(row: dict, name: str) -> str:
    if name not in row["seconds"]:
        return ""
    ratio = f"{dict(ratios(row))[name]:.2f}"
    shown = report.duration(medians(row)[ATTN]) if name == ATTN else ratio
    return f"{shown}, {row['memory'][name] / 2**20:.0f} MiB"


def ratios(row: dict) -> Iterator[tuple[str, float]]:
    """Each contender's time, as a multiple of ours: the median of the rounds' ratios."""
    ours = row["seconds"][ATTN]
    for name, times in row["seconds"].items():
        yield name, median(x / y for x, y in zip(times, ours, strict=True))


def draw(result: dict, narrow: bool) -> Figure:
    shape = (len(MODES), 1) if narrow else (1, len(MODES))
    figure = Figure(figsize=(4, 8) if narrow else (13, 4.5), layout="constrained")
    for axes, mode in zip(figure.subplots(*shape, squeeze=False).flat, MODES, strict=True):
        rows = [row for row in result["rows"] if row["mode"] == mode]
        names = [Size(**row["size"]).name.replace(", ", "\n") for row in rows]
        for i, contender in enumerate(RUNS):
            values = [dict(ratios(row)).get(contender, 0) for row in rows]
            places = [j + (i - len(RUNS) / 2 + 0.5) * 0.2 for j in range(len(rows))]
            label, color = NAMES[contender], COLORS[contender]
            axes.bar(places, values, 0.2, label=label, color=color)
            for x, y in filter(lambda at: at[1], zip(places, values, strict=True)):
                axes.text(x, y, f"{y:.1f}", ha="center", va="bottom", fontsize="x-small")
        axes.set_xticks(range(len(rows)), names, fontsize="x-small")
        axes.set_ylabel(f"time, as a multiple of {NAMES[ATTN]}'s")
        axes.set_title(mode.capitalize(), loc="left")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = 2 if narrow else len(labels)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    return plot.finish(figure, result)


def draw_solution(result: dict, narrow: bool) -> Figure:
    solved = result["solved"]
    figure = Figure(figsize=(4, 11) if narrow else (13, 4.2), layout="constrained")
    loss, *places = figure.subplots(*((3, 1) if narrow else (1, 3))).flat
    for name, run in solved["runs"].items():
        label = f"{NAMES[name]}, {run['seconds']:.0f} s"
        loss.semilogy(run["losses"], label=label, color=COLORS[name], lw=1)
    loss.set_title("Loss", loc="left")
    loss.set_xlabel("gradients: Adam, then L-BFGS")
    loss.legend(frameon=False)
    found = solved["runs"][ATTN]
    shown = (
        ("The field", found["field"]),
        ("What it lacks", [x - y for x, y in zip(found["field"], solved["exact"], strict=True)]),
    )
    for axes, (title, values) in zip(places, shown, strict=True):
        square = [values[i : i + SIDE] for i in range(0, len(values), SIDE)]
        image = axes.imshow(square, origin="lower", extent=(0, 1, 0, 1), cmap="coolwarm")
        figure.colorbar(image, ax=axes, shrink=0.8)
        axes.set_title(title, loc="left")
    return plot.finish(figure, result)


def write(result: dict, out: Path) -> None:
    results.write_page(NAME, result, markdown(result), draw, out)
    for suffix, narrow in (("", False), ("-narrow", True)):
        drawn_by = partial(draw_solution, result, narrow)
        plot.save(drawn_by, out / f"{NAME}-solution{suffix}.svg")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--threads", type=click.IntRange(1), default=torch.get_num_threads())
@click.option("--most", type=int, default=100_000, show_default=True, help="Points, at most.")
@click.option("--peak", "given", hidden=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="build/fields",
    show_default=True,
)
def main(threads: int, most: int, given: str | None, out: Path) -> None:
    """Measure training on a field's second derivatives."""
    if given:
        print(peak_of_this_process(*json.loads(given)))
        return
    use_threads(threads)
    sizes = [size._replace(points=min(most, size.points)) for size in SIZES]
    rows = [measure(size, mode, threads) for mode in MODES for size in sizes]
    ways = measure_ways(Size(min(most, 20_000), 256, 1), threads)
    about = {"machine": describe(threads, with_jax=True)}
    write(about | {"rows": rows, "ways": ways, "solved": solve()}, out)
    console.print((out / f"{NAME}.md").read_text(encoding="utf-8"), markup=False)


if __name__ == "__main__":
    main(prog_name="fields.py")
