"""PyTorch built whole with the stack on it: a checkout, or Debian's source in a Debian for it."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from fork import paths
from fork.console import NinjaSteps, new_table, run, step
from fork.errors import ForkError
from fork.overlay import Stack, Upstream, copy_pristine, is_source, target_of
from fork.series import commits
from fork.source import debian

# What PyTorch's build asks for beyond the build dependencies of Debian's package, and its tests.
PACKAGES = (
    *("ca-certificates", "ccache", "git", "libopenblas-dev"),
    *("python3-filelock", "python3-fsspec", "python3-jinja2", "python3-networkx"),
    *("python3-sympy", "python3-typing-extensions", "python3-setuptools"),
    *("python3-expecttest", "python3-hypothesis", "python3-psutil", "python3-pytest"),
    *("python3-scipy", "python3-xmlrunner"),
)
# A build for CPUs, with only what the operator and its tests need.
OFF = (
    *("CUDA", "CUDNN", "DISTRIBUTED", "FBGEMM", "GFLAGS", "GLOG", "GLOO", "ITT", "KINETO", "LLVM"),
    *("MAGMA", "MKLDNN", "MPI", "NCCL", "NNPACK", "NUMA", "PYTORCH_QNNPACK", "ROCM", "TENSORPIPE"),
    *("VULKAN", "XNNPACK", "XPU"),
)
ENVIRONMENT = {
    **{f"USE_{name}": "0" for name in OFF},
    **dict.fromkeys(("BUILD_TEST", "BUILD_BINARY"), "0"),
    **dict.fromkeys(("NO_CUDA", "USE_NUMPY", "USE_OPENMP", "PYTORCH_BUILD_NUMBER"), "1"),
    "BLAS": "OpenBLAS",
    "CFLAGS": "-I/usr -Wno-dangling-reference",
    "CXXFLAGS": "-I/usr -Wno-dangling-reference",
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_GENERATOR": "Ninja",
    "ONNX_NAMESPACE": "onnx",
    "PYTORCH_BUILD_VERSION": debian.RELEASE,
    "USE_SYSTEM_LIBS": "ON",
    "LC_ALL": "C.UTF-8",
}
# The source that a step of build.ninja compiles: other steps name sources too, such as the .cu that
# every build generates. Of a kernel for CPUs, a copy is compiled for each set of instructions.
COMPILES = re.compile(
    r"^build .*?: \w+_COMPILER__\S+ (.*?)(?:(?<=\.cpp)\.\w+\.cpp)?(?: \||$)", re.M
)
# A line of CMake's cache. PyTorch's CMake turns it off there if it finds no CUDA.
FOR_CUDA = re.compile(r"^USE_CUDA:BOOL=(?:ON|YES|TRUE|Y|[1-9]\d*)$", re.I | re.M)
GIB = 2**30
ROOM = 6 * GIB  # what all of it takes in the end, and half as much again
# Mounts and processes are in namespaces that end with the command, and the command with us: nothing
# is left mounted or running, whatever happens, and to remove the folder removes nothing else.
NAMESPACE = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
# Runs a command in the Debian, in the same working folder, with this folder at its own path.
ENTER = f"""\
exec {" ".join(NAMESPACE)} sh -c '
    for dir in dev proc sys; do mount --rbind "/$dir" "$0/$dir" || exit; done
    mkdir -p "$0$1" && mount --bind "$1" "$0$1" || exit
    root=$0 place=$PWD
    shift
    exec chroot "$root" /usr/bin/env -C "$place" PATH=/usr/local/bin:/usr/bin:/bin HOME=/root "$@"
' {{root}} {{folder}} "$@"
"""


@dataclass(frozen=True)
class Figures:
    """What a run of the build took, and what Ninja's log has of the whole build."""

    steps: int
    cpu_seconds: float
    wall_seconds: float
    largest_process: int  # bytes
    whole_steps: int
    whole_seconds: float  # of its steps, each as it last ran
    disk: int  # bytes, of the tree


@dataclass(frozen=True)
class Place:
    """Where the build happens: a tree, the Python to build and test with, and what it is told."""

    tree: Path
    python: Path
    logs: Path
    variables: Mapping[str, str]


