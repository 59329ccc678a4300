"""A base wheel and the overlay in, a wheel of torch with our operators out."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from fork import paths
from fork.bootstrap import check_machine
from fork.console import NinjaSteps, Step, console, run, step
from fork.errors import ForkError
from fork.graft import cuda
from fork.graft.base import Base, get, rpath
from fork.graft.generate import generate
from fork.graft.pack import pack
from fork.overlay import (
    NATIVE,
    Edit,
    Stack,
    files_under,
    is_source,
    resolve,
    target_of,
    wheel_place,
)
from fork.project import LOCAL, PROJECT

HERE = Path(__file__).parent
CPP = HERE / "cpp"
# The folder whose sources are compiled for several sets of instructions.
CPU_KERNELS = "aten/src/ATen/native/cpu/"
VERSION = "torch/version.py"
EXPORTS = HERE / "exports.map"


class Toolchain(NamedTuple):
    """What a graft is compiled with. Torchgen is Python: it runs here, whatever the base is for."""

    machine: str
    python_include: Path
    cxx: str = ""  # the C++ compiler; empty is what CMake finds


THIS_MACHINE = Toolchain(platform.machine(), Path(sysconfig.get_paths()["include"]))


class Graft:
    """One commit of the stack on one base, in a build folder of its own.

    Commits may share a `folder`: from one to the next, only what differs is compiled.
    """

    def __init__(
        self,
        stack: Stack,
        base: Base,
        number: int | None = None,
        folder: str = "",
        toolchain: Toolchain = THIS_MACHINE,
    ):
        self.base = base
        self.toolchain = toolchain
        self.commit = stack.commits[-1] if number is None else stack.commit(number)
        self.tree = stack.tree(self.commit.number)
        self.root = stack.root
        grafts = stack.root / "build" / "graft" / base.name
        self.dir = grafts / (folder or self.commit.folder.name)
        # What the wheel gets: new and changed files, at their places.
        self.stage = self.dir / "stage"
        self.gen = self.dir / "gen"

    def build(self, compress: bool = False) -> Path:
        """The grafted wheel; made anew only if something that it is made of has changed."""
        wheels = self.dir / ("wheel-deflated" if compress else "wheel")
        stamp = wheels.with_suffix(".stamp")
        made = sorted(wheels.glob("*.whl"))
        if (
            len(made) == 1
            and stamp.exists()
            and stamp.read_text(encoding="utf-8") == self.fingerprint
        ):
            return made[0]
        stamp.unlink(missing_ok=True)
        self.make()
        with step("pack the wheel") as doing:
            wheel = pack(self.base, self.stage, wheels, compress)
            doing.done = f"{wheel.name}, {wheel.stat().st_size / 1e6:.0f} MB"
        stamp.write_text(self.fingerprint, encoding="utf-8")
        return wheel

    def make(self) -> None:
        """Stages all that the wheel gets."""
        self.prepare()
        if NATIVE in self.tree:
            if self.kernels and isinstance(self.nvcc, str) and cuda.built_for(self.base):
                console.print(f"  {self.nvcc}", markup=False)
            with step("compile") as doing:
                doing.done = self.compile(doing)
            check_exports(self.dir / "cmake", "libtorch.so")
            self.stage_products()
        else:
            console.print(f"  {self.commit.folder.name} has no native function: nothing to compile")
        self.stage_version()

    def stage_version(self) -> None:
        """Stages torch/version.py, with a line that says what this graft is made of.

        The keys of Inductor's and AOTAutograd's caches have all Python files of torch in them, and
        no C++: by this line a program that was compiled with another formula is compiled again.
        """
        base = self.base
        text = (base.folder / VERSION).read_text(encoding="utf-8")
        text = text.replace(f"'{base.version}'", f"'{base.grafted_version}'", 1)
        made = f"{LOCAL.replace('.', '_')} = '{self.fingerprint}'\n"
        write_changed(self.stage / VERSION, f"{text.rstrip()}\n{made}".encode())

    def prepare(self) -> None:
        """Stages the overlay's files and generates code: all that needs no compiler."""
        self.dir.mkdir(parents=True, exist_ok=True)
        base = f"torch {self.base.version}"
        with step(f"overlay, commit {self.commit.folder.name}, on {base}") as doing:
            written = self.resolve()
            doing.done = f"{len(written)} files"
        if NATIVE in self.tree:
            with step("generate code"):
                cuda_too = bool(self.cuda_sources)
                made = generate(self.base, self.tree, self.stage, self.dir, cuda_too)
                mirror(made, self.gen)

    def inputs(self) -> dict[str, bytes]:
        """What is compiled or put into the wheel, and with which flags, by name, once prepared.

        No path of this machine is in it. Kernels for CUDA are not among them.
        """
        folders = [self.stage] + [self.gen, CPP, HERE / "include"] * (NATIVE in self.tree)
        found = {
            f"{folder.name}/{path}": (folder / path).read_bytes()
            for folder in folders
            for path in files_under(folder)
        }
        if NATIVE not in self.tree:
            return found
        sources = {p: f for p, f in self.tree.items() if is_source(target_of(p) or p)}
        found |= {p: f.read_bytes() for p, f in sources.items()}
        flags = self.configuration()
        for line in ("CUDA_SOURCES", "CUDA_ARCHITECTURES", "NVCC", "PYTHON_INCLUDE"):
            flags = re.sub(rf"^set\(GRAFT_{line} .*\n", "", flags, flags=re.M)
        for place, name in ((self.dir, "GRAFT"), (self.base.folder, "BASE"), (self.root, "ROOT")):
            flags = flags.replace(str(place), name)
        found["graft.cmake"] = flags.encode()
        for file in (self.root / "CMakeLists.txt", HERE / "capabilities.cmake", EXPORTS):
            found[file.name] = re.sub(
                r"^\s*#.*\n", "", file.read_text(encoding="utf-8"), flags=re.M
            ).encode()
        return found

    def check_cuda(self) -> None:
        """Raises ForkError if the base is not built for CUDA."""
        if not cuda.built_for(self.base):
            raise ForkError(f"torch {self.base.version} is not built for CUDA")

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that the wheel is made of, as it was when first asked for.

        A file that changes while the graft compiles thus makes the next one compile again.
        """
        nvcc = self.nvcc if self.kernels else ""
        about = f"{sys.version}{self.base.record}{nvcc}{PROJECT}"
        return paths.digest(made_of(self.root, self.tree), about)

    @cached_property
    def nvcc(self) -> cuda.Nvcc | str:
        """What compiles the kernels for CUDA, or why they are left out."""
        return cuda.find(self.base)

    def resolve(self) -> list[str]:
        """Stages every file of the wheel that the overlay changes or adds."""
        upstream = self.base.upstream
        written = resolve(self.tree, upstream).written
        if NATIVE in self.tree:
            # The graft's own files, in the overlay's form: a source build needs none.
            hooks = [f"torch/{path}" for path in files_under(HERE / "torch")]
            hook = resolve({path: HERE / path for path in hooks}, upstream).written
            if both := written.keys() & hook.keys():
                raise ForkError(f"{both.pop()}: both the overlay and the graft change this file")
            written |= hook
        mirror({Path(upstream.place(p)): content for p, content in written.items()}, self.stage)
        return sorted(written)

    @cached_property
    def kernels(self) -> list[Path]:
        """The overlay's kernels for CUDA."""
        return kernels(self.tree)

    @property
    def cuda_sources(self) -> list[Path]:
        """The kernels for CUDA that are compiled: all of them, or none if there is no compiler."""
        return self.kernels if self.kernels and isinstance(self.nvcc, cuda.Nvcc) else []

    def _contexts(self) -> dict[Path, Path]:
        """For each C++ file that the overlay edits: the source with the edit's surroundings."""
        found = {}
        for path, file in self.tree.items():
            target = target_of(path)
            if target is None or not is_source(target):
                continue
            if not Edit.parse(path, file.read_text(encoding="utf-8")).holds(self.base.upstream):
                continue
            context = CPP / Path(target).name
            if not context.is_file():
                raise ForkError(
                    f"{path}: the graft has no surroundings for it: fork/graft/cpp/{context.name}"
                )
            found[context] = file
        return found

    def _sources(self) -> tuple[list[Path], list[Path]]:
        """The overlay's own C++ files: those compiled once, and the CPU kernels."""
        once, kernels = [], []
        for path, file in self.tree.items():
            if is_source(path) and target_of(path) is None and not path.endswith(".cu"):
                (kernels if path.startswith(CPU_KERNELS) else once).append(file)
        return sorted(once), sorted(kernels)

    def _first(self, build: Path) -> list[Path]:
        """What is compiled before generated code: a mistake in the overlay's files shows at once.

        Of a CPU kernel it is the version for any machine, which takes the least time.
        """
        once, kernels = self._sources()
        return [
            *once,
            *sorted(self._contexts()),
            *(build / f"{k.stem}.DEFAULT.cpp" for k in kernels),
        ]

    def configuration(self) -> str:
        """What CMakeLists.txt includes: the sources, and how the base was compiled."""
        once, kernels = self._sources()
        op = sorted((self.gen / "op").glob("*.cpp"))
        python = sorted((self.gen / "python").glob("*.cpp"))
        settings = {
            "BASE": [self.base.folder],
            "MACHINE": [self.base.machine],
            # CUDA's own libraries are beside torch, for ours as for upstream's.
            "RPATH": rpath(self.base.folder / "torch" / "lib" / "libtorch.so"),
            "CXX11_ABI": [self.base.cxx11_abi],
            "CXX_STANDARD": [self.base.cxx_standard],
            "INCLUDES": [
                self.stage / "torch" / "include",
                self.gen / "include",
                self.gen / "private",
            ],
            "GENERATED": [*op, *python],
            "OP_SOURCES": [*op, *once, CPP / "unexported.cpp"],
            "CPU_KERNELS": kernels,
            "CUDA_SOURCES": self.cuda_sources,
            "CONTEXTS": [f"{context}|{edit}" for context, edit in sorted(self._contexts().items())],
            "PYTHON_SOURCES": [*python, CPP / "module.cpp"],
            "PYTHON_INCLUDE": [self.toolchain.python_include],
        }
        if self.cuda_sources:
            settings["NVCC"] = [self.nvcc.path]
            settings["CUDA_ARCHITECTURES"] = [f"{cuda.ARCHITECTURE}-real"]
        lines = [f"set(GRAFT_{k} {' '.join(_quoted(v) for v in vs)})" for k, vs in settings.items()]
        return "\n".join(lines) + "\n"

    def build_sanitized(self) -> Path:
        """libtorch.so with the sanitizers in it, to stand in for the one that `build` made."""
        with step("compile with the sanitizers") as doing:
            doing.done = self.compile(doing, sanitized=True)
        return self.dir / "sanitized" / "libtorch.so"

    def compile(self, doing: Step, sanitized: bool = False) -> str:
        """CMake and Ninja; `doing` is told n of m."""
        check_machine()
        if self.base.machine != self.toolchain.machine:
            raise ForkError(
                f"{self.base.name}: a wheel for {self.base.machine}, "
                f"and the compiler is for {self.toolchain.machine}"
            )
        beside = Path(sys.executable).parent  # where pip puts its cmake and ninja
        env = {**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"}
        if self.toolchain.cxx:
            env["CXX"] = self.toolchain.cxx
        for tool in ("cmake", "ninja"):
            if shutil.which(tool, path=env["PATH"]) is None:
                raise ForkError(f"{tool} is missing: pip install -r requirements.txt")
        build = self.dir / ("sanitized" if sanitized else "cmake")
        config = self.dir / "graft.cmake"
        write_changed(config, self.configuration().encode())
        if not paths.set_up(build, self.root):
            shutil.rmtree(build, ignore_errors=True)
            flags = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DGRAFT_CONFIG={config}"]
            flags.append(f"-DGRAFT_SANITIZE={sanitized:d}")
            setup = ["cmake", "-S", self.root, "-B", build, *flags]
            run(setup, self.dir / "cmake.log", "CMake cannot set up the build", env=env)
        steps = NinjaSteps(doing)
        first = [f"{source}^" for source in self._first(build)]  # Ninja's name of what it makes
        for targets in filter(None, (first, ["torch" if sanitized else "all"])):
            ninja = ["cmake", "--build", build, "--target", *targets]
            run(ninja, self.dir / "ninja.log", "the compiler stopped", line=steps, env=env)
            steps.go_on()
        return str(steps)

    def stage_products(self) -> None:
        """Stages the libraries, the headers and the type stubs."""
        build, torch = self.dir / "cmake", self.stage / "torch"
        (torch / "lib").mkdir(parents=True, exist_ok=True)
        shutil.copy2(build / "libtorch.so", torch / "lib")
        shutil.copy2(build / "_C_graft.so", torch)
        shutil.copytree(self.gen / "include", torch / "include", dirs_exist_ok=True)
        for place, stub in {
            "torch/_C/_VariableFunctions.pyi": "_VariableFunctions.pyi",
            "torch/_VF.pyi": "_VariableFunctions.pyi",
            "torch/return_types.pyi": "return_types.pyi",
        }.items():
            ours = (self.gen / "stubs" / stub).read_text(encoding="utf-8")
            file = self.stage / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(
                (self.base.folder / place).read_text(encoding="utf-8").rstrip("\n") + "\n\n" + ours,
                encoding="utf-8",
            )


def check_exports(build: Path, library: str) -> None:
    """Raises ForkError if the library exports what the machine's C++ library defines itself.

    It would stand in front of that one for everything that is loaded after it.
    """
    nm = re.search(
        r"^CMAKE_NM:\w+=(.*)$", (build / "CMakeCache.txt").read_text(encoding="utf-8"), re.M
    )[1]
    command = [nm, "--dynamic", "--defined-only", "--format=posix", build / library]
    lines = subprocess.check_output(command, text=True).splitlines()
    machines = ctypes.CDLL("libstdc++.so.6")
    names = [name for name in (line.split()[0] for line in lines) if hasattr(machines, name)]
    if names:
        raise ForkError(
            f"{library} exports {len(names)} symbols of the C++ library, {names[0]} for one: "
            "`import torch` would crash. Set CXX to a compiler that links libstdc++.so"
        )


def kernels(tree: dict[str, Path]) -> list[Path]:
    """The kernels for CUDA in an overlay."""
    return [file for path, file in sorted(tree.items()) if is_source(path) and path.endswith(".cu")]


def made_of(root: Path, tree: dict[str, Path]) -> dict[str, Path]:
    """The files of this clone that a wheel with the overlay `tree` is made of, by name.

    Among them are all files of this room, and all modules of the overlay's.
    """
    fork = HERE.parent
    ours = [*(HERE / path for path in files_under(HERE)), *(fork / "overlay").glob("*.py")]
    files = {f"fork/{p.relative_to(fork).as_posix()}": p for p in ours}
    files["CMakeLists.txt"] = root / "CMakeLists.txt"
    for path, file in tree.items():
        target = target_of(path) or path
        if wheel_place(target) or is_source(target):  # not, say, a test
            files[path] = file
    return files


def open_graft(
    base: str,
    commit: int | None = None,
    *,
    of_pypi: bool = False,
    folder: str = "",
    toolchain: Toolchain = THIS_MACHINE,
) -> Graft:
    """Commits 1 to `commit` of this clone's stack on `base`, which is fetched: see `get`.

    With `of_pypi` the base is PyPI's build of a release, not one for CPUs. `folder` is the graft's
    own below those of the base.
    """
    bases = paths.BASES / "cuda" if of_pypi else paths.BASES
    found = get(base, bases, of_pypi, toolchain.machine)
    return Graft(Stack(paths.ROOT), found, commit, folder, toolchain)


def write_changed(file: Path, content: bytes) -> None:
    """Writes what is new; otherwise the file keeps its time, by which Ninja goes."""
    if not file.exists() or file.read_bytes() != content:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def mirror(wanted: dict[Path, bytes], folder: Path) -> None:
    """Makes `folder` hold just `wanted`."""
    for old in [p for p in folder.rglob("*") if p.is_file()]:
        if old.relative_to(folder) not in wanted:
            old.unlink()
    for place, content in wanted.items():
        write_changed(folder / place, content)


def _quoted(value: object) -> str:
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
