"""What each way to have the operator costs: a call at the lab's size, and at n = 1024.

    python bench/ways.py

Writes cpu-ways.json and cpu-ways.md into the folder --out. torch_attn must be installed beside a
torch that has torch.attn, as `python -m fork bench --script ways` has it.
"""

import time
from pathlib import Path
from statistics import median

import click
import report
import results
import torch
from cases import ATTN, COMPILE, CPU, EAGER, EXTENSION, FUNCTION, Case
from contenders import MORE_RUNS, RUNS, Problem
from machine import console, describe, use_threads
from measure import host_clock, interleaved
from torch._inductor import config

NAME = "cpu-ways"  # of the files
WAYS = {
    "this fork": ATTN,
    "torch-attn": EXTENSION,
    "autograd.Function": FUNCTION,
    "torch.compile": COMPILE,
    "eager": EAGER,
}
CASES = (Case("float32", 2, d=3, e=4), Case("float32", 1024))
MODES = ("forward", "step")
HEAD = """\
Median times. *First*: the first call of this case, for `torch.compile` with nothing in its cache. \
A *step* is a forward, and a backward from `output`.
"""


def measure(case: Case, mode: str, threads: int) -> dict:
    problem = Problem(case, mode)
    runs = {name: (RUNS | MORE_RUNS)[way](problem) for name, way in WAYS.items()}
    first = {}
    for name, run in runs.items():
        start = time.perf_counter()
        run()
        first[name] = time.perf_counter() - start
    times = interleaved(runs, host_clock(threads, CPU), seconds=10)
    return {
        "case": case.name,
        "mode": mode,
        "first": first,
        "seconds": times.seconds,
        "disturbed": round(times.disturbed, 3),
    }


def markdown(result: dict) -> str:
    rows = result["rows"]
    lines = [(f"first {rows[-1]['mode']}, {rows[-1]['case']}", rows[-1]["first"])]
    for row in rows:
        times = {name: median(row["seconds"][name]) for name in WAYS}
        lines.append((f"{row['mode']}, {row['case']}", times))
    text = f"# What each way costs\n\n{report.describe(result['machine'])}\n\n{HEAD}\n"
    text += f"|  | {' | '.join(WAYS)} |\n| --" + " | ---:" * len(WAYS) + " |\n"
    for name, times in lines:
        text += f"| {name} | {' | '.join(report.duration(times[way]) for way in WAYS)} |\n"
    return text


def write(result: dict, out: Path) -> None:
    results.write_tables(NAME, result, markdown(result), out)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--threads", type=click.IntRange(1), default=torch.get_num_threads())
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="build/ways",
    show_default=True,
)
def main(threads: int, out: Path) -> None:
    """Measure torch.attn, torch_attn, a Function, torch.compile and eager."""
    config.force_disable_caches = True
    use_threads(threads)
    rows = [measure(case, mode, threads) for case in CASES for mode in MODES]
    write({"machine": describe(threads, with_jax=False), "rows": rows}, out)
    console.print((out / f"{NAME}.md").read_text(encoding="utf-8"), markup=False)


if __name__ == "__main__":
    main(prog_name="ways.py")
