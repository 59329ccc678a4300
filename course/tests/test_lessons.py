"""Each lesson's exercise can be solved, and its checker finds the mistakes people make.

No lesson is run here: `make site` runs each, for its page.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import runpy
import subprocess
import symtable
import sys
import time
from pathlib import Path

import pytest
import torch
from attempts import RIGHT, WRONG

COURSE = Path(__file__).resolve().parents[1]
LESSONS = sorted(COURSE.glob("[0-9][0-9]_*.py"))
SOLUTIONS = {
    f.stem: runpy.run_path(str(f)) for f in sorted((COURSE / "solutions").glob("*.py"))
}
IMPORTED = (COURSE, COURSE / "capabilities", COURSE.parent / "test")  # by lessons


def names(statement):
    """The names that a statement of a module binds, and those that it reads."""
    binds, reads = set(), set()
    tables = [module := symtable.symtable(ast.unparse(statement), "lesson", "exec")]
    for table in tables:
        for symbol in table.get_symbols():
            if table is module and (symbol.is_assigned() or symbol.is_imported()):
                binds.add(symbol.get_name())
            if symbol.is_referenced() and (table is module or symbol.is_global()):
                reads.add(symbol.get_name())
        tables += table.get_children()
    return binds, reads


def needed(lesson, name):
    """The statements that bind `name`, and what these read: no other is to be run."""
    statements = [(s, *names(s)) for s in ast.parse(lesson).body]
    wanted, known = {name, "annotations"}, 0  # of `from __future__ import annotations`
    while len(wanted) > known:
        known = len(wanted)
        wanted.update(*(reads for _, binds, reads in statements if binds & wanted))
    kept = [statement for statement, binds, _ in statements if binds & wanted]
    return ast.Module(kept, type_ignores=[])


@functools.cache
def checker(lesson):
    """The lesson's `check`, made without the rest of the lesson."""
    file = COURSE / f"{lesson}.py"
    found = {"__name__": lesson}
    with pytest.MonkeyPatch.context() as patch:
        for folder in IMPORTED:
            patch.syspath_prepend(str(folder))
        exec(
            compile(
                needed(file.read_text(encoding="utf-8"), "check"), str(file), "exec"
            ),
            found,
        )
    return found["check"]


class Lesson:
    """The tests of a lesson, each in a class of its own."""

    lesson: str

    def test_the_solution(self):
        checker(self.lesson)(SOLUTIONS[self.lesson]["solution"])

    def test_a_mistake_is_found(self, mistake):
        """The checker names what is wrong: not just any error in whatever is run first."""
        wanted = SOLUTIONS[self.lesson]["MISTAKES"][mistake]
        with pytest.raises(AssertionError, match=re.escape(wanted)):
            checker(self.lesson)(mistake)

    def test_two_mistakes_at_least(self):
        assert len(SOLUTIONS[self.lesson]["MISTAKES"]) >= 2

    def test_a_wrong_attempt(self, wrong):
        attempt, wanted = WRONG[int(self.lesson[:2])][wrong]
        with pytest.raises(AssertionError, match=re.escape(wanted)):
            checker(self.lesson)(attempt)

    def test_a_right_attempt(self, right):
        checker(self.lesson)(RIGHT[int(self.lesson[:2])][right])


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


for file in LESSONS:
    globals()[f"Test_{file.stem}"] = type(
        f"Test_{file.stem}", (Lesson,), {"lesson": file.stem}
    )


def test_numbered_without_a_gap():
    numbers = [int(f.stem[:2]) for f in LESSONS]
    assert numbers == list(range(1, len(LESSONS) + 1))
    assert [f.stem for f in LESSONS] == list(SOLUTIONS)


def test_the_decision_table_has_one_order():
    tables = [
        re.findall(
            r"^   \* - (in \w+|outside \w+)", file.read_text(encoding="utf-8"), re.M
        )
        for file in (COURSE / "GALLERY_HEADER.rst", LESSONS[0])
    ]
    assert tables[0] == tables[1] == ["in ATen", "in PyTorch", "outside PyTorch"]


def imports_the_extension(statement):
    return isinstance(statement, (ast.Import, ast.ImportFrom)) and re.match(
        r"(import|from) linear_extension\b", ast.unparse(statement)
    )


TREES = {f.stem: ast.parse(f.read_text(encoding="utf-8")) for f in LESSONS}


@pytest.mark.parametrize(
    "lesson",
    [
        name
        for name, tree in TREES.items()
        if any(map(imports_the_extension, ast.walk(tree)))
    ],
)
def test_the_extension_is_not_installed(lesson):
    """Then its folder, which lies beside the lessons, is found, and has nothing in it."""
    nodes = [*ast.walk(TREES[lesson])]
    tries = [
        s for s in nodes if isinstance(s, ast.Try) and imports_the_extension(s.body[0])
    ]
    guarded = [s for t in tries for s in t.body if imports_the_extension(s)]
    assert len(guarded) == sum(bool(imports_the_extension(s)) for s in nodes)
    code = f"import sys; sys.path[:0] = [{str(COURSE)!r}]\n"
    code += "\n".join(map(ast.unparse, tries))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True
    )
    said = (done.stdout + done.stderr).splitlines()
    assert len(said) == 1 and "linear_extension" in said[0], said


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


def test_what_a_name_needs_is_run_and_no_more():
    lesson = """
import re, os
x = 1
def unused(): return x
def used(y): return y + base
base = [x for x in re.findall("a", "aba")]
print(base)
raise SystemExit
for base in (2, 3): pass
def check(attempt): x = used(attempt)
"""
    kept = [ast.unparse(s).partition("\n")[0] for s in needed(lesson, "check").body]
    assert kept == [
        "import re, os",
        "def used(y):",
        "base = [x for x in re.findall('a', 'aba')]",
        "for base in (2, 3):",
        "def check(attempt):",
    ]


def test_plots_are_legible_on_a_telephone():
    """An inch of a plot is 100 pixels of its page: letters shrink by no more than a third."""
    for file in LESSONS:
        widths = re.findall(r"figsize=\((\d+),", file.read_text(encoding="utf-8"))
        assert widths and all(int(width) <= 5 for width in widths), file.name
