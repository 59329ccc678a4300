"""The base of a graft: a pristine PyTorch wheel, downloaded once and unpacked, or installed."""

from __future__ import annotations

import csv
import platform
import re
import sys
import zipfile
from functools import cached_property
from importlib import metadata
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename
from wheel.wheelfile import WheelError, WheelFile

from fork.console import Step, step
from fork.errors import ForkError
from fork.overlay import RELEASES, UNPACKED, Upstream, download_wheel, is_grafted
from fork.paths import atomically
from fork.project import LOCAL

# The base that is not fetched: the torch that the running Python has.
INSTALLED = "installed"
# What PyTorch's wheels for a machine other than x86-64 are tagged with, from 2.6.0 on.
OTHER = "manylinux_2_28"
# What a RECORD lists beside the wheel's files: itself, and what installing has added.
ADDED = re.compile(
    r"(\.\.|/).*|.*\.pyc|"
    r"[^/]+\.dist-info/(RECORD(\..*)?|INSTALLER|REQUESTED|direct_url\.json|uv_\w+\.json)"
)


class Base:
    """A wheel of PyTorch in a folder: unpacked there, or installed among others."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.name = folder.name  # of the graft's own folder
        self.upstream = Upstream(folder)
        self.version = self.upstream.version

    @property
    def grafted_version(self) -> str:
        """`2.13.0+cpu.NAME`, or `2.13.0+NAME` for a base without a local version."""
        return f"{self.version}{'.' if '+' in self.version else '+'}{LOCAL}"

    @cached_property
    def dist_info(self) -> Path:
        found = sorted(self.folder.glob("torch-*.dist-info"))
        if len(found) != 1:
            names = ", ".join(f.name for f in found) or "none"
            raise ForkError(f"{self.folder}: not one torch-*.dist-info: {names}")
        return found[0]

    @property
    def tags(self) -> str:
        """Which Python the wheel is for: `cp311-cp311`."""
        return self._tag[1]

    @property
    def machine(self) -> str:
        """Which machine the wheel is for, as `platform.machine()` names it: `aarch64`."""
        return self._tag[2]

    @cached_property
    def _tag(self) -> re.Match:
        wheel = (self.dist_info / "WHEEL").read_text(encoding="utf-8")
        found = re.search(r"^Tag: (\w+-\w+)-\w*linux(?:\d+|_\d+_\d+)?_(\w+)$", wheel, re.M)
        if found is None:
            raise ForkError(f"torch {self.version}: the wheel is not for Linux")
        return found

    @property
    def record(self) -> str:
        """Every file with its hash."""
        return (self.dist_info / "RECORD").read_text(encoding="utf-8")

    def files(self) -> list[str]:
        """The paths of the wheel's files, but for RECORD."""
        paths = [row[0] for row in csv.reader(self.record.splitlines()) if row]
        return [p for p in paths if not ADDED.fullmatch(p) and (self.folder / p).is_file()]

    @cached_property
    def cxx11_abi(self) -> str:
        found = re.search(r"_GLIBCXX_USE_CXX11_ABI=(\d)", self.cmake("Torch/TorchConfig.cmake"))
        return found[1] if found else "1"  # releases that say nothing have the new one

    @cached_property
    def cxx_standard(self) -> str:
        found = re.search(r"CXX_STANDARD (\d+)", self.cmake("Caffe2/public/utils.cmake"))
        if found is None:
            raise ForkError(f"torch {self.version}: the wheel does not say its C++ standard")
        return found[1]

    def cmake(self, file: str) -> str:
        """One of the CMake files that the wheel brings, which say how it was compiled."""
        path = self.folder / "torch" / "share" / "cmake" / file
        try:
            return path.read_text(encoding="utf-8")
        except OSError:
            raise ForkError(f"torch {self.version}: the wheel has no {path.name}") from None


def get(base: str, cache: Path, of_pypi: bool = False, machine: str = platform.machine()) -> Base:
    """The base for the running Python, from the folder `cache` or downloaded into it.

    `base` is a release of torch (`2.13.0`) for `machine`, the path of a wheel, or `installed`. With
    `of_pypi` a release is compared as a string: 2.13.0 is not the 2.13.0+cpu that another index may
    have.
    """
    graftable(base)
    if base == INSTALLED:
        return _installed()
    if base.endswith(".whl"):
        wheel = Path(base)
    elif (wheel := _find(base, cache, machine)) is None:
        with step(f"download torch {base}") as doing:
            which, equals = f" for this Python ({_tag()})", "===" if of_pypi else "=="
            # pip looks for wheels for this machine, unless it is told of another.
            other = () if machine == platform.machine() else (f"--platform={OTHER}_{machine}",)
            download_wheel(base, cache, doing, which, equals=equals, options=other)
            wheel = _find(base, cache, machine)
            doing.done = wheel.name
    folder = cache / wheel.stem
    if not (folder / UNPACKED).exists():
        with step(f"unpack {wheel.name}") as doing:
            _unpack(wheel, folder, doing)
    return Base(folder)


