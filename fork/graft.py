"""The graft: a base wheel and the overlay in, a wheel of torch with our operators out."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import sysconfig
from functools import cached_property
from pathlib import Path

import yaml

from fork import cuda
from fork.base import Base, rpath
from fork.bootstrap import check_machine
from fork.console import NinjaSteps, Step, console, run, step
from fork.errors import ForkError
from fork.headers import merge
from fork.overlay import Edit, resolve, target_of
from fork.pack import pack
from fork.stack import Stack
from fork.upstream import wheel_place

HERE = Path(__file__).parent
# The graft's own edits of the wheel, in the overlay's form: what a source build has no need of.
HOOK = HERE / "graft"
CPP = HERE / "graft" / "cpp"
# The modules that decide what is in the wheel.
MAKERS = (
    "base.py",
    "codegen.py",
    "cuda.py",
    "graft.py",
    "headers.py",
    "overlay.py",
    "pack.py",
    "stack.py",
    "upstream.py",
)
NATIVE = "aten/src/ATen/native/native_functions.edit.yaml"
DERIVATIVES = "tools/autograd/derivatives.edit.yaml"
SHIMS = "torch/csrc/inductor/aoti_torch/generated"
# Where the wheel has the headers that the generator writes. Not those of ATen/core/: the interned
# strings are numbered there, and libtorch_cpu was compiled with the wheel's numbers.
HEADERS = {"ATen": "ATen", "autograd": "torch/csrc/autograd/generated"}
# The folder whose sources are compiled for several sets of instructions.
CPU_KERNELS = "aten/src/ATen/native/cpu/"
# Upstream's libtorch.so beside ours: a name as long as that one, see `with_soname`.
UPSTREAM_LIBRARY = "libtbase.so"
# For the graft's own sources: which operators are ours, and labels for a switch, as upstream's
# sources have in `case aten::attn:`.
OPS_HEADER = """#pragma once

#include <string_view>

