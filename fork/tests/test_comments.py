"""The comments in the kernels' sources name only what the code has."""

import re

import pytest

from fork.paths import ROOT

NATIVE = "aten/src/ATen/native"
SOURCES = sorted(
    file.relative_to(ROOT).as_posix()
    for root in (ROOT, *(ROOT / "stack").iterdir())
    for file in (root / NATIVE).rglob("Attn*")
)
MATHS = {"exp", "tanh"}  # functions that formulas name
# A name in a comment: words in backquotes, a call, or a member, which ends with an underscore.
NAMES = re.compile(r"`([^`\n]+)`|\b([a-z]\w*)\(|\b([a-z]\w*_)(?!\w)")


def strangers(text: str) -> set[str]:
    """Returns the names in C++ comments that do not occur in the code."""
    lines = [line.partition("//") for line in text.splitlines()]
    code = set(re.findall(r"\w+", "\n".join(before for before, _, _ in lines)))
    comments = "\n".join(comment for _, _, comment in lines)
    named = {
        name for found in NAMES.findall(comments) for name in re.findall(r"\w+", " ".join(found))
    }
    return {name for name in named if not name.isdigit()} - code - MATHS


@pytest.mark.parametrize("path", SOURCES)
def test_names_in_comments(path):
    assert strangers((ROOT / path).read_text()) == set()


@pytest.mark.parametrize(
    "text, found",
    [
        ("// C = `left` right\nint left;", set()),
        ("// C = `left` right\nint a;", {"left"}),
        ("// fn(i) for i, as tanh(x)\nvoid f(int i);", {"fn"}),
        ("int acc_; // not sums_\n", {"sums_"}),
    ],
)
def test_strangers(text, found):
    assert strangers(text) == found
