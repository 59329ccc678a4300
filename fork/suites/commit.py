"""Commits of the stack on the release whose source is at hand, tested by upstream's suites."""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fork import paths
from fork.bootstrap import make_venv
from fork.console import console, step
from fork.errors import ForkError
from fork.graft import graft_into, open_graft
from fork.overlay import NATIVE, Commit, Stack, Upstream, make_tree, operators, suites_release
from fork.source import pristine
from fork.suites import torchbind
from fork.suites.files import SUITES
from fork.suites.keys import key_made
from fork.suites.pending import run_pending
from fork.suites.plan import REQUIREMENTS, Plan, problems
from fork.suites.record import Passed, Record
from fork.suites.results import Result
from fork.suites.run import run_script, run_suites

SHARED = "stack"  # the folder of the graft that all commits share, and of `make test-stack`'s tree

Ran = tuple[list[Result], list[Result]]  # upstream's suites, the operator's own files


def run_upstream(
    number: int | None, upstream: Path | None, only: Sequence[str] = ()
) -> list[Result]:
    """Runs upstream's suites, or `only` some, on commits 1 to `number`.

    `upstream` is a source tree of the release, by default Debian's. Before the commit that adds the
    operator none of upstream's tests is ours.
    """
    stack = Stack(paths.ROOT)
    commit = stack.commits[-1] if number is None else stack.commit(number)
    if NATIVE not in stack.tree(commit.number):
        raise ForkError(f"{commit} has no operator yet: none of upstream's tests is ours")
    suites = {name: SUITES.get(name, ()) for name in only or SUITES}
    upstream, venv = place(upstream)
    tree = source_tree(stack, commit, upstream, commit.folder.name)
    results, _ = run_plan(Plan(suites, {}), stack, commit, tree, venv)
    first, *_ = operators(paths.ROOT / NATIVE)
    command = f"cd {tree} && {venv}/bin/python test/test_ops.py -k {first}"
    console.print(f"by hand: {command}")
    return results


def run_stack(upstream: Path | None, minutes: float | None) -> tuple[Record, dict[str, str]]:
    """Builds and tests each commit by itself, with what its plan says: see `run_pending`.

    What passed is kept in stack/results.json and not run again until it changes.
    """
    with paths.alone("stack"):
        stack = Stack(paths.ROOT)
        if wrong := problems(stack):
            raise ForkError(wrong[0])
        record = Record(stack)
        # In order, because neighbours differ least: little is compiled from one to the next. So the
        # tip comes last, which `make test` and `make test-upstream` are of.
        commits = {commit.folder.name: commit for commit in stack.commits}
        if any(not record.holds(name) for name in commits):
            upstream, venv = place(upstream)

        def run(name: str) -> tuple[list[Result], Callable] | None:
            commit = commits[name]
            console.print(commit.title)
            plan = Plan.of(stack, commit)
            made = made_by(plan, stack, commit)
            if record.take(name, made):
                return None
            tree = source_tree(stack, commit, upstream, SHARED)
            ran = run_plan(plan, stack, commit, tree, venv)
            return [*ran[0], *ran[1]], partial(Passed.now, name, made, *ran)

        return record, run_pending(record, commits, minutes, run)


def made_by(plan: Plan, stack: Stack, commit: Commit) -> str:
    """The second key of commits 1 to `commit`: see keys.py; empty if nothing is made of them."""
    if not plan and NATIVE not in stack.tree(commit.number):
        return ""
    with paths.alone():
        graft = open_graft(suites_release(), commit.number, folder=SHARED)
        graft.prepare()
        return key_made(plan, stack, commit, graft)


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


def source_tree(stack: Stack, commit: Commit, upstream: Path, name: str) -> Path:
    """The folder `name` of build/trees: `upstream` with commits 1 to `commit`."""
    directory = paths.BUILD / "trees" / f"{suites_release()}-{name}"
    with step(f"source tree with commits 1 to {commit.number}"):
        shutil.rmtree(directory, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        make_tree(stack, commit.number, directory, Upstream(upstream))
    return directory


def run_plan(plan: Plan, stack: Stack, commit: Commit, tree: Path, venv: Path) -> Ran:
    """The results of a plan on commits 1 to `commit`, those of its scripts among the own.

    They are built even if there is nothing to run.
    """
    if not plan and NATIVE not in stack.tree(commit.number):
        return [], []
    release = suites_release()
    graft = graft_into(venv, release, commit.number, folder=SHARED)
    if "test_fx.py" in plan.upstream:
        torchbind.install(graft.base, tree, venv, paths.BUILD / "torchbind")
    python = venv / "bin" / "python"
    logs = paths.BUILD / "reports" / f"{release}-{commit.folder.name}"
    ran = run_suites(python, tree, {**plan.upstream, **plan.own}, log_dir=logs)
    results, owns = ran[: len(plan.upstream)], ran[len(plan.upstream) :]
    if results and not any(r.tests for r in results):
        raise ForkError("none of the tests is of the operator: upstream did not see its OpInfo")
    return results, owns + [run_script(python, tree, c, logs) for c in plan.scripts]
