"""Where PyTorch is built: a tree, and the Python and the variables to build it with."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fork import paths
from fork.errors import ForkError

GIB = 2**30


@dataclass(frozen=True)
class Place:
    """Where the build happens: a tree, the Python to build and test with, and what it is told."""

    tree: Path
    python: Path
    logs: Path
    variables: Mapping[str, str]


def folder() -> Path:
    """The folder of whole builds: their logs, and a Debian for who has no checkout."""
    return paths.BUILD / "from-source"


def checkout(tree: Path, python: str) -> Place:
    """A checkout with its submodules, built with the user's own tools and variables."""
    found = shutil.which(python)
    if found is None:
        raise ForkError(f"{python}: no such Python to build {tree} with")
    return Place(tree, Path(found).absolute(), folder() / "logs", {})


def size(folder: Path) -> int:
    """The bytes of disk that a folder takes."""
    return sum(
        os.lstat(os.path.join(here, name)).st_blocks * 512
        for here, _, names in os.walk(folder)
        for name in names
    )
