"""The base of a graft: a pristine PyTorch wheel, downloaded once and unpacked."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import yaml
from wheel.wheelfile import WheelError, WheelFile

from fork.console import run, step
from fork.errors import ForkError
from fork.upstream import Upstream

RELEASES = yaml.safe_load((Path(__file__).parent / "releases.yaml").read_text())


def default_release() -> str:
    return next(r["torch"] for r in RELEASES if r.get("default"))


def suites_release() -> str:
    return next(r["torch"] for r in RELEASES if r.get("suites"))


class Base:
    """A wheel file of PyTorch and the folder it is unpacked in."""

    def __init__(self, wheel: Path, folder: Path):
        self.wheel = wheel
        self.folder = folder
        self.upstream = Upstream(folder)
        self.version = self.upstream.version

    @property
    def grafted_version(self) -> str:
        """`2.13.0+cpu.attn`, or `2.13.0+attn` for a base without a local version."""
        return f"{self.version}{'.' if '+' in self.version else '+'}attn"

    def cmake(self, file: str) -> str:
        """One of the CMake files that the wheel brings, which say how it was compiled."""
        path = self.folder / "torch" / "share" / "cmake" / file
        try:
            return path.read_text()
        except OSError:
            raise ForkError(f"torch {self.version}: the wheel has no {path.name}") from None


def get(release: str, cache: Path) -> Base:
    """The base of `release` for the running Python, from `cache` (a folder) or downloaded into it.

    `release` is a version of torch (`2.13.0`), or the path of a wheel.
    """
    if release.endswith(".whl"):
        wheel = Path(release)
        if not wheel.is_file():
            raise ForkError(f"{release}: no such wheel")
    else:
        known = [r["torch"] for r in RELEASES if r.get("graft")]
        if release not in known:
            raise ForkError(
                f"torch {release}: not a release that the graft supports: {', '.join(known)}"
            )
        wheel = _find(release, cache) or _download(release, cache)
    folder = cache / wheel.stem
    if not (folder / ".complete").exists():
        with step(f"unpack {wheel.name}"):
            _unpack(wheel, folder)
    return Base(wheel, folder)


def _tag() -> str:
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def _find(release: str, cache: Path) -> Path | None:
    found = [
        *cache.glob(f"torch-{release}-{_tag()}-*.whl"),
        *cache.glob(f"torch-{release}+*-{_tag()}-*.whl"),
    ]
    return sorted(found)[0] if found else None


def _download(release: str, cache: Path) -> Path:
    partial = cache / "download"
    shutil.rmtree(partial, ignore_errors=True)
    with step(f"download torch {release}") as doing:
        _pip_download(release, partial, f" for this Python ({_tag()})")
        wheel = next(partial.glob("*.whl"))
        doing.done = wheel.name
    place = cache / wheel.name
    wheel.rename(place)
    partial.rmdir()
    return place


def fetch_anchors(folder: Path) -> None:
    """Downloads into `folder` a small wheel of every supported release, to resolve anchors against.

    The wheels for macOS are a tenth of those for Linux, and hold the same Python, YAML and headers.
    """
    for release in (r["torch"] for r in RELEASES):
        if list(folder.glob(f"torch-{release}-*.whl")):
            continue
        with step(f"download torch {release} for its anchors"):
            platforms = [f"--platform=macosx_{n}_0_arm64" for n in (11, 14)]
            _pip_download(
                release, folder, "", *platforms, "--implementation=cp", "--python-version=3.11"
            )


def _pip_download(release: str, folder: Path, what: str, *options: str) -> None:
    """Downloads torch's wheel into `folder`; `what` says in an error which one it was."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *options]
    run(
        [*pip, "--dest", folder, f"torch=={release}"],
        folder.parent / "download.log",
        f"torch {release}{what} cannot be downloaded",
    )


def _unpack(wheel: Path, folder: Path) -> None:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with WheelFile(wheel) as packed:  # compares every file with its hash in RECORD
            packed.extractall(partial)
        (partial / ".complete").touch()
    except (WheelError, zipfile.BadZipFile) as e:
        wheel.unlink()
        raise ForkError(f"{wheel.name}: broken ({e}); removed it, so run this again") from None
    except OSError as e:
        raise ForkError(f"{wheel.name}: cannot be unpacked: {e}") from None
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
