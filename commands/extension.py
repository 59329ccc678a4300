"""The extension: its wheel built once, and tested on several releases of PyTorch."""

import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import click

from fork import paths
from fork.bootstrap import make_venv
from fork.commands import Command
from fork.console import console, new_table, print_wide, run, step
from fork.errors import ForkError
from fork.graft import STAMP
from fork.overlay import download_wheel, files_under
from fork.suites import environment
from fork.suites.arm64 import COMPILER, MACHINE, SVE256, check_machine, emulated

EXTENSION = paths.ROOT / "extension"
# The package is made of these, too. Its source package has them at the same place in its folder.
KERNELS = "aten/src/ATen/native/cpu"
TRITON = "torch/_native/ops/attn"
FLAGS = "fork/graft/capabilities.cmake"
MADE = paths.BUILD / "extension"
DIST = paths.ROOT / "dist"
REQUIREMENTS = EXTENSION / "requirements.txt"  # of what packs it
TORCH = "libtorch_cpu.so"  # is never part of the wheel
GLIBC = 28  # torch's own wheels are manylinux_2_28: ours must run wherever they do
HEADERS = "2.14.1"  # earlier ones leak where an operator has a `str`
# The one wheel is tested on the oldest release that it is for, on the default one, and on the
# newest that pip installs here.
TESTED = ("==2.10.0", "==2.13.0", ">=2.14")
# In an emulator only some tests run, on the release whose wheel for ARM is for CPUs alone.
IN_EMULATOR = "readme or instructions or mistakes or forked or values_3_4_5_6 or values_7_3_2_2"
OTHER = click.option(
    "--machine", type=click.Choice([MACHINE]), help="Build for this one, which QEMU emulates."
)


@click.command(cls=Command, section="Test", example="--base 2.13.0")
@click.option("--base", envvar="BASE", help="Test on this release alone.")
@OTHER
def extension(base: str | None, machine: str | None) -> None:
    """Build torch-attn's wheel, and test it on several releases and two Pythons (`make extension`).

    A release is tested in a virtual environment of its own, which is removed if it passes. Where
    .venv has the fork's torch, the results are compared with those of the native operators.
    """
    releases = [f"=={base}"] if base else TESTED[:1] if machine else TESTED
    # The oldest release runs on the other Python, if there is one.
    pythons = [sys.executable] * len(releases)
    if (other := other_python()) and not base:
        pythons[0] = other
    with paths.alone("extension"):
        wheel = build(machine)
        table = new_table(f"{wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB")
        for column in ("torch", "Python", "tests", "minutes"):
            table.add_column(column)
        if machine:
            with paths.alone("arm64"):
                passed = [test_in_emulator(wheel, release, table) for release in releases]
        else:
            passed = [test(wheel, *which, table) for which in zip(releases, pythons, strict=True)]
            if (paths.VENV / STAMP).exists():
                passed.append(test_beside_native(wheel, table))
    passed.append(runs_where_torch_does(wheel))
    print_wide(table)
    if not passed[-1]:
        console.print(f"FAIL: some systems that torch is for are not in {wheel.name}'s tag")
    if not base and not machine and other is None:
        console.print("no other Python than this one is on the PATH")
    sys.exit(0 if all(passed) else 1)


@click.command(cls=Command, section="Build")
@OTHER
def wheel(machine: str | None) -> None:
    """Build torch-attn's wheel and its source package, without tests (`make wheel`)."""
    with paths.alone("extension"):
        made = build(machine).parent
        DIST.mkdir(exist_ok=True)
        for old in DIST.glob("torch_attn-*"):
            old.unlink()
        for package in (*made.glob("*.tar.gz"), *made.glob("*.whl")):
            shutil.copy2(package, DIST)
            console.print(f"{DIST.name}/{package.name}, {package.stat().st_size / 1e6:.2f} MB")


def sources() -> dict[str, Path]:
    """The files of the source package, by their paths in it."""
    found = {name: EXTENSION / name for name in files_under(EXTENSION, {"tests"})}
    for folder, pattern in ((KERNELS, "Attn*.h"), (TRITON, "triton_*.py")):
        files = sorted((paths.ROOT / folder).glob(pattern))
        found |= {f"{folder}/{file.name}": file for file in files}
    return found | {FLAGS: paths.ROOT / FLAGS}


