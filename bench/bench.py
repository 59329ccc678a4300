"""How fast torch.attn is, beside other ways to compute the same and the machine's limits.

    python bench/bench.py                        # the whole table
    python bench/bench.py --only n=1024 --quick  # a part of it
    python bench/bench.py --device cuda          # the table for a GPU

Writes cpu.json or cuda.json, cpu.md and a plot into the folder --out.
"""

import gc
import importlib
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import memory
import report
import results
import roofline
import sweep
import torch
from cases import ATTN, COMPILE, EAGER, JAX, MODES, OUTPUT_MODES, SHORT, Case, rows
from contenders import (
    MORE_RUNS,
    OF_SOFTMAX,
    RUNS,
    Absent,
    Problem,
    allow_tf32,
    as_tensors,
    disagreement,
)
from machine import busy_option, busy_processes, console, describe
from measure import Clock, NoDevice, interleaved
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

# Each is a file with a class Device, which has its cases and says how they are timed.
DEVICES = sorted(p.stem for p in Path(__file__).with_name("devices").glob("*.py"))


def find_jax() -> bool:
    """Returns whether JAX is installed, and sets it up for this comparison."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_X64"] = "1"
    try:
        import jax  # noqa: F401
    except ImportError:
        console.print("no jax: it is left out (pip install jax)")
        return False
    return True


def first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [""])[0]


def run_row(case: Case, mode: str, device: str, names: list[str], clock: Clock, **timing) -> dict:
    """Returns the times of all contenders that can take part and agree with eager."""
    allow_tf32(case.tf32)
    problem = Problem(case, mode, device)
    runs, absent = {}, {}
    expected = as_tensors(RUNS[EAGER](problem)())
    for name in names:
        try:
            run = (RUNS | MORE_RUNS)[name](problem)
            found = run()
            if name not in OF_SOFTMAX and (wrong := disagreement(found, expected, case.dtype)):
                raise Absent(wrong)
            runs[name] = run
        except Exception as e:  # the others are still measured
            words = first_line(e)
            absent[name] = words if isinstance(e, Absent) else f"{type(e).__name__}: {words}"
    del expected
    gc.collect()
    times = interleaved(runs, clock, **timing)
    return {
        "case": case.name,
        **case.sizes,
        "attn_bytes": case.attn_bytes,
        "mode": mode,
        "clock": clock.name,
        "target": case.targets.get(mode, report.ANY)._asdict(),
        "seconds": {
            name: [float(f"{x:.5g}") for x in by_round] for name, by_round in times.seconds.items()
        },
        "disturbed": round(times.disturbed, 3),
        "absent": absent,
    }


def limit(row: dict, peaks: roofline.Peaks | None, case: Case) -> None:
    """Puts the least seconds that the machine needs into the row; None if its peaks are unknown."""
    row["roofline"] = peaks and peaks.seconds(case, row["mode"])
    row["pages"] = peaks and peaks.pages_seconds(case)


def scratch(
    case: Case, mode: str, names: list[str], peak: Callable[[Case, str, str], int]
) -> dict[str, int]:
    """Returns the memory of attn and of eager, where it is large enough to be measured."""
    if mode == "forward" or case.attn_bytes < memory.LEAST:
        return {}
    who = [name for name in (ATTN, EAGER) if name in names]
    try:
        return {name: peak(case, mode, name) for name in who}
    except memory.NoMemory as e:
        console.print(f"no memory: {e}", markup=False)
        return {}


def pattern(ctx, param, value: str) -> re.Pattern:
    try:
        return re.compile(value)
    except re.error as e:
        raise click.BadParameter(f"no regular expression: {e}") from None


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--device", type=click.Choice(DEVICES), default="cpu", show_default=True)
@click.option(
    "--only",
    default="",
    callback=pattern,
    help="Cases whose name this regular expression finds.",
)
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(list(SHORT)))
@click.option("--mode", "modes", multiple=True, type=click.Choice((*MODES, *OUTPUT_MODES)))
@click.option("--threads", type=click.IntRange(1), default=torch.get_num_threads())
@click.option("--rounds", type=click.IntRange(1), help="[default: as time permits]")
@click.option("--quick", is_flag=True, help="A fifth of the time per case.")
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    help="Begin no further case after so long.",
)
@click.option(
    "--sweep",
    "sweep_seconds",
    type=click.FloatRange(0),
    default=0,
    show_default=True,
    help="Seconds of random shapes, on a CPU: sweep.py's.",
)
@busy_option
@click.option("--no-jax", is_flag=True)
@click.option("--no-compile", is_flag=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="build/bench",
    show_default=True,
)
def main(
    device,
    only,
    dtypes,
    modes,
    threads,
    rounds,
    quick,
    minutes,
    sweep_seconds,
    busy,
    no_jax,
    no_compile,
    out,
) -> None:
    """Measure torch.attn beside eager, torch.compile, an autograd.Function and JAX."""
    until = time.monotonic() + 60 * minutes if minutes else float("inf")
    try:
        place = importlib.import_module(f"devices.{device}").Device(threads)
    except NoDevice as e:
        raise click.UsageError(str(e)) from None
    wanted = [
        (case, mode)
        for case, mode in rows(place.cases)
        if only.search(case.name)
        and (not dtypes or case.dtype in dtypes)
        and (not modes or mode in modes)
    ]
    if not wanted:
        raise click.UsageError("no case of the table fits")
    on_cpu = device == "cpu"
    with_jax = on_cpu and not no_jax and find_jax()
    left_out = {JAX: not with_jax, COMPILE: no_compile}
    names = [name for name in RUNS if not left_out.get(name)]
    share = 0.2 if quick else 1
    timing = {"rounds": rounds or 0, "seconds": share * place.SECONDS}
    result = {
        "device": device,
        "machine": describe(threads, with_jax, busy) | place.about(),
        "rows": [],
        "unmeasured": {},  # why, by row
    }
    try:
        peaks = place.peaks()
    except roofline.NoRoofline as e:
        console.print(f"no roofline: {e}", markup=False)
        peaks = None
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with (
        busy_processes(busy),
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("", total=len(wanted))
        try:
            for case, mode in wanted:
                title = f"{case.name} {mode}"
                progress.update(task, description=title)
                if time.monotonic() > until:
                    result["unmeasured"][title] = report.TOO_LATE
                    continue
                clock = place.clock(case)
                clock = clock._replace(block=share * clock.block)
                try:
                    contenders = names + place.more(case, mode)
                    row = run_row(case, mode, device, contenders, clock, **timing)
                    who = list(row["seconds"])
                    row["scratch"] = scratch(case, mode, who, place.scratch)
                except RuntimeError as e:
                    # The GPU has no memory left, or a kernel's error made its context unusable.
                    result["unmeasured"][title] = first_line(e)
                    console.print(f"{title}: {first_line(e)}", markup=False)
                    continue
                limit(row, peaks, case)
                result["rows"].append(row)
                console.print(report.line(row), markup=False)
                for why in report.left_out(row):
                    console.print(f"  {why}", markup=False)
                progress.advance(task)
        except KeyboardInterrupt:
            console.print("stopped: the report has what was measured so far")
    if peaks:
        try:
            peaks = peaks.best(place.peaks())
        except RuntimeError as e:  # the GPU's context is unusable
            console.print(f"no second roofline: {first_line(e)}", markup=False)
        by_name = {case.name: case for case in place.cases}
        for row in result["rows"]:
            limit(row, peaks, by_name[row["case"]])
        result["peaks"] = peaks.as_dict()
    if on_cpu and sweep_seconds:
        counts = sorted({1, threads})
        share = sweep_seconds / len(counts)
        result["sweeps"] = [sweep.sweep(share, count) for count in counts]
    written = results.write(result, out)
    console.print(report.unmeasured(result), markup=False, end="")
    console.print(report.verdict(result["rows"]), markup=False)
    console.print(f"{out}: {', '.join(written)}", markup=False)
    if not results.plot:
        console.print("no matplotlib: there is no plot (pip install matplotlib)")
    spoiled = set(result["unmeasured"].values()) - {report.TOO_LATE}
    sys.exit(bool(spoiled) or any(ATTN in row["absent"] for row in result["rows"]))


if __name__ == "__main__":
    main(prog_name="bench.py")
