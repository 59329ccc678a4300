"""The course's table of what each way of registering gives: the environments it is made in."""

import subprocess
import sys
from pathlib import Path

import click

from commands.lessons import COURSE, install_packages, with_tools
from fork import options, paths
from fork.bootstrap import BORROWED, make_venv, new_venv
from fork.commands import Command
from fork.console import console
from fork.graft import graft_into, graftable
from fork.overlay import default_release
from fork.suites import environment

HERE = COURSE / "capabilities"
MADE = paths.BUILD / "capabilities"
NATIVE = {"implicit": 3, "explicit": 4}  # route -> the commit whose torch.attn it is


@click.command(cls=Command, section="Test", example="--base 2.6.0 --publish")
@options.base_option(type=graftable, default=default_release())
@click.option("--publish", is_flag=True, help="Measure too, and keep the table as the record.")
def capabilities(base: str, publish: bool) -> None:
    """Make the course's table of what each way of registering gives, and compare the record.

    The record is in course/capabilities/published, one file for each release.
    """
    place = MADE / Path(base).name.removesuffix(".whl")
    tip = paths.VENV
    if base != default_release():
        tip = place / "tip"
        make_venv(tip, COURSE / "requirements.txt")
    release = graft_into(tip, base).base.upstream.release
    install_packages(tip)
    pythons = []
    for route, commit in NATIVE.items():
        venv = place / route
        borrow(tip, venv)
        graft_into(venv, base, commit, folder="capabilities")
        pythons += ["--python", f"{route}={venv / 'bin' / 'python'}"]
    console.rule("the table of capabilities", align="left")
    command = [tip / "bin" / "python", HERE / "record.py", str(release), *pythons]
    env = environment(threads=1) | with_tools(tip)
    command += ["--publish"] if publish else []
    sys.exit(subprocess.run(command, env=env).returncode)


def borrow(lender: Path, venv: Path) -> None:
    """Makes `venv`, if it is not there, with the packages of `lender` behind its own."""
    (packages,) = lender.glob("lib/python3*/site-packages")
    if not venv.exists():
        with paths.atomically(venv) as partial:
            new_venv(partial, "--without-pip")  # pip is among the packages
    (own,) = venv.glob("lib/python3*/site-packages")
    (own / BORROWED).write_text(f"{packages}\n", encoding="utf-8")
