"""The operator's own tests on 64-bit ARM, which QEMU emulates on x86-64 (`make test-arm64`).

Python and its libraries are those of a Debian for arm64 that is unpacked below build/. QEMU runs
one program at a time, so that it wants neither root nor a system of its own. The processes that a
test starts with `sys.executable` run in the same way, and compilers and Ninja are this machine's.
"""

import os
import platform
import shutil
import sys
from pathlib import Path

from fork import paths
from fork.bootstrap import made_here, make_venv
from fork.console import run, step
from fork.errors import ForkError
from fork.graft import Toolchain, graft_into
from fork.overlay import suites_release
from fork.project import PROJECT
from fork.source import KEYRING, mirrors
from fork.suites.files import own_files, without
from fork.suites.results import Result
from fork.suites.run import TWO_THREADS, environment, run_suites

MACHINE = "aarch64"
QEMU = f"qemu-{MACHINE}-static"
COMPILER = f"{MACHINE}-linux-gnu-g++"
# The programs that are called, and Debian's packages that have them.
PROGRAMS = {
    "mmdebstrap": "mmdebstrap",
    QEMU: "qemu-user-static",
    COMPILER: f"g++-{MACHINE}-linux-gnu",
}
PYTHON, DEBIAN = "3.11", "bookworm"
PACKAGES = (f"python{PYTHON}", f"libpython{PYTHON}-dev", "libstdc++6")
# Test files that end so are not run: what they test does not depend on the machine, or is another
# machine's. Most take many minutes in an emulator.
LEFT_OUT = (
    *("aot_inductor", "autocast", "brgemm", "compile", "cpp", "cuda", "dtensor", "energy"),
    *("examples", "field", "flops", "ring", "sweep", "tracing", "vmap"),
)
# These files are run in part: one of the expressions, of pytest's -k, selects each test that is
# run. Some tests are left out because they repeat others at other sizes (a name begins with them: a
# 2 is a batch, a 4 or 7 hundreds of rows), some because autograd composes them of the kernels, and
# tables of threads because a property test draws such cases.
KERNEL = f"test_{PROJECT}_kernel.py"
EDGES = ("values_and_gradients_edges", "scale_of_scores_edges")
ONLY = {
    KERNEL: (*EDGES, "special_values_nan", "reads_nothing_else", "callers_at_once"),
    f"test_{PROJECT}_autograd.py": (
        *("double_backward", "third_derivatives", "forward_over_reverse_of"),
        *("gradcheck", "deterministic", "threads"),
    ),
    f"test_{PROJECT}_output.py": (
        "test_values_and_gradients and not (gradients_2 or gradients_4)",
        *("test_choice_of_gradients", "gradcheck_3_4"),
        *("test_no_sample", "test_saves_its", "test_jacobian", "test_a_query"),
    ),
    f"test_{PROJECT}_output_kernel.py": ("same_bits_as", "layout", "expanded", "memory"),
    f"test_{PROJECT}_output_second_order.py": (
        "test_values and not (values_2 or values_4 or values_7)",
        *("test_values_2_3_3", "gradcheck_3_4"),
        *("test_choice_of_results", "test_no_", "test_uses and alone"),
    ),
    f"test_{PROJECT}_output_second_order_kernel.py": ("Properties",),
    f"test_{PROJECT}_output_third_order_kernel.py": ("Properties",),
    f"test_{PROJECT}_output_triple_backward.py": (
        *("test_values_7_3_2_2", "test_values_95_97", "test_training"),
        *("test_choice_of_results", "test_vmap"),
    ),
}
# Upstream's name for: skip tests that would take too long. Files that end in one of COMPILED
# compile what they test, and would be skipped by it.
SMALL = {"PYTORCH_TEST_WITH_ASAN": "1"}
COMPILED = ("products", "schedule", "tanh", "ways")
# QEMU's CPU with the vectors of SVE256. By default its vectors are longer, and PyTorch takes NEON.
SVE256 = {"QEMU_CPU": "max,sve-max-vq=2"}
PROBE = "import torch; assert torch.backends.cpu.get_cpu_capability() == 'SVE256'"


def run_arm64() -> list[Result]:
    """Grafts the tip onto the wheel for this machine, and runs the tests that are chosen."""
    check_machine()
    folder = paths.BUILD / "arm64"
    with paths.alone(folder):
        venv = emulated(folder / "venv")
        headers = folder / DEBIAN / "usr" / "include"
        # Debian's Python.h includes a file of the folder of all headers. Of the others there, the
        # compiler has its own.
        cxx = f"{COMPILER} -idirafter {headers}"
        toolchain = Toolchain(MACHINE, headers / f"python{PYTHON}", cxx)
        graft_into(venv, suites_release(), toolchain=toolchain)
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # The compiler is not the first one on the path, which PyTorch would compare with its own.
        variables = {"CXX": cxx, "PATH": tools, "TORCH_DONT_CHECK_COMPILER_ABI": "1"}
        return run_chosen(venv / "bin" / "python", folder / "logs", TWO_THREADS | variables)


