"""A pristine PyTorch to read from: an installed or unpacked wheel, a .whl file, a source tree."""

from __future__ import annotations

import re
import zipfile
from functools import cached_property
from pathlib import Path

from packaging.version import InvalidVersion, Version

from fork.errors import ForkError
from fork.project import LOCAL

# A folder with all files of a wheel in it, and their modes, has this file.
UNPACKED = ".unpacked"
# Where a wheel keeps a file of the source tree; the first prefix that fits decides.
WHEEL_PLACES = (
    ("aten/src/ATen/native/", "torchgen/packaged/ATen/native/", (".yaml",)),
    ("tools/autograd/", "torchgen/packaged/autograd/", (".yaml", ".py")),
    ("aten/src/", "torch/include/", (".h", ".cuh")),
    ("c10/", "torch/include/c10/", (".h", ".cuh")),
    ("torch/csrc/", "torch/include/torch/csrc/", (".h",)),
    ("torch/", "torch/", (".py",)),
    ("torchgen/", "torchgen/", (".py",)),
    ("functorch/", "functorch/", (".py",)),
)


def wheel_place(path: str) -> str | None:
    """Where a wheel has the source tree's `path`; None for what no wheel holds."""
    for source, packed, suffixes in WHEEL_PLACES:
        if path.startswith(source) and path.endswith(suffixes):
            return packed + path[len(source) :]
    return None


def is_grafted(version: str) -> bool:
    return version.endswith((f".{LOCAL}", f"+{LOCAL}"))


class Upstream:
    """One pristine PyTorch, addressed by the paths of its source tree."""

    def __init__(self, root: Path):
        self.root = root
        if (
            root.suffix == ".whl"
            or (root / "torch" / "version.py").is_file()
            and not (root / "aten").exists()
        ):
            self.kind = "wheel"
        elif (root / "aten" / "src" / "ATen").is_dir() and (root / "version.txt").is_file():
            self.kind = "source"
        else:
            raise ForkError(
                f"{root}: not PyTorch: neither a source tree (aten/, version.txt), "
                "nor a folder with an unpacked or installed torch/, nor a .whl file"
            )
        if is_grafted(self.version):
            raise ForkError(f"{root}: not pristine: it is torch {self.version}, already grafted")

    @cached_property
    def _zip(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self.root)
        except (OSError, zipfile.BadZipFile) as e:
            raise ForkError(f"{self.root}: not a readable wheel: {e}") from None

    @cached_property
    def version(self) -> str:
        """The full version, e.g. `2.13.0+cpu`."""
        if self.kind == "source":
            text = (self._read_packed("version.txt") or "").strip()
        else:
            body = self._read_packed("torch/version.py") or ""
            found = re.search(r"^__version__ = '([^']+)'", body, re.M)
            text = found.group(1) if found else ""
        try:
            return str(Version(text))
        except InvalidVersion:
            raise ForkError(f"{self.root}: PyTorch's version cannot be read: {text!r}") from None

    @property
    def release(self) -> Version:
        """The release alone: `2.13.0` for `2.13.0+cpu`, `2.7.0` for a source tree's `2.7.0a0`."""
        return Version(Version(self.version).base_version)

    def __str__(self) -> str:
        return f"torch {self.version} ({self.kind} {self.root.name})"

    def _read_packed(self, packed: str) -> str | None:
        if self.root.suffix == ".whl":
            return self._zip.read(packed).decode() if packed in self._zip.NameToInfo else None
        file = self.root / packed
        # Bytes are read, because text would lose its CRLF.
        return file.read_bytes().decode() if file.is_file() else None

    def place(self, path: str) -> str | None:
        """Where this upstream keeps the source tree's `path`; None if its kind never holds it."""
        return path if self.kind == "source" else wheel_place(path)

    def read(self, path: str) -> str | None:
        """The text of the source tree's `path`; None if it is not here."""
        place = self.place(path)
        return None if place is None else self._read_packed(place)

    def mode(self, path: str) -> str:
        """git's mode of the source tree's `path`."""
        return "100755" if (self.root / path).stat().st_mode & 0o100 else "100644"
