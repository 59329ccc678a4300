"""Tests what a record does not hold, one thing after another, and keeps what passes."""

import os
import time
from collections.abc import Callable, Iterable

from fork.console import console
from fork.errors import ForkError
from fork.suites.record import FAILED, Entry, Record
from fork.suites.report import failures
from fork.suites.results import Result


class Left(ForkError):
    """Why something cannot be tested here, which is no failure: its state, in a few words."""


def run_pending(
    record: Record,
    names: Iterable[str],
    minutes: float | None,
    run: Callable[[str], tuple[list[Result], Callable[[float], Entry]] | None],
) -> dict[str, str]:
    """Tests those of `names` that have not passed as they are today; the states of the others.

    `run` returns the results of one, and what makes the record's entry of its CPU seconds; or None
    if the record has it by its second key. After `minutes` none begins, nor one before that if all
    cores would take longer than is left.
    """
    start, states = time.monotonic(), {}
    for name in [n for n in names if not record.holds(n)]:
        used = cpu_seconds()
        end = time.monotonic() + record.estimate(name) / (os.cpu_count() or 1)
        if minutes is not None and end >= start + minutes * 60:
            continue
        console.rule(name, align="left")
        try:
            ran = run(name)
        except ForkError as e:
            console.print(f"error: {e}")
            states[name] = str(e) if isinstance(e, Left) else FAILED
            continue
        if ran is None:
            console.print("what is compiled, shipped and run is the same as what passed")
            continue
        results, entry = ran
        for line in failures(results):
            console.print(line)
        if all(result.ok for result in results):
            record.add(entry(cpu_seconds() - used))
        else:
            states[name] = FAILED
    return states


def cpu_seconds() -> float:
    """What this process and those that it waited for have used."""
    return sum(os.times()[:4])
