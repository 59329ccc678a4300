"""The lessons' pages: each was run, and has what the lesson drew and printed."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "build" / "site" / "course"
LESSONS = sorted(p.stem for p in (ROOT / "course").glob("[0-9][0-9]_*.py"))


class Results(HTMLParser):
    """The files of the pictures on a lesson's page, and what is printed there."""

    def __init__(self, page: str):
        super().__init__()
        self.pictures: list[str] = []
        self.printed: list[str] = []
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        classes = (dict(attrs).get("class") or "").split()
        if "sphx-glr-single-img" in classes:
            self.pictures.append(dict(attrs)["src"])
        if "sphx-glr-script-out" in classes:
            self.printed.append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "pre"

    def handle_data(self, data):
        if self.inside:
            self.printed[-1] += data


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_lesson_was_run_and_has_a_picture(lesson):
    found = Results((PAGES / f"{lesson}.html").read_text(encoding="utf-8"))
    assert found.pictures and all((PAGES / picture).is_file() for picture in found.pictures)
    assert found.printed, "it was not run"
    last = found.printed[-1].strip().splitlines()[-1]
    assert last.startswith(("Exercise: to do. Fill in `", "Exercise: solved.")), last


def test_results_are_seen():
    printed = "<div class='sphx-glr-script-out x'><pre><span>a</span> &lt; b\n</pre></div> c"
    found = Results(f"<p>text<img class='x sphx-glr-single-img' src='p.png'/><img>{printed}")
    assert found.pictures == ["p.png"] and found.printed == ["a < b\n"]
