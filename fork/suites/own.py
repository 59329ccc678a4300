"""The fork's tests and the operator's own on this clone's tip, and its rules (`make test`)."""

import importlib.util
import subprocess

from fork import paths
from fork.console import console, print_wide
from fork.graft import graft_into
from fork.overlay import Stack, check
from fork.suites import sanitizers
from fork.suites.files import own_files, without
from fork.suites.plan import problems
from fork.suites.report import failures, finish, table
from fork.suites.results import Result
from fork.suites.run import TWO_THREADS, environment, run_suites

TESTS = "fork/tests"


def run_own(base: str, slow: bool) -> list[str]:
    """Runs all of it on `base` in .venv, with `slow` the slow tests too; what failed."""
    graft_into(paths.VENV, base)
    python = paths.VENV / "bin" / "python"
    failed = []
    if (paths.ROOT / TESTS).is_dir():  # a folder that `new --into` made has none
        console.rule("the fork's tests", align="left")
        env = environment(threads=1) | {"BASE": base}  # whose wheel the fork's tests look at
        # A borrowed environment may lack pytest-xdist.
        xdist = importlib.util.find_spec("xdist") is not None
        workers = ["--numprocesses=auto", "--dist=worksteal"] if xdist else []
        command = [python, "-m", "pytest", "-q", *workers, TESTS]
        if subprocess.run(command, cwd=paths.ROOT, env=env).returncode:
            failed.append("the fork's tests")
    console.rule("the operator's tests", align="left")
    results = run_suites(
        python,
        paths.ROOT,
        own_files(paths.ROOT),
        log_dir=paths.BUILD / "own",
        slow=slow,
        variables=TWO_THREADS,
    )
    print_wide(table((), results))
    if finish(results):
        failed.append("the operator's tests")
    console.rule("the stack", align="left")
    stack = Stack(paths.ROOT)
    return failed + check(stack) + problems(stack)


def run_sanitized(base: str) -> list[Result]:
    """Runs the operator's own files with sanitizers in its library, for each set of instructions.

    The environment is .venv, but for the library.
    """
    runtime = sanitizers.runtime()
    graft = graft_into(paths.VENV, base)
    with paths.alone():
        library = graft.build_sanitized()
    logs, python = paths.BUILD / "sanitizers", paths.VENV / "bin" / "python"
    installed = next(paths.VENV.glob("lib/python3*/site-packages/torch/lib"))
    variables = sanitizers.environment(runtime, library, installed)
    about = {"env": environment() | variables, "cwd": paths.ROOT / "test"}
    results: list[Result] = []
    for capability in sanitizers.capabilities(python, library, logs / "probe.log", **about):
        console.rule(f"ATEN_CPU_CAPABILITY={capability}", align="left")
        ran = run_suites(
            python,
            paths.ROOT,
            without(own_files(paths.ROOT), sanitizers.LEFT_OUT),
            log_dir=logs / capability,
            variables=variables | {"ATEN_CPU_CAPABILITY": capability},
        )
        for line in failures(ran):
            console.print(line)
        results += ran
    console.rule()
    return results
