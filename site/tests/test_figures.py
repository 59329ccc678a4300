"""Minutes, sizes, counts and lists of commits: each page has what the code and the records have."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from test_code import LESSONS, PAGES, name, prose

from commands import bench, ci, extension
from fork.overlay import Stack, default_release
from fork.suites import LAB, Plan

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "course" / "capabilities"))
import probes  # noqa: E402
import run  # noqa: E402

STACK = Stack(ROOT)
TESTING, README, PACKAGE = "site/testing.md", "README.md", "extension/README.md"
LAB_LESSON, LAST_LESSON = "course/13_lab.py", "course/16_capabilities.py"
WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven"),
    *("eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
TEXTS = {name(page): prose(page) for page in PAGES}
# These say minutes too.
TEXTS |= {
    file: (ROOT / file).read_text(encoding="utf-8")
    for file in ("bench/lengths.py", "bench/ring.py", "commands/bench.py", "commands/ci.py")
}


def read(pattern, file):
    return re.search(pattern, (ROOT / file).read_text(encoding="utf-8"))[1]


def loaded(file):
    return json.loads((ROOT / file).read_text(encoding="utf-8"))


def number(text):
    return float(WORDS.index(text) if text in WORDS else text)


def said(page, pattern):
    """What the page says in the one place, or in places that agree, where the pattern is."""
    found = {*re.findall(pattern, " ".join(TEXTS[page].split()))}
    assert len(found) == 1, f"{page} says {found or 'nothing'} of {pattern}"
    return found.pop()


COUNT = r"(\w+)"
SIZE = r"([\d.]+)"
MINUTES = r"([\d.]+ to [\d.]+) minutes"
# What is the case, if the code or a record has it, and where the pages say so.
FACTS = {
    "a graft's minutes": (
        None,
        {
            README: rf"`make attn` takes {MINUTES}",
            "site/install.md": rf"it takes {MINUTES}",
            "site/index.md": rf"wheel in {MINUTES}",
            "site/ways.md": rf"to set up \| {MINUTES}",
        },
    ),
    "the commit that is grafted": (
        STACK.commits[-1].folder.name,
        dict.fromkeys((README, "site/install.md"), r"overlay, commit (\S+), on"),
    ),
    "what a graft compiles": (
        None,
        dict.fromkeys((README, "site/install.md"), r"\+ compile: (\d+) steps"),
    ),
    "the default release": (
        default_release(),
        dict.fromkeys((README, "site/install.md"), rf"\+ download torch {SIZE}:"),
    ),
    "the grafted wheel's size": (
        None,
        {
            **dict.fromkeys((README, "site/install.md"), r"linux_x86_64.whl, (\d+) MB"),
            "site/ways.md": r"size \| (\d+) MB",
        },
    ),
    "the package's size": (
        None,
        {
            README: rf"a wheel of {SIZE} MB",
            "site/ways.md": rf"all of torch \| {SIZE} MB",
            PACKAGE: rf"one wheel of {SIZE} megabytes",
        },
    ),
    "the package's releases": (
        len(extension.TESTED),
        {
            PACKAGE: rf"tests it on {COUNT} releases",
            "site/ways.md": rf"tests it on {COUNT} releases",
            TESTING: rf"one wheel on {COUNT} releases",
        },
    ),
    "the oldest Python": (
        read(r'requires-python = ">=([\d.]+)"', "extension/pyproject.toml"),
        {
            README: r"CPython (\d\.\d+) or newer",
            "site/install.md": r"CPython (\d\.\d+) or newer",
            "site/ways.md": r"CPython (\d\.\d+) and newer",
            PACKAGE: r"CPython (\d\.\d+) and newer",
        },
    ),
    "lessons": (
        len(LESSONS),
        {
            README: rf"{COUNT} lessons that run",
            "site/index.md": rf"{COUNT} lessons that run",
            "course/GALLERY_HEADER.rst": rf"operator of PyTorch: {COUNT} lessons",
        },
    ),
    "notes": (
        len([*(ROOT / "docs/source/notes").glob("*.md")]),
        {README: rf"\[{COUNT} notes\]"},
    ),
    "routes": (
        len(run.ROUTES),
        {"site/capabilities.md": rf"by {COUNT} routes", LAST_LESSON: rf"{COUNT} \*routes\*"},
    ),
    "probes": (
        len(probes.PROBES),
        {"site/capabilities.md": rf"{COUNT} probes", LAST_LESSON: rf"{COUNT} \*probes\*"},
    ),
    "releases of the table of capabilities": (
        len([*(ROOT / "course/capabilities/published").glob("*.json")]),
        {LAST_LESSON: rf"what came out, on {COUNT} releases"},
    ),
    "the lab's suites": (
        len(LAB),
        {TESTING: rf"the lab's {COUNT} suites", LAB_LESSON: rf"the lab's {COUNT} files"},
    ),
    "xfails of the explicit operator": (
        STACK.debts(4).total(),
        {"site/stack.md": rf"{COUNT} xfails, each"},
    ),
    "GB of the suites' download": (
        None,
        {TESTING: rf"a download of {SIZE} GB", LAB_LESSON: rf"downloads {SIZE} GB"},
    ),
    "GB of the suites' disk": (
        None,
        {TESTING: rf"own \({SIZE} GB of disk", LAB_LESSON: rf"takes {SIZE} GB of disk"},
    ),
    "minutes of the suites": (
        None,
        {
            TESTING: rf"\| {COUNT} minutes from nothing, and a download",
            LAB_LESSON: rf"of disk and {COUNT} minutes",
        },
    ),
    "minutes of CI for commits": (
        int(read(r"test-stack MINUTES=(\d+)", ".ci/stages.yaml")),
        {TESTING: rf"CI gives them {COUNT} minutes"},
    ),
    "days that CI's record counts": (
        ci.KEPT.days,
        {TESTING: r"older than (\d+) days", "commands/ci.py": r"in it, for (\d+) days"},
    ),
    "minutes of bench-gpu": (
        bench.MINUTES,
        {
            "site/speed.md": rf"planned for {COUNT} minutes",
            "commands/bench.py": rf"Planned for {COUNT} minutes",
        },
    ),
    "minutes of random shapes": (
        int(read(r'"--sweep", "(\d+)"', "commands/bench.py")) / 60,
        {"site/speed.md": rf"`make bench` does so for {COUNT} minutes"},
    ),
    "minutes of lengths": (
        None,
        {"site/lengths.md": r"in about (\d+) minutes", "bench/lengths.py": r", (\d+) minutes"},
    ),
    "minutes of the ring": (
        None,
        {"site/ring.md": rf"machine, in {COUNT} minutes", "bench/ring.py": rf", {COUNT} minutes"},
    ),
    "GFLOP/s of the peak": (
        round(loaded(f"{bench.PUBLISHED}/cpu-lengths.json")["peak"] / 1e9),
        {"site/lengths.md": r"of multiply-adds, (\d+) GFLOP/s"},
    ),
    "MiB of an attn that is replaced": (
        int(read(r"attn_output_min_bytes = (\d+) << 20", "torch/_inductor/config.edit.py")),
        {"site/use.md": r"an `attn` of (\d+) MiB"},
    ),
}


@pytest.mark.parametrize("fact", FACTS)
def test_pages_agree(fact):
    """With each other, and with what is the case."""
    truth, places = FACTS[fact]
    found = {page: said(page, pattern) for page, pattern in places.items()}
    if isinstance(truth, str) or truth is None:
        assert {*found.values()} == {truth or found[next(iter(places))]}, found
    else:
        assert {number(x) for x in found.values()} == {truth}, found


def seconds(*stages):
    """What CI's stages took, by its record."""
    record = ci.read_record()
    return [sum(record[stage].seconds for stage in stages)]


