"""Installs a graft in a virtual environment; a kill in the middle does no harm."""

import csv
import re
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

from wheel.wheelfile import urlsafe_b64encode

from fork import paths
from fork.bootstrap import BORROWED
from fork.console import console, run, step
from fork.errors import ForkError
from fork.graft.base import ADDED, rpath
from fork.graft.build import THIS_MACHINE, Graft, Toolchain, open_graft
from fork.overlay import NATIVE, files_under, operators

STAMP = ".graft-installed"  # in an environment: the fingerprint of the graft in it
UNDER_WAY = "installing"


def graft_into(
    venv: Path,
    base: str,
    commit: int | None = None,
    *,
    folder: str = "",
    toolchain: Toolchain = THIS_MACHINE,
) -> Graft:
    """Grafts commits 1 to `commit` onto `base`, and installs the wheel in `venv`.

    `folder` is the graft's own, which commits may share: from one to the next, only the files that
    differ are installed.
    """
    with paths.alone():
        graft = open_graft(base, commit, folder=folder, toolchain=toolchain)
        if not (folder and exchange(graft, venv)):
            install(graft.build(), graft.fingerprint, venv)
    return graft


def exchange(graft: Graft, venv: Path) -> bool:
    """Makes the graft of the same base that `venv` has this one; False if it has none.

    Only what differs is written, in seconds: to pack and install all of a wheel takes a minute or
    more, and Python would compile all of torch again.
    """
    stamp, base = venv / STAMP, graft.base
    before = stamp.read_text(encoding="utf-8") if stamp.exists() else UNDER_WAY
    info = f"torch-{base.grafted_version}.dist-info/RECORD"
    record = next(iter(venv.glob(f"lib/python3*/site-packages/{info}")), None)
    if record is None or before == UNDER_WAY:
        return False
    if before == graft.fingerprint:
        return True
    graft.make()
    with step("install what differs") as doing:
        stamp.write_text(UNDER_WAY, encoding="utf-8")
        site, rows = record.parent.parent, _rows(record.read_text(encoding="utf-8"))
        of_base = _rows(base.record)
        wanted = {path: (base.folder / path, of_base[path]) for path in base.files()}
        for path in files_under(graft.stage):
            content = (graft.stage / path).read_bytes()
            digest = urlsafe_b64encode(sha256(content).digest()).decode()
            wanted[path] = (graft.stage / path, [f"sha256={digest}", str(len(content))])
        # The files that describe the wheel, and pip's own, are the same for every graft of a base.
        same = re.compile(rf"torch-[^/]+\.dist-info/.*|{ADDED.pattern}")
        wanted = {path: of for path, of in wanted.items() if not same.fullmatch(path)}
        changed = [path for path, (_, row) in wanted.items() if rows.get(path) != row]
        gone = [path for path in rows if path not in wanted and not same.fullmatch(path)]
        for path in changed:
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(wanted[path][0], site / path)  # with a new time: Python compiles it again
        for path in gone:
            (site / path).unlink(missing_ok=True)
            del rows[path]
        rows |= {path: wanted[path][1] for path in changed}
        with record.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([p, *row] for p, row in rows.items())
        stamp.write_text(graft.fingerprint, encoding="utf-8")
        doing.done = f"{len(changed) + len(gone)} files"
    return True


def _rows(record: str) -> dict[str, list[str]]:
    """Returns the hash and the size of each path in a RECORD."""
    return {row[0]: row[1:] for row in csv.reader(record.splitlines()) if row}


def run_example(graft: Graft, venv: Path) -> int:
    """Runs example.py with the torch of `venv`; its exit status.

    A repository without one has its operators' schemas printed.
    """
    if NATIVE not in graft.tree:
        number = graft.commit.number
        console.print(f"commit {number} has no operator yet, so there is no example to run")
        return 0
    what = [paths.ROOT / "example.py"]
    if not what[0].exists():
        names = operators(graft.tree[NATIVE])
        shown = "; ".join(f"print(torch.ops.aten.{op}.default._schema)" for op in names)
        what = ["-c", f"import torch; {shown}"]
    return subprocess.run([venv / "bin" / "python", "-P", *what]).returncode


def install(wheel: Path, fingerprint: str, venv: Path) -> None:
    """Installs `wheel` and what it needs in `venv`, unless the stamp there says that it is in."""
    stamp = venv / STAMP
    site = next(iter(sorted(venv.glob("lib/python3*/site-packages"))), None)
    if site is None:
        raise ForkError(f"{venv}: not a virtual environment")
    before = stamp.read_text(encoding="utf-8") if stamp.exists() else ""
    if before == fingerprint and (site / "torch" / "version.py").exists():
        return
    with step(f"install {wheel.name}"):
        stamp.write_text(UNDER_WAY, encoding="utf-8")
        if before == UNDER_WAY:
            clear(site)
        pip = [venv / "bin" / "python", "-m", "pip", "install", "--no-compile"]
        log = venv / "graft-install.log"
        wrong = f"{wheel.name} cannot be installed in {venv}"
        # The version stays the same from one graft to the next, so pip must be told to replace it.
        run([*pip, "--no-index", "--force-reinstall", "--no-deps", wheel], log, wrong)
        if (site / BORROWED).exists():
            link_libraries(site)  # torch's dependencies are there, or nowhere
        else:
            run([*pip, wheel], log, wrong)
        stamp.write_text(fingerprint, encoding="utf-8")


def link_libraries(site: Path) -> None:
    """Puts links beside torch to the borrowed packages whose libraries it loads by their place.

    They are NVIDIA's, and torch loads them first, by a library that has only their places.
    """
    places = rpath(site / "torch" / "lib" / "libtorch_global_deps.so")
    for name in {found[1] for p in places if (found := re.match(r"\$ORIGIN/\.\./\.\./(\w+)", p))}:
        link = site / name
        if link.is_symlink():
            link.unlink()
        for place in (site / BORROWED).read_text(encoding="utf-8").splitlines():
            if not link.exists() and (found := Path(place) / name).is_dir():
                link.symlink_to(found)


def clear(site: Path) -> None:
    """Removes what an install that was killed left behind, which pip would stumble over."""
    for pattern in ("torch", "torchgen", "functorch", "torch-*.dist-info", "~*"):
        for path in site.glob(pattern):
            shutil.rmtree(path)
