"""Shows a user the suites: a line as each ends, tables, and what failed."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fork.console import console, new_table, print_wide
from fork.suites.record import HEADS, NUMBERS, Record
from fork.suites.results import COUNTS, Result, counts, tally

LOG_LINES = 12  # of a suite that is broken
# The beginning of a sanitizer's report; it says most, and the test's name is before it.
REPORT = re.compile(r"^.*(=\n==\d+==ERROR: AddressSanitizer|: runtime error): ", re.M)


def progress(result: Result) -> Text:
    what = result.broken or f"{result.ran} of ours ran, {result.failed} failed"
    if others := len(result.upstreams):
        what += f"; {others} of upstream's, {counts(result.upstreams)['failed']} failed"
    line = Text("ok     " if result.ok else "FAILED ", style="green" if result.ok else "red")
    line.append(f"{result.suite}: {what} ({result.seconds:.0f} s)", style="default")
    return line


def table(results: Sequence[Result], own: Sequence[Result] = ()) -> Group:
    """Our tests by suite, upstream's own that the name also selects, skipped files, failures."""
    parts: list = []
    for title, of in (("Our tests", results), ("The operator's own test files", own)):
        if of:
            parts.append(rows(title, [(r, r.ours, r.broken) for r in of]))
    others = [(r, r.upstreams, "") for r in results if r.upstreams]
    if others:
        parts.append(rows("Upstream's own tests of a like name", others))
    skipped = [Text(f"{r.suite}: skipped: {r.lacks}\n") for r in (*results, *own) if r.lacks]
    return Group(*parts, *skipped, *failures([*results, *own]))


def rows(title: str, counted: Sequence[tuple[Result, dict[str, str], str]]) -> Table:
    lines = [
        (result.suite, counts(tests, broken), f"{result.seconds:.1f}")
        for result, tests, broken in counted
    ]
    totals = sum((by for _, by, _ in lines), Counter())
    seconds = sum(result.seconds for result, _, _ in counted)
    grid = new_table(title, show_footer=True)
    grid.add_column("file", footer="total")
    for head, total in zip((*COUNTS, "seconds"), (*numbers(totals), f"{seconds:.1f}"), strict=True):
        grid.add_column(head, footer=total, justify="right")
    for suite, by, took in lines:
        grid.add_row(suite, *numbers(by), took, style="red" if by["failed"] else None)
    return grid


def numbers(by: Mapping[str, int]) -> list[str]:
    return [str(by.get(head, 0)) for head in COUNTS]


def stack_table(record: Record, failed: Collection[str]) -> Table:
    """A line per commit of the stack; those in `failed` did not pass."""
    grid = new_table("Each commit by itself")
    for head in HEADS:
        longest = max(map(len, record.keys)) if head == "commit" else None
        grid.add_column(head, justify="right" if head in NUMBERS else "left", min_width=longest)
    for name, *cells in record.rows():
        if name in failed:
            grid.add_row(name, *("" for _ in cells[1:]), "failed", style="red")
        else:
            grid.add_row(name, *cells)
    return grid


def failures(results: Iterable[Result]) -> Iterator[Text]:
    """A line for each failed test; for a broken suite the reason and a part of its log."""
    for result in results:
        for test, message in sorted(result.messages.items()):
            yield Text(f"{result.suite} {test}: {message}")
        if result.broken:
            text = result.log.read_text(errors="replace").rstrip()
            if report := REPORT.search(text):
                has, part = "has", text[report.start() :].splitlines()[:LOG_LINES]
            else:
                has, part = "ends", text.splitlines()[-LOG_LINES:]
            yield Text(f"{result.suite}: {result.broken}; {result.log} {has}:", style="red")
            yield from (Text(f"  {line}", style="dim") for line in part)


def finish(results: Sequence[Result], status: int = 0) -> int:
    """Prints how many tests passed and failed; an exit status, `status` if none failed."""
    by = tally(results)
    passed = by["passed"] + by["xfailed"]
    console.print(f"{passed} passed, {by['failed']} failed, {by['skipped']} skipped")
    return status if all(r.ok for r in results) else 1


def finish_stack(record: Record, failed: Sequence[str]) -> int:
    """Prints a line per commit, and how many passed; an exit status, 1 if one failed."""
    print_wide(stack_table(record, failed))
    passed = sum(map(record.holds, record.keys))
    left = len(record.keys) - passed - len(failed)
    console.print(f"{passed} commits passed, {len(failed)} failed, {left} are still to be run")
    return 1 if failed else 0
