"""Puts a grafted wheel into a virtual environment; a kill in the middle spoils nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from fork.base import rpath
from fork.bootstrap import BORROWED
from fork.console import run, step
from fork.errors import ForkError

UNDER_WAY = "installing"


def install(wheel: Path, fingerprint: str, venv: Path) -> None:
    """Installs `wheel` and what it needs in `venv`, unless the stamp there says that it is in."""
    stamp = venv / ".attn-installed"
    site = next(iter(sorted(venv.glob("lib/python3*/site-packages"))), None)
    if site is None:
        raise ForkError(f"{venv}: not a virtual environment")
    before = stamp.read_text() if stamp.exists() else ""
    if before == fingerprint and (site / "torch" / "version.py").exists():
        return
    with step(f"install {wheel.name}"):
        stamp.write_text(UNDER_WAY)
        if before == UNDER_WAY:
            clear(site)
        pip = [venv / "bin" / "python", "-m", "pip", "install", "--no-compile"]
        log = venv / "attn-install.log"
        wrong = f"{wheel.name} cannot be installed in {venv}"
        # The version stays the same from one graft to the next, so pip must be told to replace it.
        run([*pip, "--no-index", "--force-reinstall", "--no-deps", wheel], log, wrong)
        if (site / BORROWED).exists():
            link_libraries(site)  # what torch needs beside itself is there, or nowhere
        else:
            run([*pip, wheel], log, wrong)
        stamp.write_text(fingerprint)


def link_libraries(site: Path) -> None:
    """Puts links beside torch to the borrowed packages whose libraries it loads by their place.

    They are NVIDIA's, and torch loads them first, by a library that has only their places.
    """
    places = rpath(site / "torch" / "lib" / "libtorch_global_deps.so")
    for name in {found[1] for p in places if (found := re.match(r"\$ORIGIN/\.\./\.\./(\w+)", p))}:
        link = site / name
        if link.is_symlink():
            link.unlink()
        for place in (site / BORROWED).read_text().splitlines():
            if not link.exists() and (found := Path(place) / name).is_dir():
                link.symlink_to(found)


def clear(site: Path) -> None:
    """Removes what an install that was killed left behind, which pip would stumble over."""
    for pattern in ("torch", "torchgen", "functorch", "torch-*.dist-info", "~*"):
        for path in site.glob(pattern):
            shutil.rmtree(path)
