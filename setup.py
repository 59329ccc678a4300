"""Builds the grafted wheel: `pip wheel --no-deps .`

BASE names another base (a release, the path of a release's wheel, or `installed`),
COMMIT an earlier commit.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from packaging.metadata import parse_email  # noqa: E402

from fork.errors import ForkError  # noqa: E402
from fork.graft import open_graft  # noqa: E402
from fork.overlay import default_release  # noqa: E402


class GraftWheel(bdist_wheel):
    """Builds the graft instead of setuptools' own wheel."""

    def run(self) -> None:
        made = graft.build(compress=True)
        place = Path(self.dist_dir) / made.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, place)
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        self.distribution.dist_files.append(("bdist_wheel", python, str(place)))


try:
    commit = os.environ.get("COMMIT") or None
    if commit and not commit.isdigit():
        raise ForkError(f"COMMIT={commit}: not the number of a commit")
    release = os.environ.get("BASE") or default_release()
    graft = open_graft(release, int(commit) if commit else None)
    metadata, _ = parse_email((graft.base.dist_info / "METADATA").read_bytes())
    setup(
        name="torch",
        version=graft.base.grafted_version,
        install_requires=metadata.get("requires_dist", []),
        packages=[],
        cmdclass={"bdist_wheel": GraftWheel},
    )
except ForkError as e:
    raise SystemExit(f"error: {e}") from None
