"""Upstream's own linters, run by upstream's lintrunner on what the stack adds."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

from fork.console import run
from fork.errors import ForkError
from fork.project import tomllib
from fork.series.git import Git

# Linters that are not run -> what they would need.
LEFT_OUT = {
    "ACTIONLINT": "a program that it downloads",
    "BAZEL_LINTER": "a program that it downloads",
    "CLANGTIDY": "a program that it downloads, and a build",
    "MYPY": "a build",
    "MYPYSTRICT": "a build",
    "TESTOWNERS": "GitHub's list of labels",
}
LINTRUNNER = "lintrunner==0.13.1"


@dataclass(frozen=True)
class Lint:
    """A linter's message on a line that the stack adds."""

    path: str
    line: int
    code: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.code} {self.name}: {self.text}"


def requirements(tree: Path) -> list[str]:
    """Returns what `lintrunner init` would install with pip, and the same clang-format."""
    config = _config(tree)
    found = {LINTRUNNER}
    for linter in config:
        command = linter.get("init_command", [])
        if linter["code"] not in LEFT_OUT and any("pip_init" in word for word in command):
            found.update(word for word in command[2:] if re.match(r"[\w.-]+==", word))
    binaries = tree / "tools" / "linter" / "adapters" / "s3_init_config.json"
    if binaries.is_file():
        url = (
            json.loads(binaries.read_text(encoding="utf-8"))
            .get("clang-format", {})
            .get("Linux", {})
        )
        if version := re.search(r"/(\d+\.\d+\.\d+)/clang-format$", url.get("download_url", "")):
            found.add(f"clang-format=={version[1]}")
    return sorted(found)


def _config(tree: Path) -> list[dict]:
    try:
        return tomllib.loads((tree / ".lintrunner.toml").read_text(encoding="utf-8"))["linter"]
    except OSError:
        raise ForkError(f"{tree}: has no .lintrunner.toml: not a whole checkout?") from None


def lint(tree: Path, base: str, before: str, venv: Path, log: Path) -> list[Lint]:
    """Runs upstream's linters on the files in `tree` that differ from the commit `before`.

    Returns their messages on lines that the commit `base` does not have.
    """
    tools = venv.resolve() / "bin"
    place = tree / ".lintbin" / "clang-format"  # upstream downloads it to this place
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(tools / "clang-format")
    known = {linter["code"] for linter in _config(tree)}
    skip = ",".join(sorted(known & LEFT_OUT.keys()))
    command = [tools / "lintrunner", "--merge-base-with", before, "--output=json", f"--skip={skip}"]
    lines: list[str] = []
    # The linters call `python3` by its name.
    env = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    try:
        run(command, log, "lintrunner", line=lines.append, cwd=tree, env=env)
    except ForkError:
        if not any(line.startswith("{") for line in lines):  # it also fails if it finds something
            raise
    said = [json.loads(line) for line in lines if line.startswith("{")]
    added = added_lines(Git(tree), base)
    return sorted({found for lint in said for found in ours(lint, tree, added)}, key=str)


def added_lines(git: Git, base: str) -> dict[str, set[int]]:
    """Path -> the numbers of the lines that HEAD adds to `base`."""
    found: dict[str, set[int]] = {}
    diff = git("diff-tree", "-r", "--patch", "--unified=0", "--no-prefix", base, "HEAD")
    for line in diff.splitlines():
        if line.startswith("+++ "):
            lines = found.setdefault(line[4:].rstrip("\t"), set())
        elif hunk := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(hunk[1]), int(hunk[2] or 1)
            lines.update(range(start, start + count))
    return found


def ours(lint: Mapping, tree: Path, added: Mapping[str, Set[int]]) -> Iterator[Lint]:
    """Yields the lint if it is on our lines; a format's once for each place that would change."""
    if not lint["path"]:
        raise ForkError(f"{lint['code']}: {' '.join((lint['description'] or '').split())[:300]}")
    path = Path(lint["path"])
    path = path.relative_to(tree).as_posix() if path.is_absolute() else path.as_posix()
    mine = added.get(path, set())
    text = (lint["description"] or "").splitlines()
    about = Lint(path, lint["line"] or 0, lint["code"], lint["name"], text[0] if text else "")
    if lint.get("original") is None:
        if about.line in mine or not about.line:
            yield about
        return
    old, new = (lint[key].splitlines() for key in ("original", "replacement"))
    changes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    for tag, start, end, begin, stop in changes:
        lines = range(start + 1, end + 1) if start < end else {start}
        if tag != "equal" and mine.intersection(lines):
            yield replace(about, line=start + 1, text=f"should be {new[begin:stop]}")