# A row of the table of commands, which begins so: what its last column says, and what was measured.
RECORDED = {
    "`make test`": (rf"{COUNT} to {COUNT} minutes", seconds("fork", "operator", "stack")),
    "`make test-upstream`": (rf"{COUNT} minutes from nothing", seconds("upstream")),
    "`make course`": (
        rf"{COUNT} minutes; {COUNT} from nothing",
        seconds("lessons", "operators"),
    ),
    "`make test-site`": (rf"{COUNT} with `LESSONS=no`", seconds("pages", "browser")),
    "`make test-releases`": (
        r"(\d+) to (\d+) minutes a release",
        [entry["seconds"] for entry in loaded("stack/releases.json").values()],
    ),
}


@pytest.mark.parametrize("command", RECORDED)
def test_minutes_are_those_of_the_record(command):
    """Within a quarter, and a minute; a run that found some of it built took less."""
    pattern, recorded = RECORDED[command]
    (row,) = (x for x in TEXTS[TESTING].splitlines() if x.startswith(f"| {command} |"))
    found = [number(x) for x in re.search(pattern, row.split(" | ")[2]).groups()]
    if "from nothing" not in pattern:
        assert min(found) * 0.75 - 1 < min(recorded) / 60, command
    assert max(recorded) / 60 < max(found) * 1.25 + 1, command


def numbers(text):
    """Of "1, 2" and of "5 to 7" each number."""
    for part in text.split(", "):
        first, _, last = part.partition(" to ")
        yield from range(int(first), int(last or first) + 1)


def test_the_table_of_the_stack_has_each_commit_once():
    rows = re.findall(r"^\| (\d[\d, to]*) \|", TEXTS["site/stack.md"], re.M)
    assert [x for row in rows for x in numbers(row)] == [c.number for c in STACK.commits]


def test_the_list_of_commits_that_the_suites_test():
    listed = [*numbers(said(TESTING, r"beside its kernels \((\d[^)]*)\)"))]
    plans = {c.number: Plan.of(STACK, c).upstream for c in STACK.commits[:-1]}
    assert listed == [number for number, suites in plans.items() if suites.keys() >= LAB.keys()]


def test_the_table_of_the_tip_adds_up():
    """Its total, and what the text below says of it."""
    table = re.findall(r"^ (\S+\.py|total) +(\d+) +(\d+) +(\d+) ", TEXTS[TESTING], re.M)
    *files, total = ([int(x) for x in counts] for _, *counts in table)
    assert [sum(column) for column in zip(*files, strict=True)] == total
    ran, passed, skipped = total
    assert said(TESTING, r"(\d+) passed, 0 failed") == str(passed)
    assert said(TESTING, r"The (\d+) that are \*skipped\*") == str(skipped)
    reasons = said(TESTING, r"every operator of its kind has: (.*?every operator \(\d+\))")
    assert 2 * sum(map(int, re.findall(r"\((\d+)\)", reasons))) == skipped == ran - passed


def test_what_no_record_has_is_dated():
    """A build of all of PyTorch is not repeated: its counts are of the stack of a day."""
    for part in TEXTS["site/source.md"].split("\n\n"):
        if re.search(r"\b\d+ (of the operator's own|steps, [\d.]+ min)", part):
            assert re.search(r"\b20\d\d-\d\d-\d\d\b", part), part
