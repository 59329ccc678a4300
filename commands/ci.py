"""The stages of CI (`.ci/run`), each of which runs if what it reads has changed since it passed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date, timedelta

import click
import yaml

from fork import paths
from fork.commands import Command
from fork.console import console, new_table, output, print_wide
from fork.errors import ForkError
from fork.graft import made_of
from fork.overlay import Stack, default_release, write
from fork.suites import contents, digest

STAGES = ".ci/stages.yaml"
RECORD = ".ci/record.json"
KEPT = timedelta(days=14)  # for so long a stage that passed is left out
REPORTS = "reports/**/*.xml"  # pytest's, below build/


@dataclass(frozen=True)
class Stage:
    """A stage as the file has it, where each field is explained."""

    name: str
    run: str
    reads: tuple[str, ...] = ()
    comments: bool = False
    graft: bool = False
    packages: tuple[str, ...] = ()
    removes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Passed:
    """A stage that passed: of which key, when, and the seconds of its test files."""

    key: str
    on: str
    seconds: int
    files: dict[str, float] = field(default_factory=dict)

    @property
    def is_kept(self) -> bool:
        return date.today() - date.fromisoformat(self.on) <= KEPT


@click.command(cls=Command, section="Test", example="--record --only fork")
@click.option("--record", "writes", is_flag=True, help=f"Write what passes into {RECORD}.")
@click.option("--all", "every", is_flag=True, help="Run each stage, also if it is in the record.")
@click.option("--only", multiple=True, help="Consider this stage only; may be repeated.")
def ci(writes: bool, every: bool, only: tuple[str, ...]) -> None:
    """Run the stages of CI whose inputs have changed since they passed (`.ci/run`).

    The first stage that fails is the last one. Who commits adds --record, and commits the record:
    CI itself leaves out what is in it, for 14 days.
    """
    stages, known = read_stages(), read_record()
    if unknown := {*only} - {stage.name for stage in stages}:
        raise ForkError(f"{unknown.pop()}: no stage of {STAGES}")
    graft = graft_key()
    states, failed = {}, ""
    for stage in stages:
        if failed or (only and stage.name not in only):
            continue
        before, today = known.get(stage.name), key(stage, graft)
        if not every and stage.reads and before and before.key == today and before.is_kept:
            state = f"left out: nothing that it reads has changed since {before.on}"
            states[stage.name] = (state, "")
            console.print(f"== {stage.name}: {state}")
            continue
        console.print(f"== {stage.name}: {stage.run}")
        install(stage.packages)
        start, began = time.monotonic(), time.time()
        status = subprocess.run(stage.run, shell=True, cwd=paths.ROOT).returncode
        seconds = round(time.monotonic() - start)
        free = shutil.disk_usage(paths.ROOT).free / 2**30
        result = "failed" if status else "passed"
        console.print(f"== {stage.name}: {result}, {seconds} s, {free:.0f} GiB of disk left")
        states[stage.name] = (result, f"{seconds / 60:.1f}")
        failed = stage.name if status else ""
        if not status and key(stage, graft) != today:
            console.print(f"== {stage.name}: not recorded, for what it reads changed meanwhile")
        elif not status and writes:
            known = read_record()  # another `.ci/run` may have written meanwhile
            known[stage.name] = Passed(today, str(date.today()), seconds, seconds_of(began))
            write_record({s.name: known[s.name] for s in stages if s.name in known})
        for place in stage.removes:
            shutil.rmtree(paths.ROOT / place, ignore_errors=True)
    table = new_table("CI")
    for head in ("stage", "state", "minutes"):
        table.add_column(head)
    for name, cells in states.items():
        table.add_row(name, *cells)
    print_wide(table)
    if failed:
        console.print(f"error: {failed} failed")
        sys.exit(1)


def read_stages() -> list[Stage]:
    """Returns the stages, in order."""
    found = []
    for entry in yaml.safe_load((paths.ROOT / STAGES).read_text(encoding="utf-8")):
        lists = {k: tuple(entry[k]) for k in ("reads", "packages", "removes") if k in entry}
        try:
            found.append(Stage(**{**entry, **lists}))
        except TypeError as e:
            raise ForkError(f"{STAGES}: {e}") from None
    return found


def read_record() -> dict[str, Passed]:
    """Returns what passed, by stage."""
    file = paths.ROOT / RECORD
    try:
        entries = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return {name: Passed(**entry) for name, entry in entries.items()}
    except (ValueError, TypeError, AttributeError) as e:
        raise ForkError(f"{RECORD}: not as `.ci/run --record` writes it: {e}") from None


def write_record(passed: dict[str, Passed]) -> None:
    text = json.dumps({name: asdict(entry) for name, entry in passed.items()}, indent=1)
    write({RECORD: f"{text}\n".encode()}, paths.ROOT)


def graft_key() -> str:
    """A hash of what the default graft is made of."""
    return digest([default_release()], contents(made_of(paths.ROOT, Stack(paths.ROOT).tree())))


def key(stage: Stage, graft: str) -> str:
    """A hash of all that a stage depends on, never of the record."""
    files = {path: paths.ROOT / path for path in files_of(stage.reads)}
    texts = {p: f.read_bytes() for p, f in files.items()} if stage.comments else contents(files)
    versions = [version(package) for package in stage.packages]
    python = list(sys.version_info[:2])
    return digest([stage.run, versions, python, graft if stage.graft else ""], texts)


def files_of(globs: tuple[str, ...]) -> list[str]:
    """The files of the clone that match; git's ignored ones are none."""
    out = {path for glob in globs if glob.startswith("!") for path in _matching(glob[1:])}
    found = {path for glob in globs if not glob.startswith("!") for path in _matching(glob)}
    return sorted(found - out - {RECORD})


def _matching(glob: str) -> list[str]:
    # One glob a call: git 2.39 finds nothing for some pairs of one to take and one to leave out.
    git = ["git", "-c", "safe.directory=*"]  # the clone may be another user's than root's
    listed = [
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        f":(glob){glob}",
    ]
    found = output([*git, *listed], "git", cwd=paths.ROOT).decode().split("\0")
    return [path for path in found if path and (paths.ROOT / path).is_file()]


def version(package: str) -> str:
    """The version of one of Debian's packages: what is installed, or what would be."""
    for update in (True, False):
        said = output(["apt-cache", "policy", package], "apt").decode()
        found = dict(re.findall(r"^  (Installed|Candidate): (.*)", said, re.M))
        for state in ("Installed", "Candidate"):
            if found.get(state, "(none)") != "(none)":
                return found[state]
        if update:
            output(["apt-get", "update", "-qq"], "apt")
    raise ForkError(f"{package}: Debian has no such package")


def install(packages: Sequence[str]) -> None:
    """Installs those of Debian's packages that are missing."""
    installed = ["dpkg-query", "--show", "--showformat=${db:Status-Status}\n", *packages]
    said = subprocess.run(installed, capture_output=True, text=True).stdout.split()
    if packages and said != ["installed"] * len(packages):
        get = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
        output(get, "apt", env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})


def seconds_of(since: float) -> dict[str, float]:
    """The seconds of each test file by pytest's reports that are newer than that time."""
    found: Counter[str] = Counter()
    for report in paths.BUILD.glob(REPORTS):
        if report.stat().st_mtime >= since:
            for case in ET.parse(report).iter("testcase"):
                found[case.get("file") or report.stem] += float(case.get("time", 0))
    return {file: round(seconds, 1) for file, seconds in found.most_common()}
