"""Debian's source of PyTorch, and a Debian in namespaces to build it in, if one has no checkout."""

import os
import shlex
import shutil
from pathlib import Path

from fork.console import run, step
from fork.errors import ForkError
from fork.overlay import Upstream, copy_pristine
from fork.paths import atomically, set_up
from fork.source import debian
from fork.source.place import GIB, Place, size

# Packages that the build and the tests need beyond the build dependencies of Debian's package.
PACKAGES = (
    *("ca-certificates", "ccache", "git", "libopenblas-dev"),
    *("python3-filelock", "python3-fsspec", "python3-jinja2", "python3-networkx"),
    *("python3-sympy", "python3-typing-extensions", "python3-setuptools"),
    *("python3-expecttest", "python3-hypothesis", "python3-psutil", "python3-pytest"),
    "python3-scipy",
)
# The build is for CPUs, and leaves out what the operator and its tests do not need.
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
ROOM = 6 * GIB  # one and a half times what it takes in the end
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
    build = tree / "build"
    if (build / "CMakeCache.txt").exists() and not set_up(build, tree):  # in a clone that moved
        shutil.rmtree(build)
    # Ninja's default is more jobs than cores: a step's time would not be that of one core.
    jobs = os.environ.get("MAX_JOBS", str(os.cpu_count()))
    variables = ENVIRONMENT | {"CCACHE_DIR": str(folder / "ccache"), "MAX_JOBS": jobs}
    return Place(tree, python, folder / "logs", variables)


def _make_tree(tree: Path, pristine: Path, enter: Path) -> None:
    """Makes a copy of Debian's source with its patches, which find Debian's libraries."""
    log = tree.with_name("source.log")
    with atomically(tree) as partial:
        copy_pristine(Upstream(pristine), partial)
        run([enter, "dpkg-source", "--before-build", partial], log, "Debian's patches do not apply")
        shutil.rmtree(partial / ".pc")  # the files as they were before
        # Debian's package lacks one generated file.
        serialization = partial / "torch/csrc/jit/serialization"
        options = ("--cpp", "--gen-mutable", "--scoped-enums", "-o", serialization)
        run([enter, "flatc", *options, serialization / "mobile_bytecode.fbs"], log, "flatc")


def _script(place: Path, text: str) -> Path:
    place.write_text(f"#!/bin/sh\n{text}", encoding="utf-8")
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
    """Makes a Debian with all that build and tests need; half of one is never used."""
    build_dep = f'chroot "$1" apt-get --yes --no-install-recommends build-dep {debian.PACKAGE}'
    mirror = debian.mirrors()[0]
    options = [
        *("--variant=minbase", f"--keyring={debian.KEYRING}", f"--include={','.join(PACKAGES)}"),
        f"--customize-hook={build_dep}",
    ]
    sources = [f"{kind} {mirror} {debian.SUITE} main" for kind in ("deb", "deb-src")]
    title = f"make a Debian ({debian.SUITE}) with the build dependencies"
    with step(title) as doing, atomically(root) as partial:

        def tell(line: str) -> None:
            doing.tell(f"make a Debian: {line.strip()[:100]}")

        command = [*NAMESPACE, "mmdebstrap", *options, debian.SUITE, partial, *sources]
        run(command, log, "Debian cannot be made", line=tell)
