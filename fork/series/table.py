"""The series as a table."""

from __future__ import annotations

from rich.table import Table

from fork.overlay import Added, Stack

LEFT = ("commit", "title")
RIGHT = ("files", "code", "tests", "docs", "earlier", "xfails held", "paid")
CAPTION = """\
Lines that each commit adds, of code those that are neither empty nor a comment alone.
Earlier: lines of the versions that it keeps of files which a later commit changes."""


def table(stack: Stack) -> Table:
    """A line per commit: what it adds, and the tests that fail as expected, held and paid."""
    made = Table(box=None, pad_edge=False, show_footer=True)
    made.caption, made.caption_justify = CAPTION, "left"
    all_added = sum((stack.added(commit) for commit in stack.commits), Added())
    all_earlier = sum(map(stack.earlier, stack.commits))
    totals = {
        "title": "in all",
        "code": all_added.code,
        "tests": all_added.tests,
        "docs": all_added.docs,
        "earlier": all_earlier,
    }
    for heads, justify in ((LEFT, "left"), (RIGHT, "right")):
        for head in heads:
            made.add_column(head, justify=justify, footer=str(totals.get(head, "")))
    for commit in stack.commits:
        before, after = stack.debts(commit.number - 1), stack.debts(commit.number)
        added = stack.added(commit)
        made.add_row(
            commit.folder.name,
            commit.title,
            str(len(commit.files) + len(commit.removes)),
            *map(str, (added.code, added.tests, added.docs, stack.earlier(commit))),
            str(after.total()),
            str((before - after).total()),
        )
    return made
