"""Tests of what a long run prints: a line that says why it failed, and how far a step is."""

import io
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from fork import console
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
            "WARNING: Retrying (4) after connection broken by 'Late(\"host 'a.org': late\")': /x/\n"
            "ERROR: nothing found",
            "it broke: no network? ERROR: nothing found (Late(\"host 'a.org': late\"))",
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
    assert seen == ["a\n", "b\n"] and (tmp_path / "log").read_text(encoding="utf-8") == "a\nb\n"


def test_a_missing_command(tmp_path):
    with pytest.raises(ForkError, match="it broke: .*nowhere"):
        run(["/nowhere/cc"], tmp_path / "log", "it broke")


def test_steps_are_counted():
    """Step 0 counts too, in which Ninja looks whether CMake must run again."""
    told = []
    steps = NinjaSteps(SimpleNamespace(tell=lambda text, **share: told.append((text, share))))
    for line in ("[0/2] Re-checking", "[1/2] Building x.o", "x.cpp: a warning", "[2/2] Linking"):
        steps(line)
    assert [share for _, share in told] == [{"done": n, "total": 2} for n in (0, 1, 2)]
    assert told[1][0] == "1 of 2: x.o" and str(steps) == "2 steps"
    steps.go_on()
    for line in ("[0/1] Re-checking", "[1/1] Building y.o"):
        steps(line)
    assert told[-1] == ("3 of 3: y.o", {"done": 3, "total": 3}) and str(steps) == "3 steps"


@pytest.fixture
def shown(monkeypatch):
    """Returns a function that runs a step, in a terminal or not, and returns what it printed."""

    out = io.StringIO()

    def show(terminal, body):
        made = Console(file=out, force_terminal=terminal, width=100, highlight=False)
        monkeypatch.setattr(console, "console", made)
        with console.step("make it") as doing:
            body(doing)
        return plain()

    def plain():
        return re.sub(r"\x1b\[[\d;?]*\w", "", out.getvalue())

    show.plain = plain
    return show


def test_a_line_in_a_terminal_shows_the_time_and_what_remains(shown):
    text = shown(True, lambda s: s.tell("3 of 4", done=3, total=4))
    assert re.search(r"make it: 3 of 4\b.*0:00:00 -:--:--", text)


def test_nothing_remains_to_be_shown_where_the_end_is_unknown(shown):
    text = shown(True, lambda s: s.tell("x"))
    assert re.search(r"make it: x.*0:00:00", text) and "-:--:--" not in text


def test_elsewhere_a_step_is_one_plain_line(shown):
    text = shown(False, lambda s: s.tell("3 of 4", done=3, total=4))
    assert re.fullmatch(r"\+ make it \(\d\.\d s\)\n", text)


@pytest.mark.parametrize(
    "told, words",
    [
        ({}, r"make it"),
        ({"text": "[x] of 4"}, r"make it: \[x\] of 4"),
        ({"done": 3, "total": 4}, r"make it"),
    ],
)
def test_a_log_gets_a_line_while_a_step_goes_on(shown, monkeypatch, told, words):
    monkeypatch.setattr(console, "SILENCE", 0.01)

    def body(doing):
        doing.tell(**told)
        while shown.plain().count("\n") < 2:  # waits for two lines
            time.sleep(0.01)

    share = "75%, " if "done" in told else ""
    first, second, *_, last = shown(False, body).splitlines()
    assert re.fullmatch(rf"  {words} \({share}\d+ s\)", second), second
    assert re.fullmatch(r"  make it.* s\)", first)
    assert re.fullmatch(r"\+ make it \(.* s\)", last)


def test_no_line_comes_after_the_end(shown, monkeypatch):
    """The thread that prints ends with the step, even if the step fails."""
    monkeypatch.setattr(console, "SILENCE", 0.01)

    def body(doing):
        while not shown.plain():
            time.sleep(0.01)
        raise ForkError("it broke")

    before = threading.active_count()
    with pytest.raises(ForkError):
        shown(False, body)
    assert shown.plain().splitlines()[-1] == "x make it"
    assert threading.active_count() == before