namespace graft {

namespace aten {
enum { %s, none };
} // namespace aten

constexpr int place_of(std::string_view op) {
  int place = 0;
  for (const char* name : {%s}) {
    if (op == name) {
      return place;
    }
    ++place;
  }
  return aten::none;
}

constexpr bool is_ours(std::string_view op) {
  return place_of(op) != aten::none;
}

} // namespace graft
"""


class Graft:
    """One commit of the stack on one base, in a build folder of its own."""

    def __init__(self, stack: Stack, base: Base, number: int | None = None):
        self.base = base
        self.commit = stack.commits[-1] if number is None else stack.commit(number)
        self.tree = stack.tree(self.commit.number)
        self.root = stack.root
        self.dir = stack.root / "build" / "graft" / base.name / self.commit.folder.name
        # What the wheel gets: new and changed files, at their places.
        self.stage = self.dir / "stage"
        self.gen = self.dir / "gen"

    def build(self, compress: bool = False) -> Path:
        """The grafted wheel; made anew only if something that it is made of has changed."""
        wheels = self.dir / ("wheel-deflated" if compress else "wheel")
        stamp = wheels.with_suffix(".stamp")
        made = sorted(wheels.glob("*.whl"))
        if len(made) == 1 and stamp.exists() and stamp.read_text() == self.fingerprint:
            return made[0]
        stamp.unlink(missing_ok=True)
        self.make()
        with step("pack the wheel") as doing:
            wheel = pack(self.base, self.stage, wheels, compress)
            doing.done = f"{wheel.name}, {wheel.stat().st_size / 1e6:.0f} MB"
        stamp.write_text(self.fingerprint)
        return wheel

    def make(self) -> None:
        """Stages all that the wheel gets."""
        self.dir.mkdir(parents=True, exist_ok=True)
        base = f"torch {self.base.version}"
        with step(f"overlay, commit {self.commit.folder.name}, on {base}") as doing:
            written = self.resolve()
            doing.done = f"{len(written)} files"
        if NATIVE in self.tree:
            with step("generate code"):
                self.generate()
            if isinstance(self.nvcc, str) and cuda.built_for(self.base):
                console.print(f"  {self.nvcc}", markup=False)
            with step("compile") as doing:
                doing.done = self.compile(doing)
            self.stage_products()
        else:
            console.print(f"  {self.commit.folder.name} has no native function: nothing to compile")

    def check_kernels(self) -> None:
        """Raises ForkError if those for CUDA are left out."""
        if isinstance(self.nvcc, str):
            raise ForkError(self.nvcc)

    def make_kernels(self) -> list[cuda.Kernel]:
        """Compiles those for CUDA anew, and the rest as it is needed; what the compiler said.

        For the oldest architecture too: see `cuda.Nvcc.with_oldest`.
        """
        self.check_kernels()
        self.nvcc = self.nvcc.with_oldest()
        for made in (self.dir / "cmake").rglob("*.cu.o"):
            made.unlink()
        self.make()
        return cuda.kernels((self.dir / "ninja.log").read_text())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that the wheel is made of, as it was when first asked for.

        A file that changes while the graft compiles thus makes the next one compile again.
        """
        digest = hashlib.sha256(f"{sys.version}{self.base.record}{self.nvcc}".encode())
        ours = [self.root / "CMakeLists.txt", *HOOK.rglob("*.*"), *(HERE / m for m in MAKERS)]
        files = {p.relative_to(self.root).as_posix(): p for p in ours}
        for path, file in self.tree.items():
            target = target_of(path) or path
            if wheel_place(target) or is_source(target):  # not, say, a test
                files[path] = file
        for path, file in sorted(files.items()):
            digest.update(f"{path}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
        return digest.hexdigest()

    @cached_property
    def nvcc(self) -> cuda.Nvcc | str:
        """What compiles the kernels for CUDA, or why they are left out."""
        return cuda.find(self.base)

    def resolve(self) -> list[str]:
        """Stages every file of the wheel that the overlay changes or adds."""
        upstream = self.base.upstream
        written = resolve(self.tree, upstream).written
        if NATIVE in self.tree:
            hooks = HOOK.rglob("*.edit.*")
            hook = resolve({h.relative_to(HOOK).as_posix(): h for h in hooks}, upstream).written
            if both := written.keys() & hook.keys():
                raise ForkError(f"{both.pop()}: both the overlay and the graft change this file")
            written |= hook
        mirror({Path(upstream.place(p)): content for p, content in written.items()}, self.stage)
        return sorted(written)

    def _code(self, path: str, name: str) -> Path:
        """Our entries of a YAML file for this release, as input for the generator."""
        edit = Edit.parse(path, self.tree[path].read_text()) if path in self.tree else None
        code = edit.code(self.base.upstream) if edit else ""
        if path == NATIVE and not self.cuda_sources:
            # Nothing would define the functions of such a key, and the base's libraries call them.
            code = without_key(code, "CUDA")
        file = self.dir / name
        file.write_text(code)
        return file

    def generate(self) -> None:
        """Runs the base's torchgen, with our edits in it, on our entries alone."""
        torchgen = self.dir / "torchgen"
        shutil.rmtree(torchgen, ignore_errors=True)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(self.base.folder / "torchgen", torchgen / "torchgen", ignore=ignore)
        if (self.stage / "torchgen").is_dir():
            shutil.copytree(self.stage / "torchgen", torchgen / "torchgen", dirs_exist_ok=True)
        native = self._code(NATIVE, "native_functions.yaml")
        derivatives = self._code(DERIVATIVES, "derivatives.yaml")
        nothing = Path(os.devnull)
        fresh, none = self.dir / "generated", self.dir / "generated-none"
        for out, entries in ((fresh, (native, derivatives)), (none, (nothing, nothing))):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            run(
                [sys.executable, "-m", "fork.codegen", torchgen, *entries, out],
                self.dir / "codegen.log",
                f"PyTorch's code generator of torch {self.base.version} refuses our entries",
                cwd=self.root,
            )
        mirror(self._select(fresh, none), self.gen)

    def _headers(self, fresh: Path, none: Path) -> dict[str, str]:
        """The wheel's generated headers that our operators add to: place below gen/ -> text."""
        found = {}
        for made, place in HEADERS.items():
            for header in sorted((fresh / made).glob("*.h")):
                name = f"{place}/{header.name}"
                wheel = self.base.folder / "torch" / "include" / name
                if wheel.is_file():  # not one that only a source build has
                    texts = ((f / made / header.name).read_text() for f in (none, fresh))
                    if merged := merge(name, *texts, wheel.read_text()):
                        found[f"include/{name}"] = merged
        return found

    def _shims(self, aoti: Path) -> list[Path]:
        """The sources of our operators' C functions, for the devices that the base is built for."""
        found = []
        for made in sorted(aoti.glob("c_shim_*.h")):
            declared = re.findall(r"^AOTI_TORCH_EXPORT .*", made.read_text(), re.M)
            header = self.stage / "torch" / "include" / SHIMS / made.name
            text = header.read_text() if header.exists() else ""
            for line in declared:
                if line not in text:
                    raise ForkError(f"{SHIMS}/{made.name}: the overlay does not add: {line}")
            device = made.stem.removeprefix("c_shim_")
            if declared and (self.base.folder / "torch/lib" / f"libtorch_{device}.so").exists():
                found.append(made.with_suffix(".cpp"))
        return found

    def _select(self, fresh: Path, none: Path) -> dict[Path, bytes]:
        """Of all that was generated, what to compile or include: place below gen/ -> content."""
        aten, autograd = fresh / "ATen", fresh / "autograd"
        wanted = self._headers(fresh, none)
        ops = sorted((aten / "ops").glob("*_ops.h"))
        names = [o.stem.removesuffix("_ops") for o in ops]
        quoted = [f'"{name}"' for name in names]
        wanted["private/graft_ops.h"] = OPS_HEADER % (", ".join(names), ", ".join(quoted))
        files = {f"include/ATen/ops/{o.name}": o for o in (aten / "ops").glob("*.h")}
        files |= {f"op/{s.name}": s for s in self._shims(fresh / "aoti")}
        # Of the sharded sources the unsharded "Everything"; of these, those that register.
        skip = re.compile(r".*_\d+\.cpp|(python_|ViewFuncs|Functions).*")
        registers = re.compile(r"^\s*m\.(impl|def)\(", re.M)
        for source in [*aten.glob("*.cpp"), *autograd.glob("*.cpp")]:
            if not skip.fullmatch(source.name) and registers.search(source.read_text()):
                files[f"op/{source.name}"] = source
        files["op/OperatorsEverything.cpp"] = aten / "OperatorsEverything.cpp"
        if DERIVATIVES in self.tree:
            files["op/Functions.cpp"] = autograd / "Functions.cpp"
        for name in ("functionsEverything", "torch_functionsEverything", "return_types"):
            files[f"python/python_{name}.cpp"] = autograd / f"python_{name}.cpp"
        files |= {f"stubs/{s.name}": s for s in (fresh / "stubs").iterdir()}
        wanted |= {place: file.read_text() for place, file in files.items()}
        if (register := "op/RegisterCUDAEverything.cpp") in wanted:
            # These ask for headers of cuBLAS and others, which need not be there, and declare
            # nothing that is used.
            wanted[register] = re.sub(r"#include <ATen/cuda/CUDA.*>\n", "", wanted[register])
        return {Path(place): text.encode() for place, text in wanted.items()}

    @cached_property
    def cuda_sources(self) -> list[Path]:
        """The overlay's kernels for CUDA, unless this graft leaves them out."""
        found = [f for p, f in sorted(self.tree.items()) if is_source(p) and p.endswith(".cu")]
        return [] if isinstance(self.nvcc, str) else found

    def _contexts(self) -> dict[Path, Path]:
        """For each C++ file that the overlay edits: the source with the edit's surroundings."""
        found = {}
        for path, file in self.tree.items():
            target = target_of(path)
            if target is None or not is_source(target):
                continue
            if not Edit.parse(path, file.read_text()).holds(self.base.upstream):
                continue
            context = CPP / Path(target).name
            if not context.is_file():
                raise ForkError(
                    f"{path}: the graft has no surroundings for it: fork/graft/cpp/{context.name}"
                )
            found[context] = file
        return found

    def configuration(self) -> str:
        """What CMakeLists.txt includes: the sources, and how the base was compiled."""
        whole = {
            p: f
            for p, f in self.tree.items()
            if is_source(p) and target_of(p) is None and not p.endswith(".cu")
        }
        kernels = [f for p, f in whole.items() if p.startswith(CPU_KERNELS)]
        op = sorted((self.gen / "op").glob("*.cpp"))
        python = sorted((self.gen / "python").glob("*.cpp"))
        settings = {
            "BASE": [self.base.folder],
            "UPSTREAM": [self.upstream_library],
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
            "OP_SOURCES": [*op, *sorted({*whole.values()} - {*kernels}), CPP / "unexported.cpp"],
            "CPU_KERNELS": sorted(kernels),
            "CUDA_SOURCES": self.cuda_sources,
            "CONTEXTS": [f"{context}|{edit}" for context, edit in sorted(self._contexts().items())],
            "PYTHON_SOURCES": [*python, CPP / "module.cpp"],
            "PYTHON_INCLUDE": [sysconfig.get_paths()["include"]],
            "PYTHON_SUFFIX": [sysconfig.get_config_var("EXT_SUFFIX")],
        }
        if isinstance(self.nvcc, cuda.Nvcc) and self.cuda_sources:
            settings["NVCC"] = [self.nvcc.path]
            # The last one as PTX too, for what comes after it.
            *others, last = self.nvcc.architectures
            settings["CUDA_ARCHITECTURES"] = [*(f"{n}-real" for n in others), last]
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
        beside = Path(sys.executable).parent  # where pip puts its cmake and ninja
        env = {**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"}
        for tool in ("cmake", "ninja"):
            if shutil.which(tool, path=env["PATH"]) is None:
                raise ForkError(f"{tool} is missing: pip install -r requirements.txt")
        self._rename_upstream_library()
        build = self.dir / ("sanitized" if sanitized else "cmake")
        config = self.dir / "graft.cmake"
        text = self.configuration()
        if not config.exists() or config.read_text() != text:
            config.write_text(text)
        if not (build / "build.ninja").exists():
            shutil.rmtree(build, ignore_errors=True)
            flags = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DGRAFT_CONFIG={config}"]
            flags.append(f"-DGRAFT_SANITIZE={sanitized:d}")
            setup = ["cmake", "-S", self.root, "-B", build, *flags]
            run(setup, self.dir / "cmake.log", "CMake cannot set up the build", env=env)
        steps = NinjaSteps(doing)
        ninja = ["cmake", "--build", build, "--target", "torch" if sanitized else "all"]
        run(ninja, self.dir / "ninja.log", "the compiler stopped", line=steps, env=env)
        return str(steps)

    @property
    def upstream_library(self) -> Path:
        return self.dir / UPSTREAM_LIBRARY

    def _rename_upstream_library(self) -> None:
        """Ours is called libtorch.so, what everybody links with, and needs upstream's."""
        old = self.base.folder / "torch" / "lib" / "libtorch.so"
        renamed = with_soname(old.read_bytes(), old.name, UPSTREAM_LIBRARY)
        write_changed(self.upstream_library, renamed)

    def stage_products(self) -> None:
        """Stages the libraries, the headers and the type stubs."""
        build, torch = self.dir / "cmake", self.stage / "torch"
        (torch / "lib").mkdir(parents=True, exist_ok=True)
        shutil.copy2(build / "libtorch.so", torch / "lib")
        shutil.copy2(self.upstream_library, torch / "lib")
        shutil.copy2(next(build.glob("_C_attn*.so")), torch)
        shutil.copytree(self.gen / "include", torch / "include", dirs_exist_ok=True)
        for place, stub in {
            "torch/_C/_VariableFunctions.pyi": "_VariableFunctions.pyi",
            "torch/_VF.pyi": "_VariableFunctions.pyi",
            "torch/return_types.pyi": "return_types.pyi",
        }.items():
            ours = (self.gen / "stubs" / stub).read_text()
            file = self.stage / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text((self.base.folder / place).read_text().rstrip("\n") + "\n\n" + ours)


def is_source(path: str) -> bool:
    """Whether it is C++ or CUDA of PyTorch's libraries: not, say, of a benchmark."""
    return path.endswith((".cpp", ".cu")) and path.startswith(("aten/", "torch/"))


def without_key(entries: str, key: str) -> str:
    """Entries of native_functions.yaml that dispatch nothing to `key`."""
    functions = yaml.safe_load(entries)
    for function in functions:
        kernels = {}
        for keys, kernel in function.pop("dispatch", {}).items():
            if kept := ", ".join(k for k in keys.split(", ") if k != key):
                kernels[kept] = kernel
        if kernels:
            function["dispatch"] = kernels
    return yaml.safe_dump(functions, sort_keys=False)


def with_soname(library: bytes, old: str, new: str) -> bytes:
    """A shared library that calls itself `new`, which has as many letters as `old`.

    The name is a string in the table of the dynamic section, so that nothing moves.
    """
    strings = [f"\0{name}\0".encode() for name in (old, new)]
    if len(old) != len(new) or library.count(strings[0]) != 1:
        raise ForkError(f"{old}: its name for the loader cannot be replaced by {new}")
    return library.replace(*strings)


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
