"""The fork's tests and the operator's own on this clone's tip, and its rules (`make test`)."""

from __future__ import annotations

import subprocess

from fork import paths
from fork.console import console
from fork.graft import graft_into
from fork.suites import sanitizers
from fork.suites.files import own
from fork.suites.report import all_failures
from fork.suites.results import Result
from fork.suites.run import environment, run_suites


def run_own(release: str) -> list[str]:
    """Runs all of it with `release` grafted in .venv; the commands that failed."""
    graft_into(paths.VENV, release)
    python = paths.VENV / "bin" / "python"
    env = environment() | {"ATTN_BASE": release}  # whose wheel the fork's tests look at
    failed = []
    for command in (
        [python, "-m", "pytest", "-q", "fork/tests"],
        *([python, f"test/{name}"] for name in own(paths.ROOT)),
        [python, "-m", "fork", "check"],
    ):
        words = " ".join(["python", *map(str, command[1:])])
        console.rule(words)
        if subprocess.run(command, cwd=paths.ROOT, env=env).returncode:
            failed.append(words)
    console.rule()
    return failed


def run_sanitized(release: str) -> list[Result]:
    """Runs the operator's own files with sanitizers in its library, for each set of instructions.

    The environment is .venv, but for the library.
    """
    runtime = sanitizers.runtime()
    graft = graft_into(paths.VENV, release)
    with paths.alone():
        library = graft.build_sanitized()
    logs, python = paths.BUILD / "sanitizers", paths.VENV / "bin" / "python"
    site = logs / "site-packages"
    sanitizers.link_site(next(paths.VENV.glob("lib/python3*/site-packages")), library, site)
    variables = sanitizers.environment(runtime, site)
    about = {"env": environment() | variables, "cwd": paths.ROOT / "test"}
    results: list[Result] = []
    for capability in sanitizers.capabilities(python, library, logs / "probe.log", **about):
        console.rule(f"ATEN_CPU_CAPABILITY={capability}", align="left")
        ran = run_suites(
            python,
            paths.ROOT,
            sanitizers.chosen(own(paths.ROOT)),
            log_dir=logs / capability,
            variables=variables | {"ATEN_CPU_CAPABILITY": capability},
        )
        for line in all_failures(ran):
            console.print(line)
        results += ran
    console.rule()
    return results
