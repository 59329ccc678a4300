"""The site: the manual in site/ made into pages, and opened in a browser."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click

from commands.course import COURSE, install_extension, with_tools
from fork import paths
from fork.bootstrap import make_venv
from fork.commands import Command
from fork.console import console, run, step
from fork.errors import ForkError
from fork.graft import STAMP, graft_into
from fork.overlay import default_release

BROWSER = {"chromium": "chromium", "chromedriver": "chromium-driver"}  # program -> Debian's package


@click.command(cls=Command, section="Build", example="--test")
@click.option("--test", is_flag=True, help="Then test it in a browser, and run what it shows.")
def site(test: bool) -> None:
    """Build the pages of the manual and the course (`make site`, `make test-site`)."""
    missing = [package for program, package in BROWSER.items() if not shutil.which(program)]
    if test and missing:
        names = " and ".join(missing)
        raise ForkError(f"no browser to test the site in: install the packages {names} (Debian)")
    out = build_site()
    if not test:
        console.print(f"{out}/index.html")
        return
    command = [paths.BUILD / "venv-site" / "bin" / "python", "-m", "pytest", "-q", "site/tests"]
    sys.exit(subprocess.run(command, cwd=paths.ROOT).returncode)


def build_site() -> Path:
    """Builds the pages, with every warning an error, in build/site; returns their folder."""
    venv, out = paths.BUILD / "venv-site", paths.BUILD / "site"
    make_venv(venv, paths.ROOT / "site" / "requirements.txt", COURSE / "requirements.txt")
    graft_into(venv, default_release())
    install_extension(venv)
    shutil.rmtree(out, ignore_errors=True)
    _forget_lessons(venv)
    with step("build the site") as doing:
        sphinx = [venv / "bin" / "python", "-P", "-m", "sphinx", "-W", "--keep-going", "-b", "html"]
        cache = ["-d", paths.BUILD / "site-doctrees"]
        command = [*sphinx, *cache, paths.ROOT / "site", out]
        env = {**os.environ, **with_tools(venv)}
        run(command, paths.BUILD / "site.log", "the site cannot be built", env=env)
        doing.done = f"{len(list(out.rglob('*.html')))} pages"
    return out


def _forget_lessons(venv: Path) -> None:
    """Removes the lessons' pages if they are of another torch, or of other lessons.

    The gallery itself runs a lesson again if its file has changed, and only then.
    """
    pages = paths.ROOT / "site" / "course"
    stamp = pages / ".made-of"
    read = [*(COURSE / "capabilities").rglob("*.py"), *(COURSE / "capabilities").rglob("*.json")]
    read += [COURSE / f"{name}.py" for name in ("drawing", "exercise")]
    lessons = sorted(f.name for f in COURSE.glob("[0-9][0-9]_*.py"))
    about = "\n".join([(venv / STAMP).read_text(), *lessons])
    made_of = paths.digest({file.relative_to(COURSE).as_posix(): file for file in read}, about)
    if not stamp.exists() or stamp.read_text() != made_of:
        shutil.rmtree(pages, ignore_errors=True)
        pages.mkdir()
        stamp.write_text(made_of)
