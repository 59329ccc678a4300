"""Shows a user the suites: a line as each ends, tables, and what failed."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fork.console import console, new_table
from fork.suites.results import COUNTS, Result, tally

LOG_LINES = 12  # that are shown of a log
FAILURES = 20  # that are shown of a file: once a GPU is in error, each of its tests fails
# The beginning of what a sanitizer, or a process that a test started and that was killed, has to
# say; it says most, and the test's name is before it.
REPORT = re.compile(
    r"^.*(=\n==\d+==ERROR: AddressSanitizer: |: runtime error: "
    r"|terminate called|SIG\w+\(\d+\), PID)",
    re.M,
)


def progress(result: Result) -> Text:
    what = result.broken or f"{result.counts['ran']} ran, {result.counts['failed']} failed"
    line = Text("ok     " if result.ok else "FAILED ", style="green" if result.ok else "red")
    line.append(f"{result.suite}: {what} ({result.seconds:.0f} s)", style="default")
    return line


def table(results: Sequence[Result], own: Sequence[Result] = ()) -> Group:
    """Upstream's suites, the operators' own test files, skipped files, failures."""
    titles = ("PyTorch's own suites", "The operators' own test files")
    parts = [rows(title, of) for title, of in zip(titles, (results, own), strict=True) if of]
    skipped = [Text(f"{r.suite}: skipped: {r.lacks}\n") for r in (*results, *own) if r.lacks]
    return Group(*parts, *skipped, *failures([*results, *own]))


def rows(title: str, results: Sequence[Result]) -> Table:
    totals, seconds = tally(results), sum(result.seconds for result in results)
    grid = new_table(title, show_footer=True)
    grid.add_column("file", footer="total")
    for head, total in zip((*COUNTS, "seconds"), (*numbers(totals), f"{seconds:.1f}"), strict=True):
        grid.add_column(head, footer=total, justify="right")
    for result in results:
        style = None if result.ok else "red"
        grid.add_row(result.suite, *numbers(result.counts), f"{result.seconds:.1f}", style=style)
    return grid


def numbers(by: Mapping[str, int]) -> list[str]:
    return [str(by.get(head, 0)) for head in COUNTS]


def failures(results: Iterable[Result]) -> Iterator[Text]:
    """A line for each failed test; for a broken suite the reason and a part of its log.

    Of a suite that ran to its end the log is shown only where a process in it was killed.
    """
    for result in results:
        failed = sorted(result.messages.items())
        for test, message in failed[:FAILURES]:
            yield Text(f"{result.suite} {test}: {message}")
        if more := len(failed[FAILURES:]):
            yield Text(f"{result.suite}: {more} more failed: {result.log}")
        if result.ok:
            continue
        text = (
            result.log.read_text(errors="replace", encoding="utf-8").rstrip()
            if result.log.is_file()
            else ""
        )
        if report := REPORT.search(text):
            has, part = "has", text[report.start() :].splitlines()[:LOG_LINES]
        elif result.broken:
            has, part = "ends", text.splitlines()[-LOG_LINES:]
        else:
            continue
        why = result.broken or f"{result.counts['failed']} failed"
        yield Text(f"{result.suite}: {why}; {result.log} {has}:", style="red")
        yield from (Text(f"  {line}", style="dim") for line in part)


def finish(results: Sequence[Result], status: int = 0) -> int:
    """Prints how many tests passed and failed; an exit status, `status` if none failed."""
    by = tally(results)
    passed = by["passed"] + by["xfailed"]
    console.print(f"{passed} passed, {by['failed']} failed, {by['skipped']} skipped")
    return status if all(r.ok for r in results) else 1
