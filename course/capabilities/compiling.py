"""Compiles a C++ file against the torch that runs, once."""

import os
import re
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "capabilities" / f"made-{torch.__version__}"


def built(source: str, *flags: str, program: bool = False) -> str:
    """The library, or the program, made of `source`, which is in this folder or in routes/."""
    (file,) = (f for f in (HERE / source, HERE / "routes" / source) if f.exists())
    folder = BUILD / file.stem
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MAX_JOBS", "1")
    try:
        made = load(file, folder, flags, program)
    except RuntimeError as error:  # of which the first line is the command
        lines = re.findall(r"(?:fatal )?error: .*", str(error))
        raise RuntimeError(lines[0] if lines else str(error)) from error
    return str(made) if program else str(folder / f"{file.stem}.so")


def load(file: Path, folder: Path, flags: tuple[str, ...], program: bool):
    return cpp_extension.load(
        file.stem,
        [str(file)],
        extra_cflags=["-O1", "-DAT_PER_OPERATOR_HEADERS", *flags],
        # A library does without Python's, as a program without Python loads it too. A program has
        # to load libtorch.so, from which it needs no symbol: the graft's has the operator.
        extra_ldflags=["-Wl,--no-as-needed" if program else "-Wl,--as-needed"],
        build_directory=str(folder),
        is_python_module=False,
        is_standalone=program,
    )