def graftable(base: str) -> str:
    """Returns `base` if it can be one; raises ForkError otherwise, before anything is made."""
    known = [r["torch"] for r in RELEASES if r.get("graft")]
    if base == INSTALLED:
        _installed()
    elif base.endswith(".whl"):
        _check_wheel(Path(base))
    elif base not in known:
        release = base.partition("+")[0]
        near = [name for name in known if f"{name}.".startswith(f"{release}.")]
        hint = f"; did you mean {near[0]}?" if len(near) == 1 else ""
        names = ", ".join(known)
        raise ForkError(f"torch {base}: not a release that the graft supports: {names}{hint}")
    return base


def _check_wheel(wheel: Path) -> None:
    """Raises ForkError if the user's own wheel is no base for the running Python."""
    if not wheel.is_file():
        raise ForkError(f"{wheel}: no such wheel")
    try:
        name, _, _, tags = parse_wheel_filename(wheel.name)
    except ValueError:
        name = ""
    if name != "torch":
        raise ForkError(f"{wheel}: not a wheel of torch, by its name")
    if tags.isdisjoint(sys_tags()):
        raise ForkError(f"{wheel}: not a wheel for {sys.executable} ({_tag()}) on this machine")
    _check_release(Upstream(wheel), str(wheel))


def _check_release(upstream: Upstream, what: str) -> None:
    known = [r["torch"] for r in RELEASES]
    if str(upstream.release) not in known:
        raise ForkError(f"{what}: not a release that the fork knows: {', '.join(known)}")


def _installed() -> Base:
    """The first pristine torch on the path of the running Python."""
    for found in metadata.distributions(name="torch"):
        if is_grafted(str(found.version)):
            continue
        folder = Path(found.locate_file(""))
        what = f"torch {found.version} in {folder}"
        if "torch/version.py," not in (found.read_text("RECORD") or ""):
            raise ForkError(f"{what}: not installed from a wheel: no RECORD has its files")
        base = Base(folder)
        base.name = f"torch-{base.version}-{_tag()}-{INSTALLED}"  # +cu130 is in no dist-info's name
        _check_release(base.upstream, what)
        return base
    raise ForkError(f"no pristine torch is installed for {sys.executable}: name a release, BASE=")


def rpath(library: Path) -> list[str]:
    """Where the loader looks for what one of the wheel's libraries needs: `$ORIGIN` and others.

    auditwheel adds a place for the libraries that it puts into a wheel. It writes a new string and
    leaves the former one, so the longest counts.
    """
    found = re.findall(rb"\$ORIGIN[^\0]*", library.read_bytes())
    return max(found, key=len).decode().split(":") if found else []


def _tag() -> str:
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def _find(release: str, cache: Path, machine: str) -> Path | None:
    found = [
        *cache.glob(f"torch-{release}-*{_tag()}-*_{machine}.whl"),  # perhaps with a build number
        *cache.glob(f"torch-{release}+*-{_tag()}-*_{machine}.whl"),
    ]
    return sorted(found)[0] if found else None


def _unpack(wheel: Path, folder: Path, doing: Step) -> None:
    try:
        with (
            atomically(folder, folder=True) as partial,
            WheelFile(wheel) as packed,  # compares every file with its hash in RECORD
        ):
            files = packed.infolist()
            total, done = sum(info.file_size for info in files), 0
            for info in files:
                packed.extract(info, partial)
                done += info.file_size
                doing.tell(done=done, total=total)
                if info.external_attr >> 16 & 0o111:
                    (partial / info.filename).chmod(0o755)
            (partial / UNPACKED).touch()
    except (WheelError, zipfile.BadZipFile) as e:
        if wheel.parent != folder.parent:  # the user's own
            raise ForkError(f"{wheel}: broken ({e})") from None
        wheel.unlink()
        raise ForkError(f"{wheel.name}: broken ({e}); removed it, so run this again") from None
    except OSError as e:
        raise ForkError(f"{wheel.name}: cannot be unpacked: {e}") from None
