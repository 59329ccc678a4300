"""Each lesson, as it is downloaded from the built site, in an empty folder with torch alone."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOWNLOADS = ROOT / "build" / "site" / "_downloads"
LESSONS = sorted(p.stem for p in (ROOT / "course").glob("[0-9][0-9]_*.py"))
CLONE = "This lesson works on the repository: run it in a clone, as course/"
PACKAGES = "This lesson needs more than torch: pip install"

# Runs a file in a Python that has torch, what its wheel requires, and `more`; nothing else.
ALONE = """
import importlib.metadata as metadata, re, runpy, sys, sysconfig
from importlib.machinery import PathFinder
wanted, more, file = ["torch"], sys.argv[2:], sys.argv[1]
for name in wanted:
    try:
        required = metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # of another system
        continue
    names = [re.match(r"[\\w.-]+", r)[0] for r in required if "extra ==" not in r]
    wanted += [n for n in names if n not in wanted]
known = metadata.packages_distributions()
canonical = lambda name: re.sub(r"[-_.]+", "-", name).lower()
wanted = {canonical(name) for name in (*wanted, *more)}
site = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
class Alone:
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        if path is None and top in known and not wanted & {canonical(n) for n in known[top]}:
            path = [p for p in sys.path if p not in site]  # setuptools brings some of its own
        return PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Alone
sys.argv = [file]
runpy.run_path(file, run_name="__main__")
"""


def run(file, *more):
    command = [sys.executable, "-I", "-W", "ignore", "-c", ALONE, file.name, *more]
    return subprocess.run(command, cwd=file.parent, capture_output=True, text=True)


def download(name):
    """A solution has its lesson's name, and is offered too."""
    solution = (ROOT / "course" / "solutions" / name).with_suffix(".py").read_text(encoding="utf-8")
    (found,) = (
        file
        for file in DOWNLOADS.glob(f"*/{name}")
        if file.suffix != ".py" or file.read_text(encoding="utf-8") != solution
    )
    return found


def cells(lesson):
    """The code of each of a notebook's cells."""
    made = json.loads(download(f"{lesson}.ipynb").read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in made if cell["cell_type"] == "code"]


def statements(code):
    return [ast.dump(s) for s in ast.parse(code).body if "__future__" not in ast.unparse(s)]


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_notebook_has_the_statements_of_the_script(lesson):
    wanted = statements(download(f"{lesson}.py").read_text(encoding="utf-8"))[
        1:
    ]  # without the docstring
    assert [s for cell in cells(lesson) for s in statements(cell)] == wanted


@pytest.mark.parametrize("lesson", LESSONS)
def test_what_a_script_adds_is_enough_for_its_imports(tmp_path, lesson):
    """Of the lesson itself only the imports are run: the rest has run for its page."""
    body = ast.parse(download(f"{lesson}.py").read_text(encoding="utf-8")).body
    own = statements((ROOT / "course" / f"{lesson}.py").read_text(encoding="utf-8"))[
        1:
    ]  # without the docstring
    added, rest = body[: -len(own)], body[-len(own) :]
    assert [ast.dump(s) for s in rest] == own
    imports = [s for s in rest if isinstance(s, (ast.Import, ast.ImportFrom))]
    done = run_with_packages(tmp_path, lesson, ast.unparse(ast.Module([*added, *imports], [])))
    # These read and compile the repository's files.
    refused = f"{CLONE}{lesson}.py\n" if lesson.startswith(("10_", "14_", "16_")) else ""
    assert done.stderr == refused


def test_a_script_runs(tmp_path):
    """This one says what it leaves out where there is no clone."""
    code = download("11_cuda.py").read_text(encoding="utf-8")
    ends_with_the_exercise(run_with_packages(tmp_path, "11_cuda", code))


def test_a_notebook_runs(tmp_path):
    """This one begins with a `from __future__ import`, which has to stay in front of its cell."""
    each = (
        f"for cell in {cells('02_graph')!r}:\n    exec(compile(cell, 'a cell', 'exec'), globals())"
    )
    ends_with_the_exercise(run_with_packages(tmp_path, "02_graph", each))


def run_with_packages(folder, lesson, code):
    """Runs it with torch alone, then with the packages that it says it needs."""
    file = folder / f"{lesson}.py"
    file.write_text(code, encoding="utf-8")
    done = run(file)
    if done.stderr.startswith(PACKAGES):
        done = run(file, *done.stderr.removeprefix(PACKAGES).split())
    return done


def ends_with_the_exercise(done):
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().rpartition("\n")[2].startswith("Exercise: to do.")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_zip_has_both(lesson):
    with zipfile.ZipFile(download(f"{lesson}.zip")) as both:
        names = [f"{lesson}.py", f"{lesson}.ipynb"]
        assert both.namelist() == names
        for name in names:
            assert both.read(name) == download(name).read_bytes()


def test_packages_are_really_missing(tmp_path):
    file = tmp_path / "lesson.py"
    file.write_text("import torch, networkx\nimport matplotlib", encoding="utf-8")
    assert "ModuleNotFoundError: No module named 'matplotlib'" in run(file).stderr
