"""Commits of the stack on the release whose source is at hand, tested by upstream's suites."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fork import paths
from fork.bootstrap import make_venv
from fork.console import console, step
from fork.errors import ForkError
from fork.graft import graft_into, open_graft
from fork.overlay import NATIVE, Commit, Stack, Upstream, make_tree, suites_release
from fork.source import pristine
from fork.suites import torchbind
from fork.suites.files import LAB, SUITES, own
from fork.suites.report import all_failures
from fork.suites.results import Result, Row
from fork.suites.run import run_suites

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
# What decides how a commit is tested, beside the commit and its graft.
RUNNERS = (*(HERE / f"{name}.py" for name in ("files", "results", "run")), REQUIREMENTS)

# What no test of the operator reads.
UNTESTED = ("benchmarks/", "docs/")

Ran = tuple[list[Result], list[Result]]  # upstream's suites, the operator's own files


def run_upstream(number: int | None, upstream: Path | None, only: Sequence[str] = ()) -> Ran:
    """Runs upstream's suites, or `only` some, on commits 1 to `number`, then the operator's files.

    `upstream` is a source tree of the release, by default Debian's.
    """
    stack = Stack(paths.ROOT)
    commit = stack.commits[-1] if number is None else stack.commit(number)
    wanted = {name: SUITES.get(name, ()) for name in only} or SUITES
    results, owns = run_commit(commit, *place(upstream), wanted, with_own=not only)
    if not results:
        console.print(f"{commit} has no operator yet: none of upstream's tests is ours")
    return results, owns


def run_stack(upstream: Path | None) -> list[Row]:
    """Runs the lab's suites and the operator's own files on each commit by itself.

    A commit that went well is not run again until something that it is made of changes, nor one
    that its tests cannot tell from it.
    """
    tree, venv = place(upstream)
    rows = []
    for commit in Stack(paths.ROOT).commits:
        console.rule(f"{commit.folder.name}: {commit.title}", align="left")
        stamp = paths.BUILD / "stack" / f"{stack_key(commit, tree)}.json"
        row = Row.read(stamp)
        if row is not None:
            was = f", as {row.commit}" if row.commit != commit.folder.name else ""
            console.print(f"  tested already{was}")
            row = replace(row, commit=commit.folder.name)
        else:
            try:
                results, owns = run_commit(commit, tree, venv, LAB, keep_wheel=False)
                row = Row.of(commit.folder.name, results, owns)
                for line in all_failures(results + owns):
                    console.print(line)
            except ForkError as e:
                row = Row(commit.folder.name, error=str(e))
                console.print(f"error: {e}", markup=False)
            if row.ok:
                row.write(stamp)
        rows.append(row)
    return rows


def place(upstream: Path | None) -> tuple[Path, Path]:
    """The pristine source tree that upstream's suites are in, and the environment they run in."""
    release = suites_release()
    upstream = upstream or pristine()
    found = Upstream(upstream)
    if str(found.release) != release:
        raise ForkError(f"{upstream}: is {found}; the suites run on torch {release}'s wheel")
    venv = paths.BUILD / f"venv-{release}"
    make_venv(venv, REQUIREMENTS)
    return upstream, venv


def run_commit(
    commit: Commit,
    upstream: Path,
    venv: Path,
    wanted: Mapping[str, Sequence[str]],
    *,
    with_own: bool = True,
    keep_wheel: bool = True,
) -> Ran:
    """The results of upstream's suites and of the operator's own tests on commits 1 to `commit`.

    Before the commit that adds the operator none of upstream's tests is ours, so none is run.
    """
    stack, release = Stack(paths.ROOT), suites_release()
    directory = paths.BUILD / "trees" / f"{release}-{commit.folder.name}"
    with step(f"source tree with commits 1 to {commit.number}"):
        shutil.rmtree(directory, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        make_tree(stack, commit.number, directory, Upstream(upstream))
    if NATIVE not in stack.tree(commit.number):
        wanted = {}
    owns = own(directory) if with_own else {}
    if not wanted and not owns:
        return [], []
    graft = graft_into(venv, release, commit.number)
    if not keep_wheel:  # it is in, and a wheel for each commit fills a disk
        shutil.rmtree(graft.dir / "wheel")
    if "test_fx.py" in wanted:
        torchbind.install(graft.base, directory, venv, paths.BUILD / "torchbind")
    logs = paths.BUILD / "suites" / directory.name
    ran = run_suites(venv / "bin" / "python", directory, {**wanted, **owns}, log_dir=logs)
    results = ran[: len(wanted)]
    if results and not any(r.ran for r in results):
        raise ForkError("none of the tests is of the operator: upstream did not see its OpInfo")
    return results, ran[len(wanted) :]


def stack_key(commit: Commit, upstream: Path) -> str:
    """A hash of what the commit's tests depend on: its files, the graft, the runner."""
    graft = open_graft(suites_release(), commit.number)
    tested = (file for path, file in sorted(graft.tree.items()) if not path.startswith(UNTESTED))
    files = [*tested, *RUNNERS]
    digest = hashlib.sha256(f"{graft.fingerprint} {upstream}".encode())
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
