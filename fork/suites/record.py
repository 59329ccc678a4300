"""What passed on each commit of the stack: stack/results.json, by a hash of what was tested."""

import json
import platform
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from fork.errors import ForkError
from fork.overlay import Stack, write
from fork.suites.plan import key
from fork.suites.results import Result, tally

FILE = "stack/results.json"
NUMBERS = ("upstream's passed", "skipped", "xfailed", "own passed", "own skipped", "CPU seconds")
HEADS = ("commit", *NUMBERS, "on", "state")
AGAIN, NEVER = "to be run again", "to be run"  # states


@dataclass(frozen=True)
class Passed:
    """The tests of one commit, none of which failed: how many of them ended in which way."""

    commit: str
    upstream: dict[str, int]
    own: dict[str, int]
    seconds: int  # CPU time, building included: it hardly depends on what else the machine does
    cpu: str
    date: str

    @classmethod
    def now(
        cls, commit: str, upstream: Iterable[Result], own: Iterable[Result], seconds: float
    ) -> Self:
        counts = [{k: n for k, n in sorted(tally(of).items()) if n} for of in (upstream, own)]
        return cls(commit, *counts, round(seconds), cpu(), time.strftime("%Y-%m-%d", time.gmtime()))


def cpu() -> str:
    """The name of this machine's processor."""
    found = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1] if found else platform.machine()


class Record:
    """The file, and today's key of each commit: what passed under that key need not be run."""

    def __init__(self, stack: Stack):
        self.root = stack.root
        self.keys = {commit.folder.name: key(stack, commit) for commit in stack.commits}
        file = self.root / FILE
        try:
            entries = json.loads(file.read_text()) if file.exists() else {}
            self.entries = {k: Passed(**entry) for k, entry in entries.items()}
        except (ValueError, TypeError, AttributeError) as e:
            raise ForkError(f"{FILE}: not as `make test-stack` writes it: {e}") from None

    def holds(self, commit: str) -> bool:
        """Whether the commit passed as it is today."""
        return self.keys[commit] in self.entries

    def last(self, commit: str) -> Passed | None:
        """Returns what passed last, perhaps of another version of the commit."""
        if self.holds(commit):
            return self.entries[self.keys[commit]]
        return next((e for e in self.entries.values() if e.commit == commit), None)

    def estimate(self, commit: str) -> int:
        """Returns the CPU seconds that it took last; if it never passed, the most of any."""
        if last := self.last(commit):
            return last.seconds
        return max((entry.seconds for entry in self.entries.values()), default=0)

    def add(self, passed: Passed) -> None:
        """Writes it to the file, without the entries that no commit has any more."""
        self.entries[self.keys[passed.commit]] = passed
        today = set(self.keys.values())
        # An older entry says how long the commit took.
        last = {name for name in self.keys if not self.holds(name)}
        self.entries = {k: e for k, e in self.entries.items() if k in today or e.commit in last}
        ordered = sorted(self.entries.items(), key=lambda item: item[1].commit)
        lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(asdict(e))}" for k, e in ordered)
        write({FILE: f"{{\n{lines}\n}}\n".encode()}, self.root)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """A row of HEADS for each commit."""
        for commit in self.keys:
            if last := self.last(commit):
                numbers = [last.upstream.get(x, 0) for x in ("passed", "skipped", "xfailed")]
                numbers += [last.own.get(x, 0) for x in ("passed", "skipped")]
                state = "passed" if self.holds(commit) else AGAIN
                cells = [*map(str, (*numbers, last.seconds)), f"{last.cpu}, {last.date}", state]
            else:
                cells = ["" for _ in HEADS[2:]] + [NEVER]
            yield (commit, *cells)
