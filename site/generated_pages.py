"""The pages made of what is here: commits, what passed, releases, notes, capabilities."""

from __future__ import annotations

import difflib
import html
import shutil
from collections.abc import Sequence
from pathlib import Path

import capability_table

from commands.bench import figures
from commands.ci import read_record
from fork.overlay import RELEASES, Commit, Stack
from fork.suites import Record, ReleasesRecord

ROOT = Path(__file__).resolve().parent.parent
NOTES = (
    "attn.md",
    "attn_operator.md",
    "attn_output.md",
)  # of docs/source/notes, the place that docstrings refer to
FENCE = "`" * 12  # longer than any in the overlay
# What the note refers to in PyTorch's own documentation, where these are pages beside it.
DOCUMENTATION = "https://docs.pytorch.org/docs/stable"
ELSEWHERE = {
    "{doc}`gradcheck`": f"[Gradcheck mechanics]({DOCUMENTATION}/notes/gradcheck.html)",
    "{ref}`complex_autograd-doc`": f"[Autograd mechanics]({DOCUMENTATION}/notes/autograd.html)",
}


def diff(stack: Stack, commit: Commit, path: str) -> list[str]:
    """The lines of a unified diff: what `commit` makes of the overlay's file `path`."""
    before, after = stack.tree(commit.number - 1), stack.tree(commit.number)
    sides = ((f"a/{path}", before), (f"b/{path}", after))
    texts = [
        tree[path].read_text(encoding="utf-8").splitlines() if path in tree else []
        for _, tree in sides
    ]
    names = [name if path in tree else "/dev/null" for name, tree in sides]
    return list(difflib.unified_diff(*texts, *names, lineterm=""))


def commit_page(stack: Stack, commit: Commit) -> str:
    """A commit as a page: its message, and the diff of each of its files."""
    parts = [f"# {commit.number}. {commit.title}", commit.body.strip(), "## Files"]
    for path in sorted({*commit.files, *commit.removes}):
        lines = diff(stack, commit, path)
        added, removed = (sum(line.startswith(sign) for line in lines[2:]) for sign in "+-")
        counts = f"+{added}" + (f" −{removed}" if removed else "")
        summary = f"<summary>{html.escape(path)} {counts}</summary>"
        body = "\n".join([f"{FENCE}diff", *lines, FENCE])
        parts.append(f"<details>{summary}\n\n{body}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; a column of numbers is on the right."""
    columns = zip(*rows, strict=True)
    sides = ["---:" if any(map(str.isdigit, column)) else "---" for column in columns]
    return [f"| {' | '.join(row)} |" for row in (heads, sides, *rows)]


def series_page(stack: Stack) -> str:
    """A line per commit, and the toctree of their pages."""
    rows = []
    for commit in stack.commits:
        added = stack.added(commit)
        rows.append(
            (
                f"[{commit.number}](stack/{commit.folder.name}.md)",
                commit.title,
                str(len(commit.files) + len(commit.removes)),
                *map(str, (added.code, added.tests, added.docs)),
                str(stack.debts(commit.number).total()),
            )
        )
    heads = ("commit", "what it does", "files", "code", "tests", "docs", "xfails held")
    pages = [f"stack/{commit.folder.name}" for commit in stack.commits]
    toctree = ["```{toctree}", ":hidden:", "", *pages, "```"]
    return "\n".join(["# The commits", "", *table(heads, rows), "", *toctree, ""])


def results_table(stack: Stack) -> str:
    """What passed on each commit, and which commits have changed since."""
    rows = [
        (f"[{name}](generated/stack/{name}.md)", *cells) for name, *cells in Record(stack).rows()
    ]
    return "\n".join(table(Record.heads, rows)) + "\n"


def figures_table() -> str:
    """Which machine and which kernel the published figures are of."""
    rows = [(f"`{path}`", *others) for path, *others in figures()]
    return "\n".join(table(("figures", "measured on", "of which kernel"), rows)) + "\n"


def bars() -> str:
    """The line below the first page's bars: what they are of, and whether it is today's kernel."""
    (machine, state), *_ = (
        others for path, *others in figures() if path.endswith("/cpu-lengths.md")
    )
    today = state == "this one"
    kernel = (
        "today's kernel" if today else state.replace("one", "kernel") + ": it has changed since"
    )
    return f"Measured on {machine}, of {kernel}. [](lengths.md) has other lengths.\n"


def dearest_table() -> str:
    """The ten test files that take CI longest, by its record."""
    stages = read_record().items()
    files = [(seconds, file, name) for name, of in stages for file, seconds in of.files.items()]
    rows = [(f"`{file}`", name, f"{seconds:.0f}") for seconds, file, name in sorted(files)[:-11:-1]]
    return "\n".join(table(("test file", "stage", "seconds"), rows)) + "\n"


def releases_table(stack: Stack) -> str:
    """What each release is used for, and what passed on it with each Python."""
    record, rows = ReleasesRecord(stack), []
    for entry in RELEASES:
        words = ["the default"] if entry.get("default") else []
        words += ["PyTorch's own suites"] if entry.get("suites") else []
        tried = [cells for cells in record.rows() if cells[0].split()[0] == entry["torch"]]
        for name, *cells in tried or [(entry["torch"], *("" for _ in record.heads[1:]))]:
            rows.append((name, ", ".join(words), *cells))
    first, *others = record.heads
    return "\n".join(table((first, "used for", *others), rows)) + "\n"


def note(name: str) -> str:
    """A note, with links for what it refers to in the documentation it is a part of."""
    text = (ROOT / "docs/source/notes" / name).read_text(encoding="utf-8")
    for reference, link in ELSEWHERE.items():
        text = text.replace(reference, link)
    return text


def write_pages(source: Path) -> None:
    """Writes them below `source`, in folders that hold nothing else."""
    stack = Stack(ROOT)
    pages = {f"generated/stack/{c.folder.name}.md": commit_page(stack, c) for c in stack.commits}
    pages["generated/series.md"] = series_page(stack)
    pages["generated/results-table.inc"] = results_table(stack)
    pages["generated/dearest-table.inc"] = dearest_table()
    pages["generated/figures-table.inc"] = figures_table()
    pages["generated/bars.inc"] = bars()
    pages["generated/releases-table.inc"] = releases_table(stack)
    pages |= capability_table.pages()
    pages |= {f"notes/{name}": note(name) for name in NOTES}
    for folder in ("generated", "notes"):
        shutil.rmtree(source / folder, ignore_errors=True)
    for name, text in pages.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, encoding="utf-8")


def setup(app) -> dict:
    """Called by Sphinx: writes the pages before it looks for them."""
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir)))
    return {"parallel_read_safe": True}
