"""The machine that is measured: what the figures depend on, and the cores that are used."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import torch
from rich.console import Console

console = Console(highlight=False, soft_wrap=True)

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # 1: PyTorch asks for them for every large tensor
# This command keeps a core busy.
BUSY = [sys.executable, "-c", "while True: pass"]
busy_option = click.option(
    "--busy",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Measure beside this many processes that never sleep.",
)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keeps `count` processes busy while the block runs."""
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen(BUSY)
            # Popen's own context waits a quarter of a second only if it is interrupted.
            stack.callback(process.wait)
            stack.callback(process.kill)  # called first
        yield


def commit_of(clone: Path) -> str | None:
    """Returns the commit that the clone's kernel is of, or None if git is missing or has none."""
    if not shutil.which("git"):
        return None
    git = ["git", "-c", "safe.directory=*", "-C", clone]
    shown = subprocess.run(
        [*git, "show", "-s", "--no-show-signature", "--format=%h of %cs", "HEAD"],
        capture_output=True,
        text=True,
    )
    if shown.returncode:
        return None
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "aten"]).returncode
    return shown.stdout.strip() + (", with changes" if changed else "")


def describe(threads: int, with_jax: bool, busy: int = 0) -> dict:
    """Returns what the figures depend on."""
    cpu = {}
    try:
        listed = subprocess.run(["lscpu", "-J"], capture_output=True, text=True).stdout
        entries = json.loads(listed)["lscpu"]
        while entries:
            entry = entries.pop()
            cpu[entry["field"].rstrip(":")] = entry["data"]
            entries += entry.get("children", [])
    except (OSError, ValueError, KeyError):
        pass  # without lscpu the processor's name is enough
    caches = ("L1d", "L2", "L3")
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    found = re.search(r"\[(\w+)\]", huge.read_text(encoding="utf-8")) if huge.exists() else None
    asked = ", asked for" if os.environ.get(HUGE_PAGES) == "1" else ""  # see use_threads
    about = {
        "cpu": cpu.get("Model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "caches": {x: cpu[y] for x in caches if (y := f"{x} cache") in cpu},
        "isa": torch.backends.cpu.get_cpu_capability(),
        "huge pages": f"{found[1] if found else 'unknown'}{asked}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if commit := commit_of(Path(__file__).resolve().parents[1]):
        about["commit"] = commit
    if busy:
        about["busy"] = busy
    if with_jax:
        import jax

        about["jax"] = jax.__version__
    return about


def use_threads(threads: int) -> None:
    """Gives all contenders the same cores: JAX takes as many threads as it is allowed cores.

    All of PyTorch's get huge pages for large tensors. Without them the ratios are those of page
    faults, whoever computes. PyTorch reads the variable when it first allocates memory.
    """
    os.environ[HUGE_PAGES] = "1"
    torch.set_num_threads(threads)
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, allowed[:threads])
