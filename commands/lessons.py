"""What the lessons need: their packages, and the course's extension, built and installed."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from fork import paths
from fork.console import run, step
from fork.errors import ForkError
from fork.graft import STAMP
from fork.overlay import files_under, write

COURSE = paths.ROOT / "course"
EXTENSION = COURSE / "linear_extension"
MADE = paths.BUILD / "course"  # the extension's wheels, by what they are made of


def pytest(python: Path, name: str, *words: str | Path, env: Mapping[str, str]) -> int:
    """Runs pytest, with a report in build/reports; returns its exit status."""
    report = [f"--junitxml={paths.BUILD / 'reports' / name}.xml", "-o", "junit_family=xunit1"]
    command = [python, "-m", "pytest", "-q", *report, *words]
    return subprocess.run(command, cwd=paths.ROOT, env=env).returncode


def install_packages(venv: Path) -> None:
    """Installs what the lessons import beside torch."""
    log = MADE / "requirements.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    pip = [venv / "bin" / "python", "-m", "pip", "install", "-q"]
    run([*pip, "-r", COURSE / "requirements.txt"], log, "the course's packages cannot be installed")


def with_tools(venv: Path) -> dict[str, str]:
    """The PATH with the programs of `venv` first: torch calls its ninja by name."""
    return {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def install_extension(venv: Path) -> None:
    """Builds course/linear_extension for the torch of `venv`, and installs it there."""
    stamp = venv / ".linear-extension-installed"
    sources = {name: EXTENSION / name for name in files_under(EXTENSION, {"build", "tests"})}
    torch = (venv / STAMP).read_text(encoding="utf-8")
    wheels = MADE / paths.digest(sources, torch)[:16]
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wheels.name:
        return
    pip = [venv / "bin" / "python", "-m", "pip"]
    with paths.alone("course"):
        if not list(wheels.glob("*.whl")):
            place = MADE / "source"  # pip leaves its files beside the sources
            shutil.rmtree(place, ignore_errors=True)
            write({name: file.read_bytes() for name, file in sources.items()}, place)
            with step("compile linear_extension"):
                command = [*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", wheels, place]
                env = {**os.environ, **with_tools(venv)}
                run(command, MADE / "wheel.log", "linear_extension cannot be built", env=env)
        found = sorted(wheels.glob("*.whl"))
        if len(found) != 1:
            raise ForkError(f"{wheels}: not one wheel, but {len(found)}")
        command = [*pip, "install", "--no-index", "--no-deps", "--force-reinstall", found[0]]
        run(command, MADE / "install.log", "linear_extension cannot be installed")
        stamp.write_text(wheels.name, encoding="utf-8")
