"""How fast torch.attn is, beside other ways to compute the same and the machine's limits.

    python benchmarks/attn/bench.py                        # the whole table
    python benchmarks/attn/bench.py --only n=1024 --quick  # a part of it

Writes cpu.json, cpu.md and a plot into the folder --out.
"""

import gc
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Optional

import click
import memory
import report
import results
import roofline
from cases import ATTN, Case, CASES, COMPILE, EAGER, JAX, MODES, rows, SHORT
from contenders import Absent, as_tensors, disagreement, Problem, RUNS
from measure import BLOCK, interleaved
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

import torch


console = Console(highlight=False, soft_wrap=True)


def machine(threads: int, with_jax: bool) -> dict:
    """What the figures depend on."""
    cpu = {}
    try:
        listed = subprocess.run(["lscpu", "-J"], capture_output=True, text=True).stdout
        entries = json.loads(listed)["lscpu"]
        while entries:
            entry = entries.pop()
            cpu[entry["field"].rstrip(":")] = entry["data"]
            entries += entry.get("children", [])
    except (OSError, ValueError, KeyError):
        pass  # no lscpu: the model will do
    caches = ("L1d", "L2", "L3")
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    found = re.search(r"\[(\w+)\]", huge.read_text()) if huge.exists() else None
    about = {
        "cpu": cpu.get("Model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "caches": {x: cpu[y] for x in caches if (y := f"{x} cache") in cpu},
        "isa": torch.backends.cpu.get_cpu_capability(),
        "huge pages": found[1] if found else "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if with_jax:
        import jax

        about["jax"] = jax.__version__
    return about


def use_threads(threads: int) -> None:
    """All contenders get the same cores: JAX takes as many threads as it is allowed cores."""
    torch.set_num_threads(threads)
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, allowed[:threads])


def find_jax() -> bool:
    """Whether there is a JAX, set up for this comparison."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_X64"] = "1"
    try:
        import jax  # noqa: F401
    except ImportError:
        console.print("no jax: it is left out (pip install jax)")
        return False
    return True


def run_row(case: Case, mode: str, names: list[str], threads: int, **timing) -> dict:
    """Times of everyone who can take part and agrees with eager."""
    problem = Problem(case, mode)
    runs, absent = {}, {}
    expected = as_tensors(RUNS[EAGER](problem)())
    for name in names:
        try:
            run = RUNS[name](problem)
            if wrong := disagreement(run(), expected, case.dtype):
                raise Absent(wrong)
            runs[name] = run
        except Exception as e:  # the others can be measured all the same
            words = (str(e).strip().splitlines() or [""])[0]
            absent[name] = (
                words if isinstance(e, Absent) else f"{type(e).__name__}: {words}"
            )
    del expected
    gc.collect()
    times = interleaved(runs, threads, **timing)
    sizes = {x: getattr(case, x) for x in ("batch", "m", "n", "d", "e")}
    return {
        "case": case.name,
        "dtype": case.dtype,
        **sizes,
        "attn_bytes": case.attn_bytes,
        "mode": mode,
        "target": case.targets.get(mode, report.ANY)._asdict(),
        "seconds": {
            name: [float(f"{x:.5g}") for x in by_round]
            for name, by_round in times.seconds.items()
        },
        "disturbed": round(times.disturbed, 3),
        "absent": absent,
    }


def limit(row: dict, peaks: Optional[roofline.Peaks], case: Case) -> None:
    """The seconds that the machine needs, if its peaks are known."""
    row["roofline"] = peaks and peaks.seconds(case, row["mode"])
    row["pages"] = peaks and peaks.pages_seconds(case)


def scratch(case: Case, mode: str, names: list[str], threads: int) -> dict[str, int]:
    """The memory of attn and of eager, where it is large enough to be measured."""
    if mode == "forward" or case.attn_bytes < memory.LEAST:
        return {}
    who = [name for name in (ATTN, EAGER) if name in names]
    try:
        return {name: memory.peak(case.name, mode, name, threads) for name in who}
    except memory.NoMemory as e:
        console.print(f"no memory: {e}", markup=False)
        return {}


def pattern(ctx, param, value: str) -> re.Pattern:
    try:
        return re.compile(value)
    except re.error as e:
        raise click.BadParameter(f"no regular expression: {e}") from None


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--only",
    default="",
    callback=pattern,
    help="Cases whose name this regular expression finds.",
)
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(list(SHORT)))
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODES))
@click.option("--threads", type=click.IntRange(1), default=torch.get_num_threads())
@click.option("--rounds", type=click.IntRange(1), help="[default: as time permits]")
@click.option("--quick", is_flag=True, help="A fifth of the time per case.")
@click.option("--no-jax", is_flag=True)
@click.option("--no-compile", is_flag=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="build/bench",
    show_default=True,
)
def main(only, dtypes, modes, threads, rounds, quick, no_jax, no_compile, out) -> None:
    """Measure torch.attn beside eager, torch.compile, an autograd.Function and JAX."""
    wanted = [
        (case, mode)
        for case, mode in rows(CASES)
        if only.search(case.name)
        and (not dtypes or case.dtype in dtypes)
        and (not modes or mode in modes)
    ]
    if not wanted:
        raise click.UsageError("no case of the table fits")
    use_threads(threads)
    with_jax = not no_jax and find_jax()
    left_out = {JAX: not with_jax, COMPILE: no_compile}
    names = [name for name in RUNS if not left_out.get(name)]
    timing = {
        "rounds": rounds or 0,
        "seconds": 0.5 if quick else 3,
        "block": BLOCK / 5 if quick else BLOCK,
    }
    result = {"machine": machine(threads, with_jax), "rows": []}
    try:
        peaks = roofline.measure(threads)
    except roofline.NoRoofline as e:
        console.print(f"no roofline: {e}", markup=False)
        peaks = None
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(wanted))
        try:
            for case, mode in wanted:
                progress.update(task, description=f"{case.name} {mode}")
                row = run_row(case, mode, names, threads, **timing)
                row["scratch"] = scratch(case, mode, list(row["seconds"]), threads)
                limit(row, peaks, case)
                result["rows"].append(row)
                console.print(report.line(row), markup=False)
                for why in report.left_out(row):
                    console.print(f"  {why}", markup=False)
                progress.advance(task)
        except KeyboardInterrupt:
            console.print("stopped: the report is of what was measured")
    if peaks:
        peaks = peaks.best(roofline.measure(threads))
        by_name = {case.name: case for case in CASES}
        for row in result["rows"]:
            limit(row, peaks, by_name[row["case"]])
        result["peaks"] = peaks.as_dict()
    written = results.write(result, out)
    console.print(report.verdict(result["rows"]), markup=False)
    console.print(f"{out}: {', '.join(written)}", markup=False)
    if not results.PLOTS:
        console.print("no matplotlib: there is no plot (pip install matplotlib)")
    sys.exit(any(ATTN in row["absent"] for row in result["rows"]))


if __name__ == "__main__":
    main(prog_name="bench.py")