def configured(upstream: Path | None, python: str, branch: str) -> Place:
    """The checkout `upstream`, by default Debian's source, with the stack on it, configured.

    `python` builds a checkout. The caller holds the lock of build/from-source.
    """
    folder = paths.BUILD / "from-source"
    if upstream is None:
        place = in_debian(folder, paths.SOURCES)
    else:
        place = checkout(upstream, python, folder / "logs")
    configure(place, Stack(paths.ROOT), branch)
    return place


def in_debian(folder: Path, sources: Path) -> Place:
    """Debian's source below `folder`, and a Debian to build it in; what is there is kept."""
    _check_machine(folder)
    root, tree = folder / "root", folder / "pytorch"
    if not root.is_dir():
        _make_root(root, folder / "root.log")
    paths = {"root": shlex.quote(str(root)), "folder": shlex.quote(str(folder))}
    enter = _script(folder / "enter", ENTER.format(**paths))
    # Debian's patches leave the libraries without the path to one another.
    run_python = f"env LD_LIBRARY_PATH={shlex.quote(str(tree / 'torch' / 'lib'))} python3"
    python = _script(folder / "python", f'exec {shlex.quote(str(enter))} {run_python} "$@"\n')
    if not tree.is_dir():
        with step(f"source of PyTorch {debian.RELEASE}, with Debian's patches"):
            _make_tree(tree, debian.fetch(sources), enter)
    # Ninja would run one or two more, and each step's time would not be that of a core.
    jobs = os.environ.get("MAX_JOBS", str(os.cpu_count()))
    variables = ENVIRONMENT | {"CCACHE_DIR": str(folder / "ccache"), "MAX_JOBS": jobs}
    return Place(tree, python, folder / "logs", variables)


def checkout(tree: Path, python: str, logs: Path) -> Place:
    """A checkout with its submodules, built with the user's own tools and variables."""
    found = shutil.which(python)
    if found is None:
        raise ForkError(f"{python}: no such Python to build {tree} with")
    return Place(tree, Path(found).absolute(), logs, {})


def configure(place: Place, stack: Stack, branch: str) -> None:
    """Puts the stack on the tree as commits, and has PyTorch's build configured for them.

    Raises ForkError if that build would leave out a C++ file of the overlay.
    """
    with step("commit the stack") as doing:
        upstream, made = commits(stack, place.tree, branch)
        doing.done = f"{len(made)} commits on {upstream}"
    with step("configure"):
        # Each time: the lists of sources are globbed.
        again = ("build", "--cmake", "--cmake-only")
        _run_setup(place, again, "configure.log", "PyTorch cannot be configured")
        if missing := left_out(stack, place.tree):
            raise ForkError(f"{missing[0]}: PyTorch's build does not compile it")


def build_whole(place: Place) -> Figures:
    """PyTorch's own build of a tree that is configured, which goes on where it was."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with step("compile") as doing:
        steps = NinjaSteps(doing)
        develop = ("develop", "--no-deps")
        _run_setup(place, develop, "build.log", "PyTorch's build stopped", line=steps)
        doing.done = str(steps)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Figures(
        steps.done,
        sum(getattr(after, k) - getattr(before, k) for k in ("ru_utime", "ru_stime")),
        time.monotonic() - start,
        after.ru_maxrss * 1024,
        *ninja_log(place.tree / "build" / ".ninja_log"),
        size(place.tree),
    )


def ninja_log(log: Path) -> tuple[int, float]:
    """How many steps a build has, and how many seconds they took in all, each as it last ran.

    Whatever number of runs it took, and however these ended.
    """
    last = {}
    for line in log.read_text().splitlines():
        if len(parts := line.split("\t")) == 5:  # the first is not, nor one that a kill cut short
            start, end, _, output, key = parts
            last[output] = int(start), int(end), key
    steps = set(last.values())  # one may have many outputs
    return len(steps), sum(end - start for start, end, _ in steps) / 1000


def size(folder: Path) -> int:
    """The bytes of disk that a folder takes."""
    return sum(
        os.lstat(os.path.join(here, name)).st_blocks * 512
        for here, _, names in os.walk(folder)
        for name in names
    )


def table(of: Figures) -> Table:
    """What this run cost, and the whole build."""
    grid = new_table("The build")
    grid.show_footer = False
    for head in ("", "steps", "CPU seconds", "minutes", "largest process", "disk"):
        grid.add_column(head, justify="right")
    largest, disk = (f"{n / GIB:.1f} GiB" for n in (of.largest_process, of.disk))
    cpu, minutes = f"{of.cpu_seconds:.0f}", f"{of.wall_seconds / 60:.0f}"
    grid.add_row("this run", str(of.steps), cpu, minutes, largest, "")
    whole = f"{of.whole_seconds:.0f}"
    grid.add_row("whole, by Ninja's log", str(of.whole_steps), whole, "", "", disk)
    return grid


def left_out(stack: Stack, tree: Path) -> list[str]:
    """The C++ files of the overlay, and those it edits, that no step of the build compiles.

    Those for CUDA count if the build is for CUDA.
    """
    try:
        files = (tree / "build" / name for name in ("build.ninja", "CMakeCache.txt"))
        steps, cache = (file.read_text() for file in files)
    except OSError as e:
        lacks = f"has no build/{Path(e.filename).name}"
        raise ForkError(f"{tree}: {lacks}: CMake has not configured it for Ninja") from None
    compiled = [f"/{source}" for source in COMPILES.findall(steps)]
    sources = (target_of(path) or path for path in stack.tree() if is_source(path))
    others = () if FOR_CUDA.search(cache) else ".cu"
    wanted = (path for path in sources if not path.endswith(others))
    return [p for p in wanted if not any(source.endswith(f"/{p}") for source in compiled)]


def _run_setup(place: Place, args: Sequence[str], log: str, wrong: str, **named) -> None:
    """Runs the tree's setup.py, which is PyTorch's build; see `run`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {**place.variables}
    command = [place.python, "setup.py", *args]
    run(command, place.logs / log, wrong, cwd=place.tree, env=env, **named)


