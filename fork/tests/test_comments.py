"""The comments in the kernels' sources name only what the code has."""

import re

import pytest

from fork.overlay import Stack
from fork.paths import ROOT

NATIVE = "aten/src/ATen/native"
KERNEL = f"{NATIVE}/cpu/"
SOURCES = sorted(
    file.relative_to(ROOT).as_posix()
    for root in (ROOT, *(ROOT / "stack").iterdir())
    for file in (root / NATIVE).rglob("Attn*")
)
TEXTS = {path: (ROOT / path).read_text(encoding="utf-8") for path in SOURCES}
MATHS = {"exp", "log", "tanh"}  # functions that formulas name
# A name in a comment: words in backquotes, a call, a member, which ends with an underscore, or a
# constant in capitals.
NAMES = re.compile(r"`([^`\n]+)`|\b([a-z]\w*)\(|\b([a-z]\w*_)(?!\w)|\b([A-Z]+_[A-Z_]+)\b")


def words(text: str) -> set[str]:
    """Returns the words of C++ outside comments."""
    return set(re.findall(r"\w+", re.sub("//.*", "", text)))


def strangers(text: str) -> set[str]:
    """Returns the names in C++ comments that do not occur in the code."""
    code = words(text)
    comments = "\n".join(line.partition("//")[2] for line in text.splitlines())
    named = {
        name for found in NAMES.findall(comments) for name in re.findall(r"\w+", " ".join(found))
    }
    return {name for name in named if not name.isdigit()} - code - MATHS


@pytest.mark.parametrize("path", SOURCES)
def test_names_in_comments(path):
    # A note on all files names constants of the others.
    constants = {name for text in TEXTS.values() for name in words(text) if name.isupper()}
    assert strangers(TEXTS[path]) - constants == set()


@pytest.mark.parametrize(
    "text, found",
    [
        ("// C = `left` right\nint left;", set()),
        ("// C = `left` right\nint a;", {"left"}),
        ("// fn(i) for i, as tanh(x)\nvoid f(int i);", {"fn"}),
        ("int acc_; // not sums_\n", {"sums_"}),
        ("int MAX_ROWS; // at most MAX_ROWS or MAX_COLS\n", {"MAX_COLS"}),
    ],
)
def test_strangers(text, found):
    assert strangers(text) == found


def test_the_notes_name_each_file_of_the_kernel():
    """After each commit that has a note, the notes name each file, and no other."""
    stack, trees = Stack(ROOT), 0
    for commit in stack.commits:
        files = [f for path, f in stack.tree(commit.number).items() if path.startswith(KERNEL)]
        texts = "\n".join(file.read_text(encoding="utf-8") for file in files)
        notes = re.findall(r"^// Note \[Tiles of attn.*\n(?:^//.*\n)+", texts, re.M)
        if notes:
            trees += 1
            named = re.findall(r"\bAttn\w+\.(?:h|cpp)\b", "".join(notes))
            assert {*named} == {file.name for file in files}, commit
    assert trees > 0