def emulated(venv: Path) -> Path:
    """Returns `venv`, whose Python QEMU runs, and which has the fork's requirements."""
    folder = venv.parent
    tree = folder / DEBIAN
    if not tree.exists():
        unpack_debian(tree, folder)
    make_environment(venv, tree, folder)
    return venv


def run_chosen(python: Path, logs: Path, variables: dict[str, str]) -> list[Result]:
    """Runs the operator's own tests that are chosen with NEON, and a part with SVE256."""
    chosen = without(own_files(paths.ROOT), LEFT_OUT)
    chosen |= {name: only for name, only in ONLY.items() if name in chosen}
    compiled = {name: of for name, of in chosen.items() if name[:-3].endswith(COMPILED)}
    small = {name: of for name, of in chosen.items() if name not in compiled}
    results = run_suites(python, paths.ROOT, small, log_dir=logs, variables=variables | SMALL)
    results += run_suites(python, paths.ROOT, compiled, log_dir=logs, variables=variables)
    if KERNEL in chosen:
        variables = variables | SMALL | SVE256
        with step("SVE256 in the emulator"):
            command = [python, "-c", PROBE]
            run(command, logs / "sve256.log", "no SVE256", env=environment() | variables)
        suites, logs = {KERNEL: EDGES}, logs / "sve256"
        with_sve = run_suites(python, paths.ROOT, suites, log_dir=logs, variables=variables)
        for result in with_sve:
            result.suite += " (SVE256)"
        results += with_sve
    return results


def check_machine() -> None:
    if platform.machine() == MACHINE:
        raise ForkError(f"this machine is {MACHINE}: `make test` runs all of the tests here")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if version != PYTHON:
        raise ForkError(
            f"Python {PYTHON} is needed, which Debian {DEBIAN} has, not {version}: PYTHON="
        )
    missing = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    if not KEYRING.is_file():
        missing.append("debian-archive-keyring")
    if missing:
        raise ForkError(f"Debian's packages are missing: apt-get install {' '.join(missing)}")


def unpack_debian(tree: Path, folder: Path) -> None:
    """Unpacks the packages and what they need; nothing in them is run."""
    options = [
        *("--variant=extract", "--architectures=arm64", f"--keyring={KEYRING}"),
        f"--include={','.join(PACKAGES)}",
    ]
    with step(f"unpack a Debian ({DEBIAN}) for arm64") as doing, paths.atomically(tree) as partial:

        def tell(line: str) -> None:
            doing.tell(line.strip()[:80])

        command = ["mmdebstrap", *options, DEBIAN, partial, f"deb {mirrors()[0]} {DEBIAN} main"]
        run(command, folder / "debian.log", "Debian cannot be unpacked", line=tell)


def make_environment(venv: Path, tree: Path, folder: Path) -> None:
    """Makes a virtual environment of the Debian's Python, which is a script that calls QEMU."""
    made = venv / ".made"  # as `make_venv` has it
    if not (made.exists() and made.read_text(encoding="utf-8") == made_here(venv)):
        shutil.rmtree(venv, ignore_errors=True)
        site, python = venv / f"lib/python{PYTHON}/site-packages", venv / "bin" / "python"
        site.mkdir(parents=True)
        python.parent.mkdir()
        (venv / "pyvenv.cfg").write_text(f"home = {tree}/usr/bin\n", encoding="utf-8")
        # Python gets this script's name as its own (-0). So it finds pyvenv.cfg, and its
        # sys.executable, with which tests start another Python, is this script.
        python.write_text(
            f'#!/bin/sh\nexec {QEMU} -L {tree} -0 "$0" {tree}/usr/bin/python{PYTHON} "$@"\n',
            encoding="utf-8",
        )
        python.chmod(0o755)
        # These are Python alone; their versions are those that this repository names.
        options = ["--no-deps", "--constraint", paths.ROOT / "requirements.txt", "--target", site]
        pip = [sys.executable, "-m", "pip", "install", *options, "pip", "setuptools"]
        run(pip, folder / "pip.log", "pip cannot be installed")
        made.write_text(made_here(venv), encoding="utf-8")
    make_venv(venv, paths.ROOT / "requirements.txt")
