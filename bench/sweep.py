"""Whether torch.attn or attn_output is ever slower than eager: random shapes, side by side.

    python bench/sweep.py 600                       # ten minutes
    python bench/sweep.py 60 --seed 7 --threads 1
    python bench/sweep.py 60 --busy 2               # on a machine that is not idle

Prints what is slower. Writes the report and the plot, as bench.py does, into the folder --out.
"""

import math
import random
import secrets
import sys
import time
from pathlib import Path

import click
import report
import results
import torch
from cases import ATTN, CPU, EAGER, FIELD_MODES, OUTPUT_MODES, SHORT, THIRD_ORDER, Case
from contenders import RUNS, Problem
from machine import busy_option, busy_processes, console, describe, use_threads
from measure import host_clock, interleaved

BATCH, ROWS, COLS = 1000, 2**20, 768  # the largest batch; m and n; d and e
FEW = 2, 8  # columns of a field's points
MAX_ELEMENTS = 1 << 26  # of any tensor
MAX_FLOPS = 1 << 33  # of the forward
BLOCK = 0.002  # seconds of calls that are timed together
MODES = ("forward", "step", *OUTPUT_MODES)
# A case that seems slower is measured again, with more rounds: noise may have passed by then.
ROUNDS = (5, 15)


def size(rng: random.Random, largest: int) -> int:
    """Draws a size from 1 to `largest`, log-uniform; half of them are 2**i or 3 * 2**i."""
    x = math.exp(rng.uniform(0, math.log(largest + 1)))
    if rng.random() < 0.5:
        return int(x)
    power = 2 ** int(math.log2(x))
    return max(y for y in (1, power, 3 * power // 2) if y <= x)


def random_case(rng: random.Random) -> tuple[Case, str]:
    """Draws a case that fits in memory and takes less than seconds, and its mode."""
    while True:
        mode = rng.choice(MODES)
        is_field = mode in FIELD_MODES and rng.random() < 0.5
        case = Case(
            rng.choice(list(SHORT)),
            m=size(rng, ROWS),
            n=size(rng, ROWS),
            d=rng.randint(*FEW) if is_field else size(rng, COLS),
            e=size(rng, COLS),
            batch=rng.choice((0, size(rng, BATCH))),
        )
        (work,) = case.passes("forward")
        shapes = *case.shapes, case.output_shape, case.attn_shape
        elements = max(math.prod(shape) for shape in shapes)
        # Eager keeps dozens of tensors as large as attn in the third order.
        most = MAX_ELEMENTS >> 3 if mode == THIRD_ORDER else MAX_ELEMENTS
        if work.flops <= MAX_FLOPS and elements <= most:
            return case, mode


def measured(case: Case, mode: str, threads: int) -> report.Row:
    """Times attn and eager, round by round."""
    problem = Problem(case, mode)
    runs = {name: RUNS[name](problem) for name in (ATTN, EAGER)}
    clock = host_clock(threads, CPU)._replace(block=BLOCK)
    for rounds in ROUNDS:
        times = interleaved(runs, clock, seconds=0, rounds=rounds)
        row = {
            "case": case.name,
            "mode": mode,
            "flops": sum(work.flops for work in case.passes(mode)),
            "seconds": times.seconds,
            "disturbed": round(times.disturbed, 3),
        }
        if not report.below(row):
            break
    return row


def sweep(seconds: float, threads: int, seed: int | None = None) -> dict:
    """Measures as many random cases as there is time for."""
    seed = secrets.randbelow(10**6) if seed is None else seed
    console.print(f"random shapes with seed {seed}, {report.threads(threads)}")
    torch.set_num_threads(threads)
    rng = random.Random(seed)
    rows: list[report.Row] = []
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            rows.append(measured(*random_case(rng), threads))
            if report.below(rows[-1]):
                console.print(report.line(rows[-1]), markup=False)
    except KeyboardInterrupt:
        console.print("stopped: the report has what was measured so far")
    return {"seed": seed, "threads": threads, "rows": rows}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("seconds", type=click.FloatRange(0, min_open=True))
@click.option("--seed", type=int, help="[default: another each time; it is printed]")
@click.option("--threads", type=click.IntRange(1), default=torch.get_num_threads())
@busy_option
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="build/sweep",
    show_default=True,
)
def main(seconds, seed, threads, busy, out) -> None:
    """Measure torch.attn beside eager at random shapes, for SECONDS."""
    use_threads(threads)
    with busy_processes(busy):
        found = sweep(seconds, threads, seed)
    about = describe(threads, with_jax=False, busy=busy)
    result = {"device": "cpu", "machine": about, "rows": [], "sweeps": [found]}
    written = results.write(result, out)
    console.print(report.sweep_summary(found), markup=False)
    console.print(f"{out}: {', '.join(written)}", markup=False)
    sys.exit(any(report.below(row) for row in found["rows"]))


if __name__ == "__main__":
    main(prog_name="sweep.py")
