"""What passed, by hashes of what was tested: each commit of the stack in stack/results.json."""

import json
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from rich.table import Table
from typing_extensions import Self

from fork.console import console, new_table, print_wide
from fork.errors import ForkError
from fork.overlay import Stack, write
from fork.suites.keys import key
from fork.suites.results import Result, tally

AGAIN, NEVER, FAILED = "to be run again", "to be run", "failed"  # states


class Entry(Protocol):
    """Tests of one thing, none of which failed; a dataclass."""

    name: str  # of the thing
    made: str  # the second key, of what was compiled, shipped and run
    seconds: int  # CPU time, building included: it hardly depends on what else the machine does

    def cells(self) -> list[str]:
        """Returns what a table says of it, between its name and its state."""


@dataclass(frozen=True)
class Passed:
    """The tests of one commit: how many of them ended in which way."""

    commit: str
    upstream: dict[str, int]
    own: dict[str, int]
    seconds: int
    cpu: str
    date: str
    made: str = ""

    @classmethod
    def now(
        cls,
        commit: str,
        made: str,
        upstream: Iterable[Result],
        own: Iterable[Result],
        seconds: float,
    ) -> Self:
        return cls(commit, ended(upstream), ended(own), round(seconds), cpu(), date(), made)

    @property
    def name(self) -> str:
        return self.commit

    def cells(self) -> list[str]:
        numbers = [self.upstream.get(x, 0) for x in ("passed", "skipped", "xfailed")]
        numbers += [self.own.get(x, 0) for x in ("passed", "skipped")]
        return [*map(str, (*numbers, self.seconds)), f"{self.cpu}, {self.date}"]


def ended(results: Iterable[Result]) -> dict[str, int]:
    """Returns how many tests ended in each way in which one did."""
    return {way: n for way, n in sorted(tally(results).items()) if n}


def cpu() -> str:
    """The name of this machine's processor."""
    found = re.search(
        r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M
    )
    return found[1] if found else platform.machine()


def date() -> str:
    """The day, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime())


class Record:
    """The file, and today's key of each commit: what passed under that key need not be run.

    A subclass has another file, of other things than commits.
    """

    file = "stack/results.json"
    command = "make test-stack"  # which writes the file
    title = "Each commit by itself"
    things = "commits"
    entry: type[Entry] = Passed
    heads = (
        *("commit", "upstream's passed", "skipped", "xfailed", "own passed", "own skipped"),
        *("CPU seconds", "on", "state"),
    )

    def __init__(self, stack: Stack):
        self.root = stack.root
        file = self.root / self.file
        try:
            entries = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            self.entries = {k: self.entry(**entry) for k, entry in entries.items()}
        except (ValueError, TypeError, AttributeError) as e:
            raise ForkError(f"{self.file}: not as `{self.command}` writes it: {e}") from None
        self.keys = self.make_keys(stack)

    def make_keys(self, stack: Stack) -> dict[str, str]:
        """Returns today's key of each commit."""
        return {commit.folder.name: key(stack, commit) for commit in stack.commits}

    def holds(self, name: str) -> bool:
        """Whether it passed as it is today."""
        return self.keys[name] in self.entries

    def last(self, name: str) -> Entry | None:
        """Returns what passed last, perhaps of another version."""
        if self.holds(name):
            return self.entries[self.keys[name]]
        return next((e for e in self.entries.values() if e.name == name), None)

    def estimate(self, name: str) -> int:
        """Returns the CPU seconds that it took last; if it never passed, the most of any."""
        if last := self.last(name):
            return last.seconds
        return max((entry.seconds for entry in self.entries.values()), default=0)

    def add(self, passed: Entry) -> None:
        """Writes it to the file."""
        self._enter(passed.name, passed)

    def take(self, name: str, made: str) -> bool:
        """Enters under today's key what passed with the same second key; False if nothing did."""
        found = next(
            (entry for entry in self.entries.values() if made and entry.made == made), None
        )
        if found is not None:
            self._enter(name, found)
        return found is not None

    def _enter(self, name: str, passed: Entry) -> None:
        """Writes the file, without the entries that nothing has any more."""
        self.entries[self.keys[name]] = passed
        today = set(self.keys.values())
        # An older entry says how long it took.
        last = {name for name in self.keys if not self.holds(name)}
        self.entries = {k: e for k, e in self.entries.items() if k in today or e.name in last}
        ordered = sorted(self.entries.items(), key=lambda item: item[1].name)
        lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(asdict(e))}" for k, e in ordered)
        write({self.file: f"{{\n{lines}\n}}\n".encode()}, self.root)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """A row of `heads` for each commit."""
        for name in self.keys:
            if last := self.last(name):
                yield (name, *last.cells(), "passed" if self.holds(name) else AGAIN)
            else:
                yield (name, *("" for _ in self.heads[2:]), NEVER)


def table(record: Record, states: Mapping[str, str]) -> Table:
    """A line per commit, or whatever the record is of; of those in `states` the state alone."""
    grid = new_table(record.title)
    rows = [
        (name, *("" for _ in cells[1:]), states[name]) if name in states else (name, *cells)
        for name, *cells in record.rows()
    ]
    for head, column in zip(record.heads, zip(*rows, strict=True), strict=True):
        is_number = all(cell.isdigit() for cell in column if cell)
        longest = max(map(len, column)) if head == record.heads[0] else None
        grid.add_column(head, justify="right" if is_number else "left", min_width=longest)
    for row in rows:
        grid.add_row(*row, style="red" if states.get(row[0]) == FAILED else None)
    return grid


def finish(record: Record, states: Mapping[str, str]) -> int:
    """Prints the table, and how many passed; an exit status, 1 if one failed."""
    print_wide(table(record, states))
    passed = sum(map(record.holds, record.keys))
    failed = [*states.values()].count(FAILED)
    left = len(record.keys) - passed - failed
    what = f"{passed} of {len(record.keys)} {record.things} passed"
    console.print(f"{what}, {failed} failed, {left} to be run")
    return 1 if failed else 0
