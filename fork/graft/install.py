"""A graft put into a virtual environment; a kill in the middle spoils nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from fork import paths
from fork.bootstrap import BORROWED
from fork.console import console, run, step
from fork.errors import ForkError
from fork.graft.base import rpath
from fork.graft.build import Graft, open_graft
from fork.overlay import NATIVE, operators

UNDER_WAY = "installing"


def graft_into(venv: Path, release: str, commit: int | None = None, *, folder: str = "") -> Graft:
    """Grafts commits 1 to `commit` onto `release`, and installs the wheel in `venv`.

    `folder` is the graft's own, which commits may share.
    """
    with paths.alone():
        graft = open_graft(release, commit, folder=folder)
        install(graft.build(), graft.fingerprint, venv)
    return graft


def run_example(graft: Graft, venv: Path) -> int:
    """Runs the lab's example with the torch of `venv`; its exit status.

    Another repository's operators have no example: what they are is printed.
    """
    if NATIVE not in graft.tree:
        number = graft.commit.number
        console.print(f"commit {number} has no operator yet, so there is no example to run")
        return 0
    names = operators(graft.tree[NATIVE])
    if "attn" not in names:
        shown = "; ".join(f"print(torch.ops.aten.{op}.default._schema)" for op in names)
        command = [venv / "bin" / "python", "-P", "-c", f"import torch; {shown}"]
        return subprocess.run(command).returncode
    command = [venv / "bin" / "python", "-m", "fork.graft.example"]
    return subprocess.run(command, cwd=paths.ROOT).returncode


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
