"""The series as a table."""

from __future__ import annotations

from rich.table import Table

from fork.overlay import Stack

LEFT = ("commit", "title")
RIGHT = ("files", "lines added", "xfails held", "paid")


def table(stack: Stack) -> Table:
    """A line per commit: what it adds, and the tests that fail as expected, held and paid."""
    made = Table(box=None, pad_edge=False)
    for heads, justify in ((LEFT, "left"), (RIGHT, "right")):
        for head in heads:
            made.add_column(head, justify=justify)
    for commit in stack.commits:
        before, after = stack.debts(commit.number - 1), stack.debts(commit.number)
        made.add_row(
            commit.folder.name,
            commit.title,
            str(len(commit.files) + len(commit.removes)),
            str(stack.lines_added(commit)),
            str(after.total()),
            str((before - after).total()),
        )
    return made
