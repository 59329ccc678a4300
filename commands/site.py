"""The site: the manual in site/ made into pages, and opened in a browser."""

import os
import shutil
import sys
from hashlib import md5
from pathlib import Path

import click

from commands.lessons import COURSE, EXTENSION, install_extension, pytest, with_tools
from fork import paths
from fork.bootstrap import make_venv
from fork.commands import Command
from fork.console import console, run, step
from fork.errors import ForkError
from fork.graft import STAMP, graft_into
from fork.overlay import default_release, files_under

BROWSER = {"chromium": "chromium", "chromedriver": "chromium-driver"}  # program -> Debian's package
VENV = paths.BUILD / "venv-site"
TESTS = paths.ROOT / "site" / "tests"
# These test the pages by themselves, and the pages in a browser.
PARTS = {
    "pages": [TESTS / f"test_{name}.py" for name in ("code", "figures", "pages", "statements")],
    "browser": [TESTS / "test_site.py"],
}
# These test the results of the lessons, which must have been run.
LESSONS = [TESTS / "test_downloads.py", TESTS / "test_lesson_pages.py"]


@click.command(cls=Command, section="Build", example="--test")
@click.option("--no-lessons", is_flag=True, help="Run no lesson; show what earlier runs gave.")
@click.option("--test", is_flag=True, help="Then test it in a browser, and run what it shows.")
@click.option("--only", type=click.Choice([*PARTS]), help="Of these tests, one part.")
def site(no_lessons: bool, test: bool, only: str | None) -> None:
    """Build the pages of the manual and the course (`make site`, `make test-site`)."""
    if only and not test:
        raise click.UsageError("--only is for --test")
    missing = [package for program, package in BROWSER.items() if not shutil.which(program)]
    if test and only != "pages" and missing:
        names = " and ".join(missing)
        raise ForkError(f"no browser to test the site in: install the packages {names} (Debian)")
    out = build_site(lessons=not no_lessons)
    if not test:
        console.print(f"{out}/index.html")
        return
    tests = PARTS[only] if only else [*PARTS["pages"], *PARTS["browser"]]
    if not only and not no_lessons:
        tests += LESSONS
    sys.exit(pytest(VENV / "bin" / "python", only or "site", *tests, env=os.environ))


def build_site(lessons: bool = True) -> Path:
    """Builds the pages, with every warning an error, in build/site; returns their folder.

    Each lesson is run unless its results are there. Without `lessons` none is, and the page of
    one that has no results shows its text and code alone.
    """
    out = paths.BUILD / "site"
    make_venv(VENV, paths.ROOT / "site" / "requirements.txt", COURSE / "requirements.txt")
    graft_into(VENV, default_release())
    if lessons:
        install_extension(VENV)
    shutil.rmtree(out, ignore_errors=True)
    _forget_lessons()
    with step("build the site") as doing:
        sphinx = [VENV / "bin" / "python", "-P", "-m", "sphinx", "-W", "--keep-going", "-b", "html"]
        cache = ["-d", paths.BUILD / "site-doctrees"]
        tags = [] if lessons else ["-t", "no_lessons"]
        command = [*sphinx, *cache, *tags, paths.ROOT / "site", out]
        env = {**os.environ, **with_tools(VENV)}
        run(command, paths.BUILD / "site.log", "the site cannot be built", env=env)
        doing.done = f"{len(list(out.rglob('*.html')))} pages"
    return out


def _forget_lessons() -> None:
    """Removes the lessons' pages if they are of another torch, or of other lessons.

    The gallery itself runs a lesson again if its file is not the one of which it has a hash. If
    the file has changed, the hash is removed: a page may be made before the lesson is run again.
    """
    pages = paths.ROOT / "site" / "course"
    stamp = pages / ".made-of"
    read = [*(COURSE / "capabilities").rglob("*.py"), *(COURSE / "capabilities").rglob("*.json")]
    read += [COURSE / f"{name}.py" for name in ("drawing", "exercise")]
    read += [paths.ROOT / "test" / "attn_function.py"]
    read += [EXTENSION / name for name in files_under(EXTENSION, {"build"})]
    lessons = sorted(f.name for f in COURSE.glob("[0-9][0-9]_*.py"))
    about = "\n".join([(VENV / STAMP).read_text(encoding="utf-8"), *lessons])
    made_of = paths.digest({file.relative_to(paths.ROOT).as_posix(): file for file in read}, about)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != made_of:
        shutil.rmtree(pages, ignore_errors=True)
        pages.mkdir()
        stamp.write_text(made_of, encoding="utf-8")
    for name in lessons:
        ran = pages / f"{name}.md5"
        if (
            ran.exists()
            and ran.read_text(encoding="utf-8") != md5((COURSE / name).read_bytes()).hexdigest()
        ):
            ran.unlink()
