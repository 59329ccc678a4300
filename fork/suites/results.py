"""What became of a suite, as unittest's reports and logs have it."""

from __future__ import annotations

import re
import signal
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten

# Of several entries for one test (subtests), the first of these counts.
OUTCOMES = ("failed", "xfailed", "passed", "skipped")
COUNTS = ("ran", "passed", "skipped", "xfailed", "failed")  # as the tables show them

SUMMARY = re.compile(r"^Ran (\d+) tests? in ", re.M)
# What a file says that ends early, as upstream's do for what a build was made without.
LACKS = re.compile(r"^(.*not available), skipping tests\s*\Z", re.M)
NO_TESTS = 5  # unittest's exit status from Python 3.12 on when nothing was selected


@dataclass
class Result:
    """What became of one suite. The counts are of our own tests; `upstreams` has the others."""

    suite: str
    seconds: float = 0.0
    ours: dict[str, str] = field(default_factory=dict)  # test -> outcome
    upstreams: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)  # failed test -> why, in short
    broken: str = ""  # why the suite as a whole failed, tests aside
    lacks: str = ""  # why all of it was skipped
    log: Path = Path()

    @property
    def ran(self) -> int:
        return len(self.ours)

    @property
    def failed(self) -> int:
        """Failed tests and unexpected successes, and one more for a broken suite."""
        return counts(self.ours, self.broken)["failed"]

    @property
    def ok(self) -> bool:
        return not self.failed and not counts(self.upstreams)["failed"]


def counts(tests: Mapping[str, str], broken: str = "") -> Counter:
    """How many tests ran and ended in each way; a suite that is broken is one failure more."""
    return Counter(tests.values()) + Counter(ran=len(tests), failed=int(bool(broken)))


def tally(results: Iterable[Result]) -> Counter:
    return sum((counts(r.ours, r.broken) for r in results), Counter())


def read_reports(folder: Path, messages: dict[str, str]) -> tuple[dict[str, str], str]:
    """Each test's outcome by upstream's XML reports (xmlrunner's), and what is wrong with these."""
    tests: dict[str, str] = {}
    broken = ""
    for report in sorted(folder.rglob("*.xml")):
        try:
            cases = list(ET.parse(report).iter("testcase"))
        except ET.ParseError as e:
            return tests, f"unreadable report {report.name}: {e}"
        for case in cases:
            name = case.get("name", "")
            outcome, message = read_case(case)
            if not name.startswith("test"):  # not a test but, say, a setUpClass
                if outcome == "failed":
                    broken = f"{name}: {message}"
                continue
            # A subtest is "name (parameters)": it counts for its test.
            test = f"{case.get('classname')}.{name.split(' ')[0]}"
            tests[test] = min(outcome, tests.get(test, outcome), key=OUTCOMES.index)
            if outcome == "failed":
                messages.setdefault(test, message)
    return tests, broken


def read_case(case: ET.Element) -> tuple[str, str]:
    for mark in case:
        if mark.tag in ("failure", "error"):  # an unexpected success is an error here
            return "failed", shorten(mark.get("message") or mark.get("type") or "", 200)
        if mark.tag == "skipped":
            return ("xfailed" if mark.get("type") == "XFAIL" else "skipped"), ""
    return "passed", ""


def fault(status: int, log: str, tests: dict[str, str]) -> str:
    """Why the suite as a whole failed, beyond its tests; empty if it did not."""
    summaries = SUMMARY.findall(log)
    if status < 0:
        return f"killed by signal {-status} ({signal.strsignal(-status)})"
    if not summaries:
        return f"exit status {status} before the end of the tests"
    selected = int(summaries[-1])
    if selected > len(tests):
        return f"{selected} tests ran, but only {len(tests)} are in the report"
    if status and "failed" not in tests.values() and not (status == NO_TESTS and not selected):
        return f"exit status {status} without a failed test"
    return ""
