"""The library of C++ classes that upstream's TestFX loads, and that no wheel has."""

import os
import shlex
import shutil
from pathlib import Path

from fork.console import run, step
from fork.graft import Base
from fork.paths import atomically, digest

NAME = "libtorchbind_test.so"
SOURCE = "test/cpp/jit/test_custom_class_registrations"


def install(base: Base, tree: Path, venv: Path, into: Path) -> None:
    """Compiles it from the source tree, once, in the folder `into`; puts it beside torch's own."""
    sources = [tree / f"{SOURCE}.cpp", tree / f"{SOURCE}.h"]
    made = into / f"{base.name}-{digest({s.name: s for s in sources})[:16]}.so"
    if not made.exists():
        torch = base.folder / "torch"
        command = [
            *shlex.split(os.environ.get("CXX") or "g++"),
            *("-shared", "-fPIC", "-O1", "-w", f"-std=c++{base.cxx_standard}"),
            f"-D_GLIBCXX_USE_CXX11_ABI={base.cxx11_abi}",
            # The wheel's headers come first; of the tree's it needs only its own.
            *(f"-I{torch / p}" for p in ("include", "include/torch/csrc/api/include")),
            *(f"-I{tree}", sources[0]),
            *(torch / "lib" / f"lib{name}.so" for name in ("torch", "torch_cpu", "c10")),
        ]
        with step(f"compile {NAME}, which TestFX loads"), atomically(made) as partial:
            run([*command, "-o", partial], into / "compile.log", f"{NAME} cannot be compiled")
    for lib in venv.glob("lib/python3*/site-packages/torch/lib"):
        shutil.copyfile(made, lib / NAME)
