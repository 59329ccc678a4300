"""The stack: the overlay as an ordered series of commits, each one a folder `stack/NN-name/`."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

import yaml

from fork.errors import ForkError
from fork.overlay.edit import is_edit
from fork.project import PROJECT

# These root folders are ours, not PyTorch's; all other folders belong to the overlay.
BUILT = {"build", "dist", "test-reports"}  # by some run; git ignores them
OURS = {"bench", "commands", "course", "extension", "fork", "site", "stack", *BUILT}
# The edits of the two files that PyTorch's code generator reads.
NATIVE = "aten/src/ATen/native/native_functions.edit.yaml"
DERIVATIVES = "tools/autograd/derivatives.edit.yaml"
FOLDER = re.compile(r"^(\d\d)-[a-z0-9]+(?:-[a-z0-9]+)*$")
SECTIONS = ("Why", "Review order", "Test plan")
# A real commit has such a line: it names the folder here, whatever becomes of the title.
TRAILER = "Stack-commit"
# Any trailer of a message: a key of a word or more, and a value.
IS_TRAILER = re.compile(r"[A-Za-z0-9-]+(?: [A-Za-z0-9-]+)*: \S.*")
PATCH_BEGINS = re.compile(r"^(---|diff -|Index: ).*", re.M)
# PyTorch's tests mark what does not pass by these words; skipIf and skipUnless are no debt.
DEBT = re.compile(r"\bunittest\.(expectedFailure|skip)\b|\b(xfail|skip)\(")
KEYS = {"files": "paths", "removes": "paths", "trailers": "lines"}  # of a commit.md: lists
MOST_CODE = 900  # lines that a reviewer takes at once
LITTER = re.compile(r"__pycache__|\..*|.*\.egg-info|.*\.pyc")


def files_under(folder: Path, skip: Set[str] = frozenset()) -> list[str]:
    """Returns the files below `folder`, as sorted relative paths, without caches and hidden ones.

    The folders named in `skip`, right below `folder`, are left out.
    """
    found = []
    for base, folders, names in os.walk(folder):
        here = Path(base).relative_to(folder)
        out = skip if here == Path() else frozenset()
        folders[:] = [f for f in folders if f not in out and not LITTER.fullmatch(f)]
        found += [(here / name).as_posix() for name in names if not LITTER.fullmatch(name)]
    return sorted(found)


def operators(native: Path) -> list[str]:
    """Returns the public operators that a version of the overlay's NATIVE declares."""
    text = native.read_text(encoding="utf-8") if native.is_file() else ""
    return re.findall(r"^- func: ([a-z]\w*)[.(]", text, re.M)


@dataclass(frozen=True)
class Added:
    """Lines that a commit adds, with comments and empty ones."""

    code: int = 0
    tests: int = 0
    docs: int = 0

    def __add__(self, other: Added) -> Added:
        return Added(self.code + other.code, self.tests + other.tests, self.docs + other.docs)


def kind_of(path: str) -> str:
    """Returns what the lines of a file of the overlay are: the name of one of Added's counts."""
    if path.startswith(("test/", "torch/testing/")):
        return "tests"
    if path.startswith("docs/") or path.endswith("_docs.edit.py"):
        return "docs"
    return "code"


def _quoted(line: str) -> str:
    """Makes a string of YAML, in the quotes that mdformat prefers."""
    return json.dumps(line, ensure_ascii=False) if "'" in line else f"'{line}'"


