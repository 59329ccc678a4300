"""Lessons as they are downloaded: each carries what it imports from the repository.

sphinx-gallery offers a lesson as .py, as .ipynb and as a .zip of both. It writes them below
site/course; this goes over them before Sphinx copies them.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CARRIED = "carried"  # the tag of the notebook's cell
# Module -> its file. Of attn_function only what is before its checks is imported by a lesson.
MODULES = {
    "exercise": ROOT / "course" / "exercise.py",
    "drawing": ROOT / "course" / "drawing.py",
    "attn_function": ROOT / "test" / "attn_function.py",
}
CHECKS = "\n\n# The rest checks the above."
# A lesson with such a line needs these packages besides torch.
PACKAGES = {
    r"^import numpy": ("numpy",),
    r"^from torch\.testing\._internal": ("expecttest", "numpy"),
}
NEEDS_A_CLONE = "You need a clone of this repository"

PACKAGES_FIRST = """\
from importlib.util import find_spec

if missing := [name for name in {packages} if find_spec(name) is None]:
    raise SystemExit("This lesson needs more than torch: pip install " + " ".join(missing))
"""
CLONE_FIRST = """\
raise SystemExit("This lesson works on the repository: run it in a clone, as course/{name}")
"""
MODULES_FIRST = """\
# The lesson imports these modules, which are the repository's, from its folder course/.
import sys
import types
from pathlib import Path

for name, text in {{
{modules}}}.items():
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = str(Path.cwd() / "course" / f"{{name}}.py")
    exec(compile(text, f"{{name}}.py", "exec"), module.__dict__)
"""


def carried(name: str, lesson: str) -> str:
    """The lines that have to come before those of the lesson `name`."""
    if NEEDS_A_CLONE in " ".join(lesson.split()):
        return CLONE_FIRST.format(name=name)
    packages = {p for line, some in PACKAGES.items() if re.search(line, lesson, re.M) for p in some}
    modules = ""
    for module, file in MODULES.items():
        if re.search(rf"^from {module} import", lesson, re.M):
            text = file.read_text(encoding="utf-8").partition(CHECKS)[0].rstrip()
            if "'''" in text:
                raise ValueError(f"{file}: it cannot be quoted")
            modules += f"    \"{module}\": r'''{text}\n''',\n"
    first = PACKAGES_FIRST.format(packages=sorted(packages)) + "\n" if packages else ""
    return first + MODULES_FIRST.format(modules=modules)


def script(name: str, lesson: str) -> str:
    """The lesson with what it imports; a `from __future__ import` has to stay in front."""
    front = ast.parse(lesson).body[:2]
    if not (isinstance(front[1], ast.ImportFrom) and front[1].module == "__future__"):
        front.pop()
    lines = lesson.splitlines(keepends=True)
    end = front[-1].end_lineno
    return "".join([*lines[:end], "\n", carried(name, lesson), *lines[end:]])


def notebook(name: str, lesson: str, made: dict) -> dict:
    """The notebook with the same in a cell of its own, before the others."""
    cells = [c for c in made["cells"] if CARRIED not in c["metadata"].get("tags", ())]
    first = {"cell_type": "code", "execution_count": None, "outputs": []}
    first |= {"metadata": {"tags": [CARRIED]}, "source": [carried(name, lesson)]}
    return made | {"cells": [first, *cells]}


def write(folder: Path) -> None:
    """Goes over the downloads that sphinx-gallery has written in `folder`."""
    for lesson in sorted((ROOT / "course").glob("[0-9][0-9]_*.py")):
        text, target = lesson.read_text(encoding="utf-8"), folder / lesson.name
        target.write_text(script(lesson.name, text), encoding="utf-8")
        beside = target.with_suffix(".ipynb")
        beside.write_text(
            json.dumps(notebook(lesson.name, text, json.loads(beside.read_text(encoding="utf-8")))),
            encoding="utf-8",
        )
        with zipfile.ZipFile(target.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as both:
            for file in (target, beside):
                both.write(file, file.name)


def setup(app) -> dict:
    """Called by Sphinx: after sphinx-gallery, which has a priority of 500."""
    app.connect("builder-inited", lambda app: write(Path(app.srcdir) / "course"), priority=900)
    return {"parallel_read_safe": True}
