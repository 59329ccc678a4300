"""The operator's own tests on each release that the fork supports (`make test-releases`)."""

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from typing_extensions import Self

from fork import paths
from fork.bootstrap import make_venv
from fork.console import run, step
from fork.errors import ForkError
from fork.graft import graft_into, open_graft
from fork.overlay import RELEASES, Stack, default_release, suites_release
from fork.suites.files import own_files
from fork.suites.keys import key_made, key_of
from fork.suites.pending import Left, run_pending
from fork.suites.plan import Plan
from fork.suites.record import Record, cpu, date, ended
from fork.suites.results import Result
from fork.suites.run import TWO_THREADS, environment, run_suites

SUPPORTED = tuple(r["torch"] for r in RELEASES if r.get("graft"))
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# The fork's tests that look at a graft.
OF_GRAFT = ("fork/tests/graft/test_build.py", "fork/tests/graft/test_kernel_code.py")
# An error of `graft_into` has this of pip's if a constraint of the user's forbids the release.
FORBIDDEN = "cannot be downloaded: ERROR: Cannot install"
BOUND = "beyond an upper bound of pip's here"  # a state


@dataclass(frozen=True)
class PassedOn:
    """The tests on one release: with which Python, and which build of torch."""

    release: str
    python: str
    build: str  # 2.13.0+cpu
    own: dict[str, int]
    seconds: int
    cpu: str
    date: str
    made: str = ""

    @classmethod
    def now(
        cls, release: str, build: str, made: str, own: Iterable[Result], seconds: float
    ) -> Self:
        return cls(release, PYTHON, build, ended(own), round(seconds), cpu(), date(), made)

    @property
    def name(self) -> str:
        return named(self.release, self.python)

    def cells(self) -> list[str]:
        numbers = [self.own.get("passed", 0), self.own.get("skipped", 0), self.seconds]
        return [self.build, *map(str, numbers), f"{self.cpu}, {self.date}"]


def named(release: str, python: str = PYTHON) -> str:
    return f"{release} on Python {python}"


class ReleasesRecord(Record):
    """What passed on each release, with the running Python and those that it passed with before."""

    file = "stack/releases.json"
    command = "make test-releases"
    title = "The operator's own tests on each release"
    things = "releases"
    entry = PassedOn
    heads = ("PyTorch", "build", "passed", "skipped", "CPU seconds", "on", "state")

    def make_keys(self, stack: Stack) -> dict[str, str]:
        plan, tip = Plan({}, own_files(stack.root)), stack.commits[-1]
        names = []
        for release in SUPPORTED:
            tried = {entry.python for entry in self.entries.values() if entry.release == release}
            names += [named(release, python) for python in sorted({PYTHON, *tried})]
        return {name: key_of(plan, stack, tip, name) for name in names}


def run_releases(only: str | None, minutes: float | None) -> tuple[Record, dict[str, str]]:
    """Grafts and tests each release, or `only` one, by itself: see `run_pending`.

    What passed is kept in stack/releases.json and not run again until it changes.
    """
    with paths.alone("releases"):
        record = ReleasesRecord(Stack(paths.ROOT))
        todo = {named(release): release for release in ([only] if only else SUPPORTED)}

        def run(name: str) -> tuple[list[Result], Callable] | None:
            return run_release(todo[name], partial(record.take, name))

        return record, run_pending(record, todo, minutes, run)


def run_release(release: str, take: Callable[[str], bool]) -> tuple[list[Result], Callable] | None:
    """The results on one release, in an environment of its own, which is removed then.

    None if the record can `take` them by the second key.
    """
    venv, logs = paths.BUILD / "venv-releases", paths.BUILD / "releases" / release
    with removed(venv, release):
        try:
            made = made_on(release)
            if take(made):
                return None
            make_venv(venv, paths.ROOT / "requirements.txt")
            # A release's CUDA packages are gigabytes, and hardly another release asks for the same.
            (venv / "pip.conf").write_text("[global]\nno-cache-dir = true\n", encoding="utf-8")
            graft = graft_into(venv, release)
        except ForkError as e:
            if FORBIDDEN in str(e):
                raise Left(BOUND) from None
            raise
        python, root = venv / "bin" / "python", paths.ROOT
        files = [file for file in OF_GRAFT if (root / file).exists()]
        if files:  # a folder that `new --into` made has none
            with step("the fork's tests of a graft"):
                env = environment() | {"BASE": release}
                command = [python, "-m", "pytest", "-q", *files]
                run(command, logs / "fork.log", "one fails", env=env, cwd=root)
        own = own_files(root)
        results = run_suites(python, root, own, log_dir=logs, variables=TWO_THREADS)
        return results, partial(PassedOn.now, release, graft.base.version, made, results)


def made_on(release: str) -> str:
    """The second key of the tip on a release: see keys.py."""
    stack = Stack(paths.ROOT)
    with paths.alone():
        graft = open_graft(release)
        graft.prepare()
        return (
            f"{key_made(Plan({}, own_files(stack.root)), stack, stack.commits[-1], graft)}-{PYTHON}"
        )


@contextmanager
def removed(venv: Path, release: str) -> Iterator[None]:
    """Removes the environment at the end, and what was downloaded and built for the release.

    What was there before stays, as does what other commands use.
    """

    def made() -> set[Path]:
        places = (paths.BASES, paths.BUILD / "graft")
        return {path for place in places for path in place.glob(f"torch-{release}[-+]*")}

    kept = made()
    try:
        yield
    finally:
        gone = set() if release in (default_release(), suites_release()) else made() - kept
        for path in (venv, *gone):
            path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
