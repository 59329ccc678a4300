"""Each lesson runs, its exercise can be solved, and its checker finds the mistakes people make."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import time
from pathlib import Path

import matplotlib
import pytest
import torch
from attempts import RIGHT, WRONG

matplotlib.use("agg")

COURSE = Path(__file__).resolve().parents[1]
LESSONS = sorted(COURSE.glob("[0-9][0-9]_*.py"))
SOLUTIONS = {
    f.stem: runpy.run_path(str(f)) for f in sorted((COURSE / "solutions").glob("*.py"))
}


@functools.cache
def ran(lesson):
    """The names that a lesson defines, and what it prints, run as a script."""
    said, threads = io.StringIO(), torch.get_num_threads()
    state = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.syspath_prepend(str(COURSE))
        names = runpy.run_path(str(COURSE / f"{lesson}.py"), run_name="__main__")
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
    return names, said.getvalue()


class Lesson:
    """The tests of a lesson: a class of its own, so that one worker of pytest runs it once."""

    lesson: str

    def test_it_runs(self):
        _, said = ran(self.lesson)
        said = said.rstrip().splitlines()[-1]
        assert re.match(r"Exercise: (to do\. Fill in `|solved\.)", said), said

    def test_the_solution(self):
        ran(self.lesson)[0]["check"](SOLUTIONS[self.lesson]["solution"])

    def test_a_mistake_is_found(self, mistake):
        """The checker names what is wrong: not just any error in whatever is run first."""
        wanted = SOLUTIONS[self.lesson]["MISTAKES"][mistake]
        with pytest.raises(AssertionError, match=re.escape(wanted)):
            ran(self.lesson)[0]["check"](mistake)

    def test_two_mistakes_at_least(self):
        assert len(SOLUTIONS[self.lesson]["MISTAKES"]) >= 2

    def test_a_wrong_attempt(self, wrong):
        attempt, wanted = WRONG[int(self.lesson[:2])][wrong]
        with pytest.raises(AssertionError, match=re.escape(wanted)):
            ran(self.lesson)[0]["check"](attempt)

    def test_a_right_attempt(self, right):
        ran(self.lesson)[0]["check"](RIGHT[int(self.lesson[:2])][right])


def pytest_generate_tests(metafunc):
    """Of each lesson: its mistakes, and the other attempts at its exercise."""
    names = metafunc.fixturenames
    if "mistake" in names:
        mistakes = SOLUTIONS[metafunc.cls.lesson]["MISTAKES"]
        metafunc.parametrize("mistake", mistakes, ids=lambda mistake: mistake.__name__)
    for name, attempts in (("wrong", WRONG), ("right", RIGHT)):
        if name in names:
            metafunc.parametrize(name, attempts[int(metafunc.cls.lesson[:2])])


@pytest.fixture(autouse=True)
def drawn():
    """The checkers draw their inputs; with SEED in the environment, the same ones again."""
    seed = int(os.environ.get("SEED") or time.time_ns() % 1_000_000)
    print(f"SEED={seed}")
    torch.manual_seed(seed)


for file in reversed(LESSONS):  # the long ones are among the last
    globals()[f"Test_{file.stem}"] = type(
        f"Test_{file.stem}", (Lesson,), {"lesson": file.stem}
    )


def test_numbered_without_a_gap():
    numbers = [int(f.stem[:2]) for f in LESSONS]
    assert numbers == list(range(1, len(LESSONS) + 1))
    assert [f.stem for f in LESSONS] == list(SOLUTIONS)


def test_the_decision_table_has_one_order():
    tables = [
        re.findall(r"^   \* - (in \w+|outside \w+)", file.read_text(), re.M)
        for file in (COURSE / "GALLERY_HEADER.rst", LESSONS[0])
    ]
    assert tables[0] == tables[1] == ["in ATen", "in PyTorch", "outside PyTorch"]


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (lambda: 1, "Exercise: solved."),
        (lambda: 2, "Exercise: not yet. it is 1"),
        (lambda: 1 // 0, "Exercise: not yet. ZeroDivisionError: "),
        (
            lambda: torch.sign(torch.tensor(1j)),
            "Exercise: not yet. NotImplementedError: ",
        ),
    ],
)
def test_what_the_reader_is_told(capsys, monkeypatch, attempt, said):
    monkeypatch.syspath_prepend(str(COURSE))
    from exercise import report

    def check(attempt):
        assert attempt() == 1, "it is 1"

    report(check, attempt)
    assert said in capsys.readouterr().out
