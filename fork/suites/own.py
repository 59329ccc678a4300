"""The fork's tests and the operator's own on this clone's tip, and its rules (`make test`)."""

import importlib.util
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from fork import paths
from fork.console import console, print_wide, run, step
from fork.graft import INSTALLED, graft_into
from fork.overlay import Stack, check
from fork.suites import sanitizers
from fork.suites.files import own_files, without
from fork.suites.plan import problems
from fork.suites.report import failures, finish, table
from fork.suites.results import Result
from fork.suites.run import TWO_THREADS, environment, run_suites

TESTS = paths.ROOT / "fork" / "tests"
PARTS = ("fork", "operator", "stack")
OF_TRITON = "test_attn_triton"  # how the names of these tests begin
TRITON = "3.9.0"  # The interpreters of older ones fail with the NumPy of requirements.txt.


def run_own(base: str, slow: bool, parts: Collection[str] = PARTS) -> list[str]:
    """Runs those `parts` on `base` in .venv, with `slow` the slow tests too; what failed."""
    failed = []
    if {*parts} & {"fork", "operator"}:
        graft_into(paths.VENV, base)
    if "fork" in parts and TESTS.is_dir():  # a folder that `new --into` made has none
        console.rule("the fork's tests", align="left")
        if run_forks(base):
            failed.append("the fork's tests")
    if "operator" in parts:
        console.rule("the operator's tests", align="left")
        python, logs = paths.VENV / "bin" / "python", paths.BUILD / "reports" / "operator"
        own, about = own_files(paths.ROOT), {"log_dir": logs, "slow": slow}
        about["of_suite"] = {} if base == INSTALLED else with_triton(own)
        results = run_suites(python, paths.ROOT, own, variables=TWO_THREADS, **about)
        print_wide(table((), results))
        if finish(results):
            failed.append("the operator's tests")
    if "stack" in parts:
        console.rule("the stack", align="left")
        stack = Stack(paths.ROOT)
        failed += check(stack) + problems(stack)
    return failed


def with_triton(suites: Iterable[str]) -> dict[str, dict[str, str]]:
    """Variables by which those tests find Triton that run its interpreter, and no others."""
    ours = [name for name in suites if name.startswith(OF_TRITON)]
    return dict.fromkeys(ours, {"PYTHONPATH": str(triton(TRITON))} if ours else {})


def triton(version: str) -> Path:
    """A folder with this Triton, for PYTHONPATH; it is downloaded once.

    .venv does not have it, so torch is tested as a wheel for CPUs has it.
    """
    folder = paths.BUILD / f"triton-{version}-{sys.version_info.major}.{sys.version_info.minor}"
    if not folder.exists():
        with step(f"download Triton {version}"), paths.atomically(folder, folder=True) as made:
            python = paths.VENV / "bin" / "python"
            pip = [python, "-m", "pip", "install", "--no-deps", "--target", made]
            log = paths.BUILD / "reports" / "triton.log"
            run([*pip, f"triton=={version}"], log, f"Triton {version} cannot be installed")
    return folder


def run_forks(base: str) -> int:
    """Runs the fork's tests; pytest's exit status."""
    env = environment(threads=1) | {"BASE": base}  # whose wheel the fork's tests look at
    # A borrowed environment may lack pytest-xdist.
    xdist = importlib.util.find_spec("xdist") is not None
    workers = ["--numprocesses=auto", "--dist=worksteal"] if xdist else []
    report = ["-o", "junit_family=xunit1", f"--junitxml={paths.BUILD / 'reports' / 'fork.xml'}"]
    python = paths.VENV / "bin" / "python"
    command = [python, "-m", "pytest", "-q", *report, *workers, TESTS]
    return subprocess.run(command, cwd=paths.ROOT, env=env).returncode


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