def build(machine: str | None = None) -> Path:
    """Returns the wheel, built from the source package unless there is one of the same sources.

    It is for this machine, or for the `machine` for which there is a compiler here.
    """
    if machine:
        check_machine()
    files = sources()
    folder = MADE / paths.digest(files, f"{HEADERS} {machine or platform.machine()}")[:16]
    if not folder.exists():
        include = headers()
        # What is packed but fails a check is no package.
        with paths.atomically(folder, folder=True) as partial:
            _build_in(partial, files, include, machine)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _build_in(folder: Path, files: Mapping[str, Path], include: Path, machine: str | None) -> None:
    """Packs the sources, builds the wheel from that package, and checks both."""
    tree = folder / "source"
    with step("pack torch-attn's sources"):
        python = make_venv(paths.BUILD / "venv-package", REQUIREMENTS)
        tools = python.parent
        env = os.environ | {"PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for name, file in files.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, tree / name)
        command = [python, "-m", "build", "--sdist", "--outdir", folder, tree]
        run(command, MADE / "sdist.log", "torch-attn cannot be packed", env=env)
    (package,) = folder.glob("*.tar.gz")
    with step("compile torch-attn"):
        settings = {"TORCH_INCLUDE": include}
        if machine:
            settings |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": machine}
            settings["CMAKE_CXX_COMPILER"] = COMPILER
        options = [f"-Ccmake.define.{name}={value}" for name, value in settings.items()]
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", *options]
        wrong = "torch-attn cannot be built"
        run([*pip, "-w", folder / "linux", package], MADE / "wheel.log", wrong, env=env)
    if machine:  # scikit-build-core calls it this machine's
        (local,) = (folder / "linux").glob("*.whl")
        command = [python, "-m", "wheel", "tags", "--remove", f"--platform-tag=linux_{machine}"]
        run([*command, local], MADE / "tags.log", wrong)
    (local,) = (folder / "linux").glob("*.whl")
    # Names the wheel after the oldest systems that have all the symbols it asks for.
    command = [tools / "auditwheel", "repair", f"--exclude={TORCH}", "-w", folder, local]
    wrong = "torch-attn's wheel gets no tag"
    run(command, MADE / "auditwheel.log", wrong, env=env)
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(local.parent)
    wrong = "torch-attn cannot be uploaded"
    command = [tools / "twine", "check", "--strict", package, wheel]
    run(command, MADE / "twine.log", wrong)
    run([tools / "abi3audit", "--strict", wheel], MADE / "abi3audit.log", wrong)


def runs_where_torch_does(wheel: Path) -> bool:
    tag = re.search(r"manylinux_2_(\d+)_", wheel.name)
    return tag is not None and int(tag[1]) <= GLIBC


def headers() -> Path:
    """Returns the headers of a release, which are in its wheel for this machine."""
    folder = MADE / f"headers-{HEADERS}"
    if not folder.exists():
        with (
            step(f"download torch {HEADERS} for its headers") as doing,
            paths.atomically(folder, folder=True) as partial,
        ):
            download_wheel(HEADERS, partial, doing)
            (wheel,) = partial.glob("*.whl")
            with zipfile.ZipFile(wheel) as packed:
                names = [name for name in packed.namelist() if name.startswith("torch/include/")]
                packed.extractall(partial, names)
            wheel.unlink()
    return folder / "torch" / "include"


def other_python() -> str | None:
    """Returns the oldest Python on the PATH that the wheel is for, and that is not this one."""
    for minor in range(10, 20):
        python = shutil.which(f"python3.{minor}")
        if python is None or minor == sys.version_info.minor:
            continue
        if subprocess.run([python, "-c", "import ensurepip"], capture_output=True).returncode == 0:
            return python
    return None


def test(wheel: Path, release: str, python: str, table) -> bool:
    """Installs torch and the wheel, runs the tests, adds a row to the table; whether they pass."""
    version = _output(python, "import sys; print(*sys.version_info[:2], sep='.')")
    venv = MADE / f"venv-{version}-torch{release}"
    start = time.monotonic()
    with step(f"install torch{release} and the wheel for Python {version}"):
        shutil.rmtree(venv, ignore_errors=True)
        run([python, "-m", "venv", venv], MADE / "venv.log", "python -m venv fails")
        inside = venv / "bin" / "python"
        pip = [inside, "-m", "pip", "install", "--no-compile"]
        what = [f"torch{release}", "-r", EXTENSION / "tests" / "requirements.txt", wheel]
        run([*pip, *what], MADE / "install.log", f"torch{release} cannot be installed")
    workers = ["--numprocesses=auto", "--dist=worksteal"]
    passed = _pytest(inside, table, start, {"TORCH_ATTN_WHEEL": str(wheel)}, *workers)
    if passed:
        shutil.rmtree(venv)
    return passed


def test_in_emulator(wheel: Path, release: str, table) -> bool:
    """As `test` does, some tests by a Python that QEMU runs, with NEON and with SVE."""
    start = time.monotonic()
    python = emulated(paths.BUILD / "arm64" / "venv-package") / "bin" / "python"
    with step(f"install torch{release} and the wheel in the emulator"):
        pip = [python, "-m", "pip", "install", "--no-compile"]
        wrong = f"torch{release} cannot be installed"
        run([*pip, f"torch{release}"], MADE / "install.log", wrong)
        run([*pip, "--no-deps", "--force-reinstall", wheel], MADE / "install.log", wrong)
    options = ["--numprocesses=auto", "-k", IN_EMULATOR]
    passed = [_pytest(python, table, start, variables, *options) for variables in ({}, SVE256)]
    return all(passed)


def test_beside_native(wheel: Path, table) -> bool:
    """Compares the wheel's operators with those of .venv's torch, which does not get the wheel."""
    start, folder = time.monotonic(), wheel.parent / "unpacked"
    if not folder.exists():
        with paths.atomically(folder, folder=True) as partial, zipfile.ZipFile(wheel) as packed:
            packed.extractall(partial)
    python = paths.VENV / "bin" / "python"
    return _pytest(python, table, start, {"PYTHONPATH": str(folder)}, "-k", "same_bits_as_native")


def _pytest(python: Path, table, start: float, variables: dict, *options: str) -> bool:
    shown = "import sys, torch; print(torch.__version__, '%s.%s' % sys.version_info[:2])"
    torch, version = _output(python, shown).split()
    console.rule(f"torch {torch}, Python {version}", align="left")
    tests = EXTENSION / "tests"
    command = [python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *options, tests]
    passed = subprocess.run(command, cwd=MADE, env=environment() | variables).returncode == 0
    minutes = f"{(time.monotonic() - start) / 60:.1f}"
    table.add_row(torch, version, "pass" if passed else "FAIL", minutes)
    return passed


def _output(python: str | Path, code: str) -> str:
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise ForkError(f"{python}: {(done.stderr.splitlines() or ['fails'])[-1]}")
    return done.stdout.strip()
