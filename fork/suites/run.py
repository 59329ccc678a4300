"""Test files of a source tree, each run by a pytest of its own, side by side."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatchcase
from pathlib import Path

from fork import paths
from fork.console import console, step
from fork.errors import ForkError
from fork.overlay import NATIVE, operators
from fork.suites.files import is_test_file, own_files
from fork.suites.plan import Command
from fork.suites.report import progress
from fork.suites.results import Result, read

# Where Python keeps what it compiles, of torch too, which is installed without: each file of tests
# is a process of its own. A file that changes is compiled again: an install gives all a new time.
BYTECODE = paths.BUILD / "bytecode"
SLOW = {"PYTORCH_TEST_WITH_SLOW": "1"}  # which upstream's CI has in a job of its own
# More than one also where suites run side by side: each thread has its share of the scratch.
# They sleep when they wait, for there may be no core for what they wait for.
TWO_THREADS = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
OF_CLASS = re.compile(r"(\w+)\.(\w*)\*?")  # Class.test, Class.test_*, Class.*


def run_suites(
    python: Path,
    tree: Path,
    suites: Mapping[str, Sequence[str]],
    *,
    log_dir: Path,
    timeout: float = 3600,
    slow: bool = False,
    variables: Mapping[str, str] | None = None,
    of_suite: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Result]:
    """Run each suite of the source tree with `python`'s torch; results in that order.

    `suites` gives for each which tests run: see `selection`. `slow` says whether the operators' own
    slow tests run, as upstream's do; `variables` are further ones of the environment, and
    `of_suite` those of one suite.
    """
    # Not resolved: a virtual environment's python is a link out of it.
    python, tree, log_dir = (Path(os.path.abspath(p)) for p in (python, tree, log_dir))
    if not os.access(python, os.X_OK):
        raise ForkError(f"{python}: no python to run the suites with")
    for suite in suites:
        if not (tree / "test" / suite).is_file():
            raise ForkError(f"{tree}: has no test/{suite}: not a source tree of PyTorch?")
    if subprocess.run([python, "-c", "import pytest"], capture_output=True).returncode:
        raise ForkError(f"{python}: has no pytest, which runs the tests")
    cores = os.cpu_count() or 1
    jobs = max(1, min(cores, len(suites)))
    env = environment(threads=max(1, cores // jobs)) | {**(variables or {})}
    size = {suite: (tree / "test" / suite).stat().st_size for suite in suites}
    owns, ops = own_files(tree), tuple(operators(paths.ROOT / NATIVE))
    futures = {}
    with ThreadPoolExecutor(jobs) as pool:
        for suite in sorted(suites, key=size.get, reverse=True):  # no long one is left for last
            which = env | ({} if suite in owns and not slow else SLOW)
            which |= (of_suite or {}).get(suite, {})
            # An own file's tests have the operator's name in the file's.
            chosen = (*(() if suite in owns else ops), *suites[suite])
            about = (python, tree, suite, chosen, log_dir, which, timeout)
            futures[suite] = pool.submit(run_suite, *about)
        try:
            with step("test files") as doing:
                for done, future in enumerate(as_completed(futures.values()), 1):
                    console.print(progress(future.result()))
                    doing.tell(done=done, total=len(futures))
                doing.done = str(len(futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [futures[suite].result() for suite in suites]


def environment(threads: int = os.cpu_count() or 1) -> dict[str, str]:
    # PYTHONPATH could bring in another torch; PYTHONSAFEPATH takes the suite's own folder away;
    # with CI, upstream's tests write reports into the working folder.
    unwanted = ("CI", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    return env | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONPYCACHEPREFIX": str(BYTECODE),  # the tree stays as it is
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",  # PyTorch's tests name no encoding of the files that they read
    }


def run_suite(
    python: Path,
    tree: Path,
    suite: str,
    chosen: Sequence[str],
    log_dir: Path,
    env: dict,
    timeout: float,
) -> Result:
    name = suite.removesuffix(".py").replace("/", ".")
    log, report = log_dir / f"{name}.log", log_dir / f"{name}.xml"
    start = time.monotonic()
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)  # an earlier run's report is not this run's
        words = command(suite, chosen, report)
        # From test/, where upstream's CI stands: the tree's torch/ is not on the path there.
        status = _status([python, *words], tree / "test", env, log, timeout)
    except OSError as e:
        raise ForkError(f"{e.filename or suite}: {e.strerror or e}") from None
    result = Result(suite, time.monotonic() - start, log=log)
    if status is None or not is_test_file(suite):
        _judge(result, status, timeout)
        return result
    read(result, status, report)
    gone = [x for x in chosen if OF_CLASS.fullmatch(x) and not _any(x, result.tests)]
    if gone and result.ok:
        result.broken = f"has no test {', '.join(gone)}"
    return result


def _any(pattern: str, tests: Iterable[str]) -> bool:
    return any(fnmatchcase(test, pattern) for test in tests)


def command(suite: str, chosen: Sequence[str], report: Path) -> list:
    """What follows `python` to run a suite; of a test file, with a report by pytest."""
    if not is_test_file(suite):
        return [suite]
    words = ["-m", "pytest", suite, "-v", "--capture=no", "-p", "no:cacheprovider"]
    words += ["-o", "junit_family=xunit1", f"--junitxml={report}"]
    return words + (["-k", expression] if (expression := selection(chosen)) else [])


def selection(chosen: Sequence[str]) -> str:
    """The tests that are `chosen`, as pytest's -k has it; empty for all, which is also `*`.

    A test of a class is `Class.test` or `Class.test_*`. Anything else is an expression itself.
    """
    if "*" in chosen:
        return ""
    found = [(OF_CLASS.fullmatch(x), x) for x in chosen]
    parts = [" and ".join(filter(None, of.groups())) if of else x for of, x in found]
    return " or ".join(f"({part})" if " " in part else part for part in parts)


def run_script(
    python: Path, tree: Path, command: Command, log_dir: Path, timeout: float = 1800
) -> Result:
    """The result of a command of a test plan that says by its exit status whether it passed."""
    log_dir.mkdir(parents=True, exist_ok=True)
    log, start = log_dir / f"{command.file.replace('/', '.')}.log", time.monotonic()
    words = [python.absolute(), *command.words]
    status = _status(words, tree / command.folder, environment(), log, timeout)
    result = Result(str(command), time.monotonic() - start, log=log)
    _judge(result, status, timeout)
    console.print(progress(result))
    return result


def _judge(result: Result, status: int | None, timeout: float) -> None:
    """Makes a script's exit status its result, for it is one test; None is a timeout."""
    if status is None:
        result.broken = f"still running after {timeout:g} s: stopped"
    elif status:
        result.broken = f"exit status {status}"
    else:
        result.tests = {result.suite: "passed"}


def _status(command: Sequence, folder: Path, env: dict, log: Path, timeout: float) -> int | None:
    """A command's exit status; None if it ran too long."""
    with open(log, "wb") as out:
        try:
            return subprocess.run(
                command,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            ).returncode
        except subprocess.TimeoutExpired:
            return None