@dataclass(frozen=True)
class Commit:
    """One commit of the series: what `stack/NN-name/commit.md` says."""

    number: int
    folder: Path
    title: str
    body: str
    files: tuple[str, ...]
    removes: tuple[str, ...]
    trailers: tuple[str, ...] = ()  # what stands beside TRAILER, such as `Signed-off-by: NAME`

    @property
    def name(self) -> str:
        """Returns the folder's name without the number."""
        return self.folder.name.partition("-")[2]

    def __str__(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    @classmethod
    def load(cls, folder: Path) -> Commit:
        named = FOLDER.match(folder.name)
        if not named:
            raise ForkError(f"{folder}: a commit's folder is called NN-name")
        message = folder / "commit.md"
        try:
            text = message.read_text(encoding="utf-8")
        except OSError:
            raise ForkError(f"{folder}: has no commit.md") from None
        parts = re.match(r"---\n(.*?)---\n+# (.+?)\n+(.*)", text, re.S)
        if not parts:
            raise ForkError(
                f"{message}: wants front matter between '---', then '# title', then text"
            )
        try:
            front = yaml.safe_load(parts[1]) or {}
        except yaml.YAMLError as e:
            raise ForkError(f"{message}: front matter: {' '.join(str(e).split())}") from None
        if not isinstance(front, dict) or set(front) - {*KEYS}:
            raise ForkError(f"{message}: front matter has the keys {', '.join(KEYS)}, no other")
        lists = {}
        for key, what in KEYS.items():
            value = front.get(key) or []
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                raise ForkError(f"{message}: '{key}' is a list of {what}")
            if key == "trailers":
                if not all(map(IS_TRAILER.fullmatch, value)):
                    raise ForkError(f"{message}: each of the 'trailers' is a line 'Key: value'")
            elif value != sorted(set(value)):
                raise ForkError(f"{message}: '{key}' is sorted, and names each path once")
            lists[key] = tuple(value)
        return cls(int(named[1]), folder, parts[2].strip(), parts[3], **lists)

    def kept(self) -> list[str]:
        """Returns the files of which this commit's folder has a version: a later commit changes
        them again."""
        return [path for path in files_under(self.folder) if path != "commit.md"]

    def text(self) -> str:
        """Returns the text of commit.md, which `load` reads."""
        front = "".join(
            f"{key}:\n" + "".join(f"  - {line}\n" for line in lines)
            for key, lines in (
                ("files", self.files),
                ("removes", self.removes),
                ("trailers", [*map(_quoted, self.trailers)]),
            )
            if lines
        )
        return f"---\n{front}---\n\n# {self.title}\n\n{self.body}"

    def subject(self, of: int) -> str:
        return f"[{PROJECT} {self.number}/{of}] {self.title}"

    def message(self, of: int) -> str:
        """Returns the real commit's message in a series of `of`; `absorb` reads it back."""
        why, *others = (self.section(title) for title in SECTIONS)
        parts = [self.subject(of), why]
        parts += [f"{t}:\n\n{text}" for t, text in zip(SECTIONS[1:], others, strict=True)]
        trailers = "\n".join([f"{TRAILER}: {self.folder.name}", *self.trailers])
        return "\n\n".join([*parts, trailers]) + "\n"

    def section(self, title: str) -> str:
        found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", self.body, re.S | re.M)
        return found[1].rstrip().lstrip("\n") if found else ""


class Stack:
    """The series of the repository at `root`."""

    def __init__(self, root: Path):
        self.root = root
        folder = root / "stack"
        if not folder.is_dir():
            raise ForkError(f"{root}: has no stack/ folder; is it a clone of this repository?")
        self.commits = [Commit.load(f) for f in sorted(folder.iterdir()) if f.is_dir()]
        numbers = [c.number for c in self.commits]
        if not numbers or numbers != list(range(1, len(numbers) + 1)):
            raise ForkError(
                f"stack/: commits are numbered 01, 02, ... without a gap, not {numbers}"
            )

    def commit(self, number: int) -> Commit:
        if not 1 <= number <= len(self.commits):
            raise ForkError(f"commit {number}: the stack has commits 1 to {len(self.commits)}")
        return self.commits[number - 1]

    def file(self, commit: Commit, path: str) -> Path:
        """Returns the version of `path` that `commit` has: its own, or the last, at the root."""
        own = commit.folder / path
        return own if own.is_file() else self.root / path

    def tree(self, number: int | None = None) -> dict[str, Path]:
        """Returns overlay path -> file, after commits 1 to `number` (default: the tip)."""
        if number:
            self.commit(number)  # an error if there is none
        tree: dict[str, Path] = {}
        for commit in self.commits[:number]:
            for path in commit.removes:
                tree.pop(path, None)
            for path in commit.files:
                tree[path] = self.file(commit, path)
        return tree

    def overlay_files(self) -> list[str]:
        """Returns the overlay's files at the root: those in PyTorch's folders, and edits."""
        found = [
            f"{folder.name}/{path}"
            for folder in self.root.iterdir()
            if folder.is_dir() and folder.name not in OURS and not LITTER.fullmatch(folder.name)
            for path in files_under(folder)
        ]
        found += [f.name for f in self.root.iterdir() if f.is_file() and is_edit(f.name)]
        return sorted(found)

    def unfinished(self) -> list[str]:
        """Finds what is left to do in the overlay's files, the versions of earlier commits too."""
        todo = re.compile(rf"TODO\((?:{'|'.join(operators(self.root / NATIVE))})\)")
        kept = [f"{c}/{path}" for c in self.commits for path in c.kept()]
        return [
            f"{path}: {what} is still to do"
            for path in self.overlay_files() + kept
            for what in dict.fromkeys(
                todo.findall((self.root / path).read_text(errors="replace", encoding="utf-8"))
            )
        ]

    def problems(self) -> list[str]:
        """Returns what breaks the rules of the series: nothing, for a sound stack."""
        found: list[str] = []
        last: dict[str, Commit] = {}
        for commit in self.commits:
            for path in commit.files:
                last[path] = commit
            for path in commit.removes:
                last.pop(path, None)
        for commit in self.commits:
            found += self._problems_of(commit, self.tree(commit.number - 1), last)
        found += [
            f"{path}: no commit of the stack claims this file"
            for path in self.overlay_files()
            if path not in last
        ]
        found += self.unfinished()
        for commit in self.commits if not found else ():
            if (code := self.added(commit).code) > MOST_CODE:
                found.append(f"{commit}: {code} lines of code: cut it, reviewers take {MOST_CODE}")
        return list(dict.fromkeys(found))

    def _problems_of(self, commit: Commit, before: dict[str, Path], last: dict) -> list[str]:
        found = []
        own = set(commit.kept())
        for path in sorted(own - set(commit.files)):
            found.append(f"{commit}/{path}: not among the files of its commit.md")
        for path in commit.files:
            if path not in own and last.get(path) is not commit:
                found.append(f"{commit}: {path}: a later commit changes it; put this version here")
            elif path in own and last.get(path) is commit:
                found.append(f"{commit}/{path}: no later commit changes it; its place is {path}")
            elif not self.file(commit, path).is_file():
                found.append(f"{commit}: {path}: no such file")
            elif (
                path in before and before[path].read_bytes() == self.file(commit, path).read_bytes()
            ):
                found.append(f"{commit}: {path}: the same as before this commit")
        for path in commit.removes:
            if path not in before:
                found.append(f"{commit}: removes {path}, which no commit before it has")
            if path in commit.files:
                found.append(f"{commit}: both removes and has {path}")
        if not commit.files and not commit.removes:
            found.append(f"{commit}: changes nothing")
        if len(commit.title) > 72:
            found.append(f"{commit}: the title is longer than 72 characters")
        for title in SECTIONS:
            if not commit.section(title):
                found.append(f"{commit}: commit.md has no '## {title}', or an empty one")
        if "TODO(" in commit.title + commit.body:
            found.append(f"{commit}: something in commit.md is still to do")
        if re.findall(r"^## (.*)", commit.body, re.M) != list(SECTIONS):
            found.append(f"{commit}: commit.md has the sections {', '.join(SECTIONS)}, no other")
        if cut := PATCH_BEGINS.search(commit.body):
            found.append(f"{commit}: commit.md: git am takes '{cut[0]}' for the patch's beginning")
        return found

    def added(self, commit: Commit) -> Added:
        """Counts the lines that the commit adds to the overlay, without its edits' marks."""
        before = self.tree(commit.number - 1)
        counts: Counter = Counter()
        for path in commit.files:
            new = Counter(self.file(commit, path).read_text(encoding="utf-8").splitlines())
            old = (
                Counter(before[path].read_text(encoding="utf-8").splitlines())
                if path in before
                else Counter()
            )
            kind = kind_of(path)
            for line, n in (new - old).items():
                if "@@ " not in line:
                    counts[kind] += n
        return Added(**counts)

    def earlier(self, commit: Commit) -> int:
        """Counts the lines of the versions that the commit keeps: a later one changes the files."""
        return sum(
            len((commit.folder / p).read_text(encoding="utf-8").splitlines()) for p in commit.kept()
        )

    def debts(self, number: int) -> Counter:
        """Counts the xfails and skips of the overlay after commit `number`, by path and line."""
        found: Counter = Counter()
        for path, file in self.tree(number).items():
            if path.startswith(("test/", "torch/testing/")):
                lines = file.read_text(encoding="utf-8").splitlines()
                ours = (line for line in lines if "@@ " not in line)  # an anchor is upstream's
                found.update((path, line.strip()) for line in ours if DEBT.search(line))
        return found
