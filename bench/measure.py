"""Times several contenders side by side."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cases import HOST, QUIET
from contenders import Run
from torch.utils.benchmark import Timer

BLOCK = 0.05  # seconds of a block of calls; a longer call is a block by itself


class NoDevice(Exception):
    """Why nothing can be measured on a device, in one line."""


class Clock(NamedTuple):
    """The clock that times the calls of a row."""

    name: str
    timer: Callable[[Run], Any]  # what it makes has a Timer's blocked_autorange and timeit
    block: float


class Times(NamedTuple):
    seconds: dict[str, list[float]]  # per call of each, round by round
    disturbed: float  # the share of the machine that others took, at worst


class Others:
    """Measures the share of the machine that other processes, or its host, take from now on."""

    STAT = Path("/proc/stat")

    def __init__(self) -> None:
        self.start = self.now()

    def now(self) -> tuple[float, float, float]:
        if not self.STAT.exists():
            return 0.0, 0.0, 0.0
        ticks = [
            int(x) for x in self.STAT.read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
        ]
        idle = sum(ticks[3:5])
        per_second = os.sysconf("SC_CLK_TCK")
        return sum(ticks) / per_second, idle / per_second, time.process_time()

    def share(self) -> float:
        whole, idle, own = (b - a for a, b in zip(self.start, self.now(), strict=True))
        return max(0.0, (whole - idle - own) / whole) if whole else 0.0


def host_clock(threads: int, name: str = HOST) -> Clock:
    """Makes a clock of the host's, around a block of calls. It waits for a GPU after the block."""

    def timer(run: Run) -> Timer:
        return Timer("run()", globals={"run": run}, num_threads=threads)

    return Clock(name, timer, BLOCK)


def rotations(names: Sequence[str], rounds: int) -> list[list[str]]:
    """Returns the order of each round: each contender is first in turn, and follows each other."""
    orders = []
    for i in range(rounds):
        at = i % len(names)
        order = [*names[at:], *names[:at]]
        orders.append(order[::-1] if i // len(names) % 2 else order)
    return orders


def block_mean(timer: Any, number: int, limit: float) -> float:
    """Returns the seconds per call, of `number` calls unless these take longer than `limit`.

    While another process holds a core, a call that waits for its threads can take a thousand
    times as long.
    """
    part, calls, total = max(1, number // 50), 0, 0.0
    while calls < number and total < limit:
        total += timer.timeit(part).mean * part
        calls += part
    return total / calls


def interleaved(
    runs: Mapping[str, Run],
    clock: Clock,
    *,
    seconds: float,
    rounds: int = 0,
) -> Times:
    """Times one block of calls of each contender in every round.

    It takes `rounds` rounds or, by default, as many as fit in `seconds`, from 5 to 25. If other
    processes disturb it, it takes up to twice as many, of which the quietest count.
    """
    if not runs:
        return Times({}, 0.0)
    block = clock.block
    timers, numbers, cost = {}, {}, 0.0
    for name, run in runs.items():
        timers[name] = clock.timer(run)
        once = timers[name].blocked_autorange(min_run_time=block).median
        numbers[name] = max(1, round(block / once))
        cost += once * (numbers[name] + 2)  # Timer warms up with two calls or 1 %
    rounds = rounds or min(25, max(5, round(seconds / cost)))
    found: list[tuple[float, dict[str, float]]] = []
    for order in rotations(list(runs), 2 * rounds):
        others = Others()
        times = {name: block_mean(timers[name], numbers[name], 10 * block) for name in order}
        found.append((others.share(), times))
        if sum(share <= QUIET for share, _ in found) == rounds:
            break
    quietest = sorted(found, key=lambda pair: pair[0])[:rounds]
    return Times(
        {name: [times[name] for _, times in quietest] for name in runs},
        quietest[-1][0],
    )
