"""The form of all files of this clone: ruff, clang-format, mdformat, yamllint."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from fork import paths
from fork.overlay import BUILT, files_under, is_edit

# Files that go to PyTorch have its line width.
UPSTREAMS = ("benchmarks/", "functorch/", "stack/", "test/", "tools/", "torch/")
GENERATED = ("bench/published/", "site/course/", "site/generated/", "site/notes/")
COMMIT = "/commit.md"  # Git's readers have narrow windows
CPP = (".cpp", ".cu", ".cuh", ".h", ".hpp")


def lint(root: Path, fix: bool) -> bool:
    """Returns True if all files are in form; with `fix`, the tools first change what they can."""
    ours = [f for f in files_under(root, skip=BUILT) if not f.startswith(GENERATED)]
    jobs = commands(ours, fix, Path(sys.executable).parent)
    failed = [c for c in jobs if subprocess.run(c, cwd=root).returncode]
    return not failed


def put_in_form(root: Path, files: Iterable[str]) -> None:
    """Changes these files as `lint` would, in silence, if this Python or .venv has the tools."""
    places = (Path(sys.executable).parent, paths.VENV / "bin")
    if tools := next((place for place in places if (place / "ruff").exists()), None):
        for command in commands(files, True, tools):
            subprocess.run(command, cwd=root, capture_output=True)


def commands(ours: Iterable[str], fix: bool, tools: Path) -> list[list[str | Path]]:
    """Returns what is to be run in the repository's folder for the form of these of its files."""
    ruff, clang_format, yamllint = (tools / t for t in ("ruff", "clang-format", "yamllint"))
    # Edits are fragments of upstream's files, and keep the indentation of their place.
    whole = [f for f in ours if not is_edit(f)]
    python = [f for f in whole if f.endswith(".py")]
    upstreams = [f for f in python if f.startswith(UPSTREAMS)]
    cpp = [f for f in whole if f.endswith(CPP)]
    markdown = [f for f in whole if f.endswith(".md")]
    messages = [f for f in markdown if f.endswith(COMMIT)]
    pages = sorted({*markdown} - {*messages})
    dry = [] if fix else ["--check"]
    mdformat = [tools / "mdformat", "--number", "--compact-tables", *dry]
    jobs = (
        ([ruff, "check", *(["--fix"] if fix else [])], python),
        ([ruff, "format", *dry], sorted({*python} - {*upstreams})),
        ([ruff, "format", *dry, "--line-length", "88"], upstreams),
        ([clang_format, *(["-i"] if fix else ["--dry-run", "--Werror"])], cpp),
        ([*mdformat, "--wrap", "72"], messages),
        ([*mdformat, "--wrap", "100"], pages),
        ([yamllint, "--strict"], [f for f in ours if f.endswith(".yaml")]),
    )
    return [[*command, *files] for command, files in jobs if files]
