"""Upstream's Sphinx, with upstream's settings, on the pages that the stack touches."""

import os
import re
import shutil
import sysconfig
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from fork.console import run
from fork.errors import ForkError
from fork.overlay import write
from fork.series.linters import Lint

SOURCE = "docs/source"
# Upstream needs these for pages that are not built here.
UNUSED = re.compile(r"(tensorboard|python-etcd)\b")
INDEX = "index\n=====\n\n.. toctree::\n    :glob:\n\n    *\n    notes/*\n"
WARNING = re.compile(
    r"(?P<path>.*?):(?:docstring of (?P<object>[\w.]+):)?(?P<line>\d+):.*?WARNING: (?P<text>.*)"
)
IMPORT = re.compile(r"WARNING: \[autosummary\] failed to import (?P<object>[\w.]+?)\.?$")
ADD_DOCSTR = re.compile(r"add_docstr\(\s*torch\.(\w+)")


def requirements(tree: Path) -> list[str]:
    """Returns what upstream's docs/requirements.txt asks for; of its theme, PyPI's version."""
    try:
        lines = (tree / "docs" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        raise ForkError(f"{tree}: has no docs/requirements.txt: not a whole checkout?") from None
    wanted = (line.partition("#")[0].strip() for line in lines if not line.startswith("-e "))
    return [
        "pytorch_sphinx_theme==0.0.19",
        *(line for line in wanted if line and not UNUSED.match(line)),
    ]


def lint(tree: Path, added: Mapping[str, Set[int]], venv: Path, folder: Path) -> list[Lint]:
    """Runs Sphinx; returns its warnings on lines that the stack adds, and on docstrings in these.

    Upstream builds its documentation with `-W`: each of these would stop it. Docstrings are those
    of the torch that runs this; `folder` is for Sphinx alone.
    """
    shutil.rmtree(folder, ignore_errors=True)
    pages = folder / "pages"
    # All notes are built, because they refer to one another.
    shutil.copytree(tree / SOURCE / "notes", pages / "notes")
    touched = [path for path in added if path.startswith(f"{SOURCE}/")]
    write({p.removeprefix(f"{SOURCE}/"): (tree / p).read_bytes() for p in touched}, pages)
    (pages / "index.rst").write_text(INDEX, encoding="utf-8")
    said = folder / "warnings"
    settings = {"master_doc": "index", "katex_prerender": 0, "intersphinx_timeout": 5}
    command = [
        *(venv.resolve() / "bin" / "python", "-P", "-m", "sphinx", "-q", "-b", "dummy"),
        *("-c", tree.resolve() / SOURCE, "-w", said),
        *(f"-D{key}={value}" for key, value in settings.items()),
        *(pages, folder / "out"),
    ]
    env = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    run(command, folder / "sphinx.log", "Sphinx", env=env)
    docstrings = (tree / "torch" / "_torch_docs.py").read_text(encoding="utf-8")
    made = {page.stem for page in (pages / "generated").glob("*.rst")}
    return [
        *ours(said.read_text(encoding="utf-8").splitlines(), pages, tree, added),
        *undocumented(docstrings, added.get("torch/_torch_docs.py", set()), made),
    ]


def ours(
    warnings: Iterable[str], pages: Path, tree: Path, added: Mapping[str, Set[int]]
) -> list[Lint]:
    """Keeps of Sphinx's `warnings` those on added lines, or on the objects that these list."""
    listed = {
        line.strip()
        for path, numbers in added.items()
        if path.startswith(f"{SOURCE}/") and path.endswith(".rst")
        for number, line in enumerate((tree / path).read_text(encoding="utf-8").splitlines(), 1)
        if number in numbers
    }
    found = []
    for text in warnings:
        if missing := IMPORT.search(text):
            if missing["object"].rpartition(".")[2] in listed:
                found.append(Lint(missing["object"], 0, "SPHINX", "autosummary", "is not in torch"))
            continue
        if not (parts := WARNING.match(text)):
            continue
        line, about = int(parts["line"]), parts["object"]
        if about:
            if about.rpartition(".")[2] in listed:
                found.append(
                    Lint(f"docstring of {about}", line, "SPHINX", "warning", parts["text"])
                )
        elif (page := Path(parts["path"])).is_relative_to(pages):
            path = f"{SOURCE}/{page.relative_to(pages).as_posix()}"
            if line in added.get(path, set()):
                found.append(Lint(path, line, "SPHINX", "warning", parts["text"]))
    return found


def undocumented(text: str, added: Set[int], pages: Set[str]) -> list[Lint]:
    """Finds functions that get a docstring in torch/_torch_docs.py, but are on no page."""
    lines = text.splitlines()
    return [
        Lint("torch/_torch_docs.py", number, "SPHINX", "coverage", f"no page lists torch.{name}")
        for number in sorted(added)
        if (found := ADD_DOCSTR.match("\n".join(lines[number - 1 : number + 1])))
        and (name := found[1])
        and f"torch.{name}" not in pages
    ]
