"""What became of a test file, as pytest's report and exit status have it."""

from __future__ import annotations

import re
import signal
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten

COUNTS = ("ran", "passed", "skipped", "xfailed", "failed")  # as the tables show them

# What a file says that ends early, as upstream's do for what a build was made without.
LACKS = re.compile(r"^(?:collecting \.\.\. )?(.*not available), skipping tests\s*$", re.M)
# Exit statuses of pytest's.
FAILED, INTERNAL_ERROR, NO_TESTS = 1, 3, 5
NO_CLASS = ("", "pytest")  # of an entry for a whole file, and for an error of pytest's own


@dataclass
class Result:
    """What became of one suite: a test file of which some tests ran, or a script."""

    suite: str
    seconds: float = 0.0
    tests: dict[str, str] = field(default_factory=dict)  # Class.test -> outcome
    messages: dict[str, str] = field(default_factory=dict)  # failed test -> why, in short
    broken: str = ""  # why the suite as a whole failed, tests aside
    lacks: str = ""  # why all of it was skipped
    log: Path = Path()

    @property
    def counts(self) -> Counter:
        """How many tests ran and ended in each way; a suite that is broken is one failure more."""
        failed = int(bool(self.broken))
        return Counter(self.tests.values()) + Counter(ran=len(self.tests), failed=failed)

    @property
    def ok(self) -> bool:
        return not self.counts["failed"]


def tally(results: Iterable[Result]) -> Counter:
    return sum((result.counts for result in results), Counter())


def read(result: Result, status: int, report: Path) -> None:
    """Fills in what pytest's report has of a file's tests, and what is wrong beside them."""
    try:
        cases = [*ET.parse(report).iter("testcase")] if report.exists() else []
    except ET.ParseError as e:
        result.broken = f"unreadable report: {e}"
        return
    for case in cases:
        owner = (case.get("classname") or "").rpartition(".")[2]
        if owner not in NO_CLASS:
            test = f"{owner}.{case.get('name')}"
            result.tests[test], message = _outcome(case)
            if message:
                result.messages[test] = message
        elif case.find("skipped") is not None:
            result.lacks = case.findtext("skipped").rpartition("SkipTest: ")[2].rstrip("')")
        else:
            result.broken = case.findtext("error").rstrip().rpartition("\n")[2]
    # An older pytest makes an error of a file that exits.
    if (status == INTERNAL_ERROR or result.broken == "SystemExit: 0") and (
        found := LACKS.search(result.log.read_text(errors="replace", encoding="utf-8"))
    ):
        result.lacks = found[1]
    if result.lacks:
        result.tests, result.broken = {result.suite: "skipped"}, ""
    elif status < 0:
        result.broken = f"killed by signal {-status} ({signal.strsignal(-status)})"
    elif not cases and status != NO_TESTS:
        result.broken = f"exit status {status} before the end of the tests"
    elif status not in (0, NO_TESTS) and (status != FAILED or result.ok):
        result.broken = result.broken or f"exit status {status} without a failed test"


def _outcome(case: ET.Element) -> tuple[str, str]:
    """How a test ended, and why it failed; of its subtests, the first that failed counts."""
    for mark in case:
        if mark.tag in ("failure", "error"):  # an unexpected success is a failure here
            return "failed", shorten(mark.get("message") or "", 200) or "no message"
    mark = case.find("skipped")
    if mark is None:
        return "passed", ""
    return ("xfailed" if mark.get("type") == "pytest.xfail" else "skipped"), ""
