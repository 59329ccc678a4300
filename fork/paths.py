"""Where everything is in a clone; its locks, its hashes, and no half-made or moved folders."""

import fcntl
import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fork import bootstrap
from fork.console import console

ROOT = bootstrap.ROOT
VENV = bootstrap.VENV  # with the torch that the Makefile's first target installs
BUILD = ROOT / "build"  # all else that is made or downloaded
BASES = BUILD / "bases"  # the wheels that are grafted onto
ANCHORS = BUILD / "anchors"  # small wheels, to resolve anchors against
SOURCES = BUILD / "source"  # PyTorch's own


def digest(files: Mapping[str, Path], about: str = "") -> str:
    """Returns a hash of the files by their names, and of what else is said `about` them."""
    made = hashlib.sha256(about.encode())
    for name, file in sorted(files.items()):
        made.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return made.hexdigest()


def set_up(build: Path, source: Path) -> bool:
    """Whether CMake has set up the folder `build` for `source`, both where they are now.

    What CMake writes has their absolute paths, so in a copy Ninja would look at the original.
    """
    try:
        cache = (build / "CMakeCache.txt").read_text(encoding="utf-8")
        places = {"CMAKE_CACHEFILE_DIR": build, "CMAKE_HOME_DIRECTORY": source}
        return (build / "build.ninja").exists() and all(
            place.samefile(re.search(rf"^{name}:INTERNAL=(.*)$", cache, re.M)[1])
            for name, place in places.items()
        )
    except (OSError, TypeError):  # a place that is gone, or a line that a kill kept from there
        return False


@contextmanager
def alone(within: str | Path = "") -> Iterator[None]:
    """Holds the lock of build/ or of a folder in it: the second of two runs waits for the first."""
    folder = BUILD / within
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("  waiting for another run in this clone")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def atomically(place: Path, folder: bool = False) -> Iterator[Path]:
    """Yields a path beside `place` at which to make it, and puts it there once it is complete.

    With `folder` that path is a new folder; otherwise nothing is there yet.
    """
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if folder:
        partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
