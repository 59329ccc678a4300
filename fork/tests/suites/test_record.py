"""Tests of stack/results.json, which says which commits passed."""

import json
from dataclasses import replace

import pytest

from fork.errors import ForkError
from fork.overlay import Stack
from fork.suites import record
from fork.suites.record import AGAIN, NEVER, Passed, Record
from fork.suites.results import Result
from fork.tests.conftest import message, write_files

NAMES = ("01-one", "02-two")
ONE = Passed("01-one", {"passed": 3, "xfailed": 1}, {"passed": 2}, 70, "A CPU", "2026-01-02")
TWO = replace(ONE, commit="02-two")


@pytest.fixture
def keys(monkeypatch):
    """Replaces the keys of the commits by these, which a test may change."""
    found = {"01-one": "k1", "02-two": "k2"}
    monkeypatch.setattr(record, "key", lambda stack, commit: found[commit.folder.name])
    return found


@pytest.fixture
def stack(tmp_path):
    files = {f"stack/{name}/commit.md": message([f"docs/{name}.md"]) for name in NAMES}
    return Stack(write_files(tmp_path, files))


def states(stack):
    return [row[-1] for row in Record(stack).rows()]


def test_what_passed_is_kept(stack, keys):
    assert states(stack) == [NEVER, NEVER]
    Record(stack).add(TWO)
    assert states(stack) == [NEVER, "passed"]
    Record(stack).add(ONE)
    rows = list(Record(stack).rows())
    assert rows[0] == ("01-one", "3", "0", "1", "2", "0", "70", "A CPU, 2026-01-02", "passed")
    text = (stack.root / Record.file).read_text(encoding="utf-8")
    assert list(json.loads(text)) == ["k1", "k2"] and len(text.splitlines()) == 4
    Record(stack).add(ONE)
    assert (stack.root / Record.file).read_text(encoding="utf-8") == text


def test_a_commit_that_never_passed_is_taken_for_the_longest(stack, keys):
    assert Record(stack).estimate("02-two") == 0
    Record(stack).add(ONE)
    assert [Record(stack).estimate(name) for name in NAMES] == [70, 70]
    Record(stack).add(replace(TWO, seconds=9))
    assert Record(stack).estimate("02-two") == 9


def test_a_commit_that_changed_is_to_be_run_again(stack, keys):
    for passed in (ONE, TWO):
        Record(stack).add(passed)
    keys["02-two"] = "k3"
    assert states(stack) == ["passed", AGAIN]
    assert Record(stack).last("02-two") == TWO  # which says how long it took
    Record(stack).add(ONE)
    assert set(Record(stack).entries) == {"k1", "k2"}
    Record(stack).add(TWO)
    assert set(Record(stack).entries) == {"k1", "k3"}


def test_a_renamed_commit_keeps_its_entry_and_a_lost_one_does_not(stack, keys):
    for passed in (ONE, TWO):
        Record(stack).add(passed)
    keys |= {"01-one": "k2", "02-two": "k4"}  # what 02-two was is 01-one now; the second is new
    assert states(stack) == ["passed", AGAIN]
    Record(stack).add(replace(TWO, seconds=9))
    assert set(Record(stack).entries) == {"k2", "k4"}


def test_what_makes_the_same_passed(stack, keys):
    Record(stack).add(replace(ONE, made="m1"))
    for name, made, taken in (
        ("02-two", "m2", False),
        ("02-two", "", False),
        ("02-two", "m1", True),
    ):
        assert Record(stack).take(name, made) == taken
    assert states(stack) == ["passed", "passed"]


@pytest.mark.parametrize("text", ["{", "[]", '{"k1": {}}', '{"k1": 3}'])
def test_a_damaged_file_is_one_error(stack, keys, text):
    (stack.root / Record.file).write_text(text, encoding="utf-8")
    with pytest.raises(ForkError, match="stack/results.json: not as"):
        Record(stack)


def test_what_is_kept_of_results():
    results = [Result("a.py", tests={"t1": "passed", "t2": "xfailed", "t3": "passed"})]
    passed = Passed.now("01-one", "m1", results, [], 61.6)
    assert passed.upstream == {"passed": 2, "ran": 3, "xfailed": 1} and passed.own == {}
    assert passed.seconds == 62 and passed.cpu and passed.date.startswith("20")
