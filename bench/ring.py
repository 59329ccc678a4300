"""attn_output_ring on two processes of one thread, beside attn_output on one of them.

    python bench/ring.py                    # n = m from 2048 to 16,384, two minutes
    python bench/ring.py --largest 4096     # a part of it
    python bench/ring.py --bandwidth 50     # what the model says of links of 50 GB/s

Writes cpu-ring.json, cpu-ring.md and a plot into the folder --out.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
import plot
import report
import results
import torch
import torch.distributed as dist
from cases import Case
from machine import HUGE_PAGES, console, describe
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh

NAME = "cpu-ring"  # of the files
RANKS = 2
WIDTH = 64  # d and e
AIM = 0.85  # of ideal, at AIM_AT
AIM_AT = 1 << 14
ROUNDS = 5
# The names of curves, by what Case calls their modes.
MODES = {
    "output": "forward",
    "output step": "step",
    "causal": "causal forward",
    "causal step": "causal step",
}
LOOKS = (("#d55e00", "o"), ("#2f8fd0", "^"), ("#e69f00", "P"), ("#1a9e77", "v"))
# The table of the model has these.
MODEL_RANKS = (2, 8, 32, 128, 512)
MODEL_LENGTHS = (1 << 14, 1 << 17, 1 << 20)
FASTER = 100  # times the rate of this machine's core: a device with links of the same bandwidth


def kind_of(mode: str) -> tuple[bool, bool]:
    """Returns whether a mode is causal, and whether it has a backward."""
    return "causal" in mode, "step" in mode


def model(
    n: int, ranks: int, mode: str, rate: float, bandwidth: float, block: int, latency: float = 3e-5
) -> float:
    """Returns the share of ideal that a ring of float32 reaches, by its slowest rank.

    A step computes while k and v are sent: it takes as long as the longer of the two. Gradients of
    k and v are sent after a step, and have one pair's time to arrive.
    """
    is_causal, is_step = kind_of(mode)
    blocks = -(-n // block)
    homes = -(-blocks // 2) if is_causal else blocks
    rows = -(-homes // ranks) * (2 if is_causal else 1) * block  # of the rank that has most
    of_pair = block * block * 4 * WIDTH / rate
    pairs = (rows // block) ** 2 / (2 if is_causal else 1)
    sent = rows * 2 * WIDTH * 4 / bandwidth + latency  # k and v, or their gradients
    compute = pairs * of_pair
    steps = min(ranks, homes)  # in which something comes
    found = steps * max(compute, sent)
    if is_step:
        found += steps * (max(2.5 * compute, sent) + max(0, sent - 2.5 * of_pair))
    if is_causal:  # half of q, k, v and the output are exchanged, and in a step again
        found += 2 * sent * (2.5 if is_step else 1)
    alone = n * n * 4 * WIDTH / rate / (2 if is_causal else 1) * (3.5 if is_step else 1)
    return min(1.0, alone / (ranks * found))


def sent_bytes() -> int:
    """What this machine has sent to itself, by any process."""
    with open("/proc/net/dev", encoding="utf-8") as file:
        line = next(line for line in file if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def runs_of(mode: str, n: int, mesh: dist.DeviceMesh) -> dict[str, Callable]:
    """Returns what a rank calls: the first rank alone, and all of them."""
    from torch.distributed.tensor.experimental._attn_ring import attn_output_ring

    is_causal, is_step = kind_of(mode)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(n, WIDTH, generator=generator) / 8 for _ in range(4)]
    shards = [x.chunk(mesh.size())[mesh.get_local_rank()].clone() for x in whole]

    def run(op, tensors, **options):
        *inputs, grad = tensors
        leaves = [x.requires_grad_(is_step) for x in inputs]

        def call():
            output = op(*leaves, is_causal=is_causal, **options)
            return torch.autograd.grad(output, leaves, grad) if is_step else output

        return call

    alone = run(torch.attn_output, whole)
    return {
        "alone": alone if mesh.get_local_rank() == 0 else lambda: None,
        "ring": run(attn_output_ring, shards, mesh=mesh),
    }


def measure(mode: str, n: int, mesh: dist.DeviceMesh) -> dict:
    """Times both in turn. The first call after the other's finds cold caches, and is not timed."""
    runs = runs_of(mode, n, mesh)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    sent = 0
    for at in range(ROUNDS):
        for name in sorted(runs, reverse=bool(at % 2)):
            runs[name]()
            dist.barrier()
            before, start = sent_bytes(), time.perf_counter()
            runs[name]()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            if name == "ring":
                sent = (sent_bytes() - before) // mesh.size()
            dist.barrier()
    flops = sum(x.flops for x in Case("float32", n).passes(mode))
    return {"mode": mode, "n": n, "seconds": seconds, "sent": sent, "flops": flops}


def process(rank: int, store: str, lengths: list[int], found: multiprocessing.SimpleQueue) -> None:
    torch.set_num_threads(1)
    file = dist.FileStore(store, RANKS)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for n in lengths:
        for mode in MODES:
            row = measure(mode, n, mesh)
            if rank == 0:
                found.put(row)
    dist.barrier()


def sent_by_model(row: dict) -> float:
    """Returns the bytes that a rank sends: k and v, their gradients, and what is exchanged."""
    shard = row["n"] // RANKS * WIDTH * 4
    is_causal, is_step = kind_of(row["mode"])
    passes = (RANKS - 1) * 2 * (2 if is_step else 1) + (RANKS * 2 if is_step else 0)
    exchanged = (4 + (4 + 3 if is_step else 0)) / 2 if is_causal else 0
    return shard * (passes + exchanged)


