"""The site: the manual in site/ made into pages, and opened in a browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from fork import paths
from fork.bootstrap import make_venv
from fork.console import run, step
from fork.errors import ForkError
from fork.graft import graft_into
from fork.overlay import default_release

BROWSER = {"chromium": "chromium", "chromedriver": "chromium-driver"}  # program -> Debian's package


def build_site() -> Path:
    """Builds the pages, with every warning an error, in build/site; returns their folder."""
    venv, out = paths.BUILD / "venv-site", paths.BUILD / "site"
    make_venv(venv, paths.ROOT / "site" / "requirements.txt")
    graft_into(venv, default_release())
    shutil.rmtree(out, ignore_errors=True)
    with step("build the site") as doing:
        sphinx = [venv / "bin" / "python", "-P", "-m", "sphinx", "-W", "--keep-going", "-b", "html"]
        cache = ["-d", paths.BUILD / "site-doctrees"]
        command = [*sphinx, *cache, paths.ROOT / "site", out]
        run(command, paths.BUILD / "site.log", "the site cannot be built")
        doing.done = f"{len(list(out.rglob('*.html')))} pages"
    return out


def run_site() -> int:
    """Builds the site and runs its tests, in a browser; their exit status."""
    missing = [package for program, package in BROWSER.items() if not shutil.which(program)]
    if missing:
        names = " and ".join(missing)
        raise ForkError(f"no browser to test the site in: install the packages {names} (Debian)")
    build_site()
    python = paths.BUILD / "venv-site" / "bin" / "python"
    return subprocess.run([python, "-m", "pytest", "-q", "site/tests"], cwd=paths.ROOT).returncode
