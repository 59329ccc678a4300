"""The releases of PyTorch that the fork supports (releases.yaml), and their wheels from pip."""

import os
import re
import sys
from importlib import metadata
from pathlib import Path

import yaml
from packaging.version import Version

from fork.console import Step, run, step

RELEASES = yaml.safe_load((Path(__file__).parent / "releases.yaml").read_text(encoding="utf-8"))
# The first pip that reports a download's progress for programs: the bytes that are here, and all.
RAW = Version("24.1")
PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def default_release() -> str:
    return next(r["torch"] for r in RELEASES if r.get("default"))


def suites_release() -> str:
    return next(r["torch"] for r in RELEASES if r.get("suites"))


def download_wheel(
    release: str,
    folder: Path,
    doing: Step,
    what: str = "",
    *,
    options: tuple[str, ...] = (),
    equals: str = "==",
    env: dict | None = None,
) -> None:
    """Downloads torch's wheel into `folder`; `what` says in an error which one it was.

    `doing` is told how many of its bytes are here.
    """

    def tell(line: str) -> None:
        if found := PROGRESS.match(line):
            doing.tell(done=int(found[1]), total=int(found[2]))

    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *options]
    if Version(metadata.version("pip")) >= RAW:
        pip.append("--progress-bar=raw")
    run(
        [*pip, "--dest", folder, f"torch{equals}{release}"],
        folder.parent / "download.log",
        f"torch {release}{what} cannot be downloaded",
        line=tell,
        env=env,
    )


def fetch_anchors(folder: Path) -> None:
    """Downloads into `folder` a small wheel of every supported release, to resolve anchors against.

    The wheels for macOS are a tenth of those for Linux, and hold the same Python, YAML and headers.
    """
    for release in (r["torch"] for r in RELEASES):
        if list(folder.glob(f"torch-{release}-*.whl")):
            continue
        with step(f"download torch {release} for its anchors") as doing:
            platforms = [f"--platform=macosx_{n}_0_arm64" for n in (11, 14)]
            python = ("--implementation=cp", "--python-version=3.11")
            # A user's constraints do not matter: these wheels are read, not installed.
            free = os.environ | {"PIP_CONSTRAINT": os.devnull}
            download_wheel(release, folder, doing, options=(*platforms, *python), env=free)
