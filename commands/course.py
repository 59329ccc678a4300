"""The course: its lessons run; its exercises, its extension and operators of one's own tested."""

import sys

import click

from commands.lessons import (
    COURSE,
    EXTENSION,
    install_extension,
    install_packages,
    pytest,
    with_tools,
)
from commands.site import LESSONS, build_site
from fork import paths
from fork.commands import Command
from fork.console import console
from fork.graft import graft_into
from fork.overlay import default_release
from fork.suites import environment

OPERATORS = [COURSE / "tests" / f"test_{name}.py" for name in ("new", "carry")]


@click.command(cls=Command, section="Test", example="--only lessons")
@click.option(
    "--only",
    type=click.Choice(["lessons", "operators"]),
    help="The lessons, with their exercises and the extension, or the operators of one's own.",
)
def course(only: str | None) -> None:
    """Run the course's lessons, exercises and extension (`make course`)."""
    graft_into(paths.VENV, default_release())
    install_packages(paths.VENV)
    tests = [*OPERATORS] if only != "lessons" else []  # the longest are first
    if only != "operators":
        install_extension(paths.VENV)
        build_site()  # This runs each lesson, once.
        others = {*(COURSE / "tests").glob("test_*.py")}.difference(OPERATORS)
        tests += [*sorted(others), EXTENSION / "tests", *LESSONS]
    console.rule("the course", align="left")
    # A worker has all tests of a class or a file, so that what they share is compiled once.
    workers = ["--numprocesses=2", "--dist=loadscope", "--no-loadscope-reorder"]
    words = ["-rs", "--durations=5", *workers, *tests]
    env = environment(threads=1) | with_tools(paths.VENV)
    name = "operators" if only == "operators" else "course"
    sys.exit(pytest(paths.VENV / "bin" / "python", name, *words, env=env))
