"""PyTorch's code generator on our entries alone: our operators' C++, headers and stubs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import yaml

from fork import paths
from fork.console import run
from fork.errors import ForkError
from fork.graft.base import Base
from fork.graft.headers import merge
from fork.overlay import DERIVATIVES, NATIVE, Edit

SHIMS = "torch/csrc/inductor/aoti_torch/generated"
# Where the wheel has the headers that the generator writes. Not those of ATen/core/: the interned
# strings are numbered there, and libtorch_cpu was compiled with the wheel's numbers.
HEADERS = {"ATen": "ATen", "autograd": "torch/csrc/autograd/generated"}
# For the graft's own sources: which operators are ours, and labels for a switch, as upstream's
# sources have in `case aten::bmm:`.
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


def generate(
    base: Base, tree: dict[str, Path], stage: Path, folder: Path, with_cuda: bool
) -> dict[Path, bytes]:
    """What to compile or include of all that the base's torchgen writes: place -> content.

    It reads the entries of the overlay `tree`; `stage` has our edits of torchgen itself, and of the
    wheel's headers. It works in `folder`.
    """
    torchgen = folder / "torchgen"
    shutil.rmtree(torchgen, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(base.folder / "torchgen", torchgen / "torchgen", ignore=ignore)
    if (stage / "torchgen").is_dir():
        shutil.copytree(stage / "torchgen", torchgen / "torchgen", dirs_exist_ok=True)
    native, derivatives = folder / "native_functions.yaml", folder / "derivatives.yaml"
    entries = _entries(base, tree, NATIVE)
    # Nothing would define the functions of such a key, and the base's libraries call them.
    native.write_text(entries if with_cuda else without_key(entries, "CUDA"), encoding="utf-8")
    derivatives.write_text(_entries(base, tree, DERIVATIVES), encoding="utf-8")
    nothing = Path(os.devnull)
    fresh, none = folder / "generated", folder / "generated-none"
    for out, inputs in ((fresh, (native, derivatives)), (none, (nothing, nothing))):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        run(
            [sys.executable, "-m", "fork.graft.codegen", torchgen, *inputs, out],
            folder / "codegen.log",
            f"PyTorch's code generator of torch {base.version} refuses our entries",
            cwd=paths.ROOT,
        )
    check_formulas((fresh / "autograd" / "Functions.cpp").read_text(encoding="utf-8"))
    shims = _shims(base, stage, fresh / "aoti")
    headers = _headers(base, fresh, none)
    return _select(fresh, headers, shims, with_derivatives=DERIVATIVES in tree)


def check_formulas(functions: str) -> None:
    """Raises ForkError if the generator took a function of at:: for a word of its own.

    It reads zeros_like(x) as the zeros that x's sizes tell of, so that x is not kept.
    """
    if found := re.search(r"\bat::(\w+)_info\.zeros\(\)", functions):
        x = found[1]
        raise ForkError(f"{DERIVATIVES}: at::zeros_like({x}): write zeros_like({x}) in a formula")


def _entries(base: Base, tree: dict[str, Path], path: str) -> str:
    """Our entries of a YAML file for this release, as input for the generator."""
    return (
        Edit.parse(path, tree[path].read_text(encoding="utf-8")).code(base.upstream)
        if path in tree
        else ""
    )


def _headers(base: Base, fresh: Path, none: Path) -> dict[str, str]:
    """The wheel's generated headers that our operators add to: place below gen/ -> text."""
    found = {}
    for made, place in HEADERS.items():
        for header in sorted((fresh / made).glob("*.h")):
            name = f"{place}/{header.name}"
            wheel = base.folder / "torch" / "include" / name
            if wheel.is_file():  # not one that only a source build has
                texts = (
                    (f / made / header.name).read_text(encoding="utf-8") for f in (none, fresh)
                )
                if merged := merge(name, *texts, wheel.read_text(encoding="utf-8")):
                    found[f"include/{name}"] = merged
    return found


def _shims(base: Base, stage: Path, aoti: Path) -> list[Path]:
    """The sources of our operators' C functions, for the devices that the base is built for."""
    found = []
    for made in sorted(aoti.glob("c_shim_*.h")):
        declared = re.findall(r"^AOTI_TORCH_EXPORT .*", made.read_text(encoding="utf-8"), re.M)
        header = stage / "torch" / "include" / SHIMS / made.name
        text = header.read_text(encoding="utf-8") if header.exists() else ""
        for line in declared:
            if line not in text:
                raise ForkError(f"{SHIMS}/{made.name}: the overlay does not add: {line}")
        device = made.stem.removeprefix("c_shim_")
        if declared and (base.folder / "torch/lib" / f"libtorch_{device}.so").exists():
            found.append(made.with_suffix(".cpp"))
    return found


def _select(
    fresh: Path, headers: dict[str, str], shims: list[Path], *, with_derivatives: bool
) -> dict[Path, bytes]:
    """Of all that was generated, what to compile or include: place below gen/ -> content."""
    aten, autograd = fresh / "ATen", fresh / "autograd"
    wanted = dict(headers)
    ops = sorted((aten / "ops").glob("*_ops.h"))
    names = [o.stem.removesuffix("_ops") for o in ops]
    quoted = [f'"{name}"' for name in names]
    wanted["private/graft_ops.h"] = OPS_HEADER % (", ".join(names), ", ".join(quoted))
    files = {f"include/ATen/ops/{o.name}": o for o in (aten / "ops").glob("*.h")}
    files |= {f"op/{s.name}": s for s in shims}
    # Of the sharded sources the unsharded "Everything"; of these, those that register.
    skip = re.compile(r".*_\d+\.cpp|(python_|ViewFuncs|Functions).*")
    registers = re.compile(r"^\s*m\.(impl|def)\(", re.M)
    for source in [*aten.glob("*.cpp"), *autograd.glob("*.cpp")]:
        if not skip.fullmatch(source.name) and registers.search(source.read_text(encoding="utf-8")):
            files[f"op/{source.name}"] = source
    files["op/OperatorsEverything.cpp"] = aten / "OperatorsEverything.cpp"
    if with_derivatives:
        files["op/Functions.cpp"] = autograd / "Functions.cpp"
    for name in ("functionsEverything", "torch_functionsEverything", "return_types"):
        files[f"python/python_{name}.cpp"] = autograd / f"python_{name}.cpp"
    files |= {f"stubs/{s.name}": s for s in (fresh / "stubs").iterdir()}
    wanted |= {place: file.read_text(encoding="utf-8") for place, file in files.items()}
    # These headers include others, of cuBLAS or of all of CUDA, which need not be there, and
    # declare nothing that is used.
    for place, unused in (("RegisterCUDAEverything", "ATen/cuda/CUDA"), ("c_shim_cuda", ".*cuda/")):
        if (source := f"op/{place}.cpp") in wanted:
            wanted[source] = re.sub(rf"#include <{unused}.*>\n", "", wanted[source])
    return {Path(place): text.encode() for place, text in wanted.items()}


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