def efficiency(row: dict) -> float:
    pairs = zip(row["seconds"]["alone"], row["seconds"]["ring"], strict=True)
    return median(alone / (RANKS * ring) for alone, ring in pairs)


def rate(result: dict) -> float:
    """Returns the FLOP/s of a rank, of the longest forward."""
    rows = [row for row in result["rows"] if row["mode"] == "output"]
    return rows[-1]["flops"] / median(rows[-1]["seconds"]["alone"])


def markdown(result: dict) -> str:
    text = f"# The ring of attn_output\n\n{report.describe(result['machine'])}\n\n"
    text += f"d = e = {WIDTH}, float32, {RANKS} gloo processes of one thread. *Of ideal*: the time "
    text += "of `attn_output` in one process of one thread, divided by the number of processes and "
    text += "by the ring's time. *Sent*: bytes a rank, all that the loopback device counts, and as "
    text += "a multiple of what the model says.\n\n"
    text += "| n | what | one process | ring | of ideal | sent | of the model |\n"
    text += "| ---: | -- |" + " ---: |" * 5 + "\n"
    for row in result["rows"]:
        alone, ring = (report.duration(median(row["seconds"][x])) for x in ("alone", "ring"))
        sent = f"{row['sent'] / 2**20:.1f} MiB | {row['sent'] / sent_by_model(row):.2f}"
        found = f"{alone} | {ring} | {efficiency(row):.2f} | {sent}"
        text += f"| {row['n']} | {MODES[row['mode']]} | {found} |\n"
    text += "\n## By the model\n\n"
    of_rank, bandwidth = rate(result), result["bandwidth"]
    text += (
        f"Share of ideal, for links of {bandwidth / 1e9:g} GB/s. A rank computes as fast as one "
    )
    text += f"process above, {of_rank / 1e9:.0f} GFLOP/s, or {FASTER} times as fast. Blocks have "
    text += f"{result['block']} rows.\n\n"
    heads = [f"{n >> 10} Ki" for n in MODEL_LENGTHS]
    columns = [(times, n) for times in (1, FASTER) for n in MODEL_LENGTHS]
    text += f"| what | ranks | {' | '.join(heads + [f'{x}, fast' for x in heads])} |\n"
    text += "| -- | ---: |" + " ---: |" * len(columns) + "\n"
    for mode, name in MODES.items():
        for ranks in MODEL_RANKS:
            cells = (
                model(n, ranks, mode, times * of_rank, bandwidth, result["block"])
                for times, n in columns
            )
            text += f"| {name} | {ranks} | {' | '.join(f'{x:.2f}' for x in cells)} |\n"
    return text


def measured_curves(axes: Axes, rows: list[dict]) -> None:
    for (mode, name), (color, marker) in zip(MODES.items(), LOOKS, strict=True):
        points = [(row["n"], efficiency(row)) for row in rows if row["mode"] == mode]
        axes.plot(*zip(*points, strict=True), label=name, color=color, marker=marker)
    axes.plot(AIM_AT, AIM, "_", color="#000000", markersize=18, label="aim")
    plot.over_n(axes, f"Measured, {RANKS} processes: of ideal")


def model_curves(axes: Axes, result: dict) -> None:
    ranks = [1 << i for i in range(1, 10)]
    for n, (color, marker) in zip(MODEL_LENGTHS, LOOKS, strict=False):
        for times, style in ((1, "-"), (FASTER, ":")):
            about = (times * rate(result), result["bandwidth"], result["block"])
            found = [model(n, x, "output step", *about) for x in ranks]
            label = f"n = {n >> 10} Ki" if times == 1 else f"{FASTER} times as fast"
            axes.plot(ranks, found, style, color=color, marker=marker, markersize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel(f"ranks, with links of {result['bandwidth'] / 1e9:g} GB/s")
    axes.set_title("By the model, a step: of ideal", loc="left")
    axes.legend(frameon=False, fontsize="small")


def draw(result: dict, narrow: bool) -> Figure:
    figure = Figure(figsize=(4, 8) if narrow else (11, 4.5), layout="constrained")
    left, right = figure.subplots(*((2, 1) if narrow else (1, 2)))
    measured_curves(left, result["rows"])
    model_curves(right, result)
    for axes in (left, right):
        axes.set_ylim(0, 1.05)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    return plot.finish(figure, result)


def write(result: dict, out: Path) -> None:
    results.write_page(NAME, result, markdown(result), draw, out)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--largest", type=click.IntRange(2048), default=1 << 14, show_default=True)
@click.option("--bandwidth", type=float, default=10, show_default=True, help="GB/s, of the model.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="build/ring",
    show_default=True,
)
def main(largest: int, bandwidth: float, out: Path) -> None:
    """Measure attn_output_ring over n, beside attn_output."""
    from torch.distributed.tensor.experimental._attn_ring import BLOCK

    os.environ[HUGE_PAGES] = "1"  # of the processes: see use_threads
    lengths = [1 << i for i in range(11, 20) if 1 << i <= largest]
    result = {
        "machine": describe(RANKS, with_jax=False),
        "bandwidth": bandwidth * 1e9,
        "block": BLOCK,
        "rows": [],
    }
    found = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        started = multiprocessing.spawn(process, (store, lengths, found), RANKS, join=False)
        is_done = False
        while not is_done:
            is_done = started.join(timeout=1)
            while not found.empty():
                row = found.get()
                result["rows"].append(row)
                console.print(row["n"], MODES[row["mode"]], f"{efficiency(row):.2f}", markup=False)
                write(result, out)


if __name__ == "__main__":
    main(prog_name="ring.py")
