"""A failing command's log becomes one line that says why."""

import sys
from types import SimpleNamespace

import pytest

from fork.console import NinjaSteps, run
from fork.errors import ForkError


@pytest.mark.parametrize(
    "printed, words",
    [
        ("all well\nlast words", "it broke: last words"),
        (
            "x.cpp:1: error: no such name\nninja: build stopped",
            "it broke: x.cpp:1: error: no such name",
        ),
        ("ERROR: nothing found\n\nnotice", "it broke: ERROR: nothing found"),
        (
            "WARNING: Retrying (4)\nERROR: nothing found",
            "it broke: no network? ERROR: nothing found",
        ),
        (
            "CMake Error at a:4:\n  no compiler\n  set CXX\nmore",
            "CMake Error at a:4: no compiler set CXX",
        ),
        ("", "it broke: exit status 3"),
    ],
)
def test_the_cause(tmp_path, printed, words):
    code = f"print({printed!r}); raise SystemExit(3)"
    with pytest.raises(ForkError) as e:
        run([sys.executable, "-c", code], tmp_path / "log", "it broke")
    assert words in str(e.value) and str(tmp_path / "log") in str(e.value)
    assert "\n" not in str(e.value)


def test_lines_are_seen_and_kept(tmp_path):
    seen = []
    run([sys.executable, "-c", "print('a\\nb')"], tmp_path / "log", "it broke", line=seen.append)
    assert seen == ["a\n", "b\n"] and (tmp_path / "log").read_text() == "a\nb\n"


def test_a_missing_command(tmp_path):
    with pytest.raises(ForkError, match="it broke: .*nowhere"):
        run(["/nowhere/cc"], tmp_path / "log", "it broke")


def test_steps_are_counted():
    """From Ninja's step 0 on, which looks whether CMake must run again."""
    told = []
    steps = NinjaSteps(SimpleNamespace(tell=told.append))
    for line in ("[0/2] Re-checking", "[1/2] Building x.o", "x.cpp: a warning", "[2/2] Linking"):
        steps(line)
    assert [t.partition(",")[0] for t in told] == [f"compile {n} of 2" for n in (0, 1, 2)]
    assert str(steps) == "2 steps"