def _make_tree(tree: Path, pristine: Path, enter: Path) -> None:
    """A copy of Debian's source that builds: its patches find the libraries, which are Debian's."""
    partial, log = tree.with_name(f"{tree.name}.partial"), tree.with_name("source.log")
    shutil.rmtree(partial, ignore_errors=True)
    copy_pristine(Upstream(pristine), partial)
    run([enter, "dpkg-source", "--before-build", partial], log, "Debian's patches do not apply")
    shutil.rmtree(partial / ".pc")  # the files as they were before
    # The one generated file that the package lacks.
    serialization = partial / "torch/csrc/jit/serialization"
    options = ("--cpp", "--gen-mutable", "--scoped-enums", "-o", serialization)
    run([enter, "flatc", *options, serialization / "mobile_bytecode.fbs"], log, "flatc")
    partial.rename(tree)


def _script(place: Path, text: str) -> Path:
    place.write_text(f"#!/bin/sh\n{text}")
    place.chmod(0o755)
    return place


def _check_machine(folder: Path) -> None:
    tools = {"mmdebstrap": "mmdebstrap", "unshare": "util-linux", "setpriv": "util-linux"}
    for tool, package in tools.items():
        if not shutil.which(tool):
            raise ForkError(f"{tool}: not found: install the package {package}")
    if os.geteuid():
        raise ForkError(
            "only root can make and enter a Debian of its own: run this as root, or name a "
            "checkout of PyTorch to build with your own tools (UPSTREAM=)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    has = size(folder)
    free = shutil.disk_usage(folder).free
    if has + free < ROOM:
        raise ForkError(
            f"{folder}: a source build takes {ROOM / GIB:.0f} GiB of disk, and "
            f"{free / GIB:.1f} GiB are free (it has {has / GIB:.1f} already)"
        )


def _make_root(root: Path, log: Path) -> None:
    """Debian with all that PyTorch is built and tested with; nothing is left of a half of one."""
    partial = root.with_name("root.partial")
    shutil.rmtree(partial, ignore_errors=True)
    build_dep = f'chroot "$1" apt-get --yes --no-install-recommends build-dep {debian.PACKAGE}'
    mirror = debian.mirrors()[0]
    command = [
        *NAMESPACE,
        *("mmdebstrap", "--variant=minbase", f"--keyring={debian.KEYRING}"),
        f"--include={','.join(PACKAGES)}",
        f"--customize-hook={build_dep}",
        *(debian.SUITE, partial),
        *(f"{kind} {mirror} {debian.SUITE} main" for kind in ("deb", "deb-src")),
    ]
    with step(f"make a Debian ({debian.SUITE}) with the build dependencies") as doing:
        run(
            command,
            log,
            "Debian cannot be made",
            line=lambda line: doing.tell(f"make a Debian: {line.strip()[:100]}"),
        )
    partial.rename(root)
