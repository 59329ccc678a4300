"""The series as a table."""

from rich.table import Table

from fork.overlay import Added, Stack

CAPTION = """\
Lines that each commit adds, with comments and empty ones.
Earlier: lines of the versions that it keeps of files which a later commit changes."""


def table(stack: Stack) -> Table:
    """A line per commit: what it adds, and the tests that fail as expected, held and paid."""
    made = Table(box=None, pad_edge=False, show_footer=True)
    made.caption, made.caption_justify = CAPTION, "left"
    each_added = [stack.added(commit) for commit in stack.commits]
    added = sum(each_added, Added())
    earlier = sum(map(stack.earlier, stack.commits))
    made.add_column("commit")
    made.add_column("title", footer="in all")
    counts = {"files": "", "code": added.code, "tests": added.tests, "docs": added.docs}
    counts |= {"earlier": earlier, "xfails held": "", "paid": ""}
    for head, total in counts.items():
        made.add_column(head, justify="right", footer=str(total))
    for commit, added in zip(stack.commits, each_added, strict=True):
        before, after = stack.debts(commit.number - 1), stack.debts(commit.number)
        made.add_row(
            commit.folder.name,
            commit.title,
            str(len(commit.files) + len(commit.removes)),
            *map(str, (added.code, added.tests, added.docs, stack.earlier(commit))),
            str(after.total()),
            str((before - after).total()),
        )
    return made
