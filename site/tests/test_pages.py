"""The built site without a browser: which pages are there."""

from __future__ import annotations

from pathlib import Path

from commands.bench import figures

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"


def test_the_first_page_says_of_which_kernel_its_bars_are():
    text = " ".join((SITE / "index.html").read_text(encoding="utf-8").split())
    states = {path: state for path, _, state in figures()}
    older = "an older kernel" in text
    assert older == (states["bench/published/cpu-lengths.md"] != "this one")
    assert ("of today’s kernel" in text) != older
    assert "cpu-lengths-bars.svg" in text and "cpu-lengths-bars-narrow.svg" in text


def test_the_pages_are_there():
    pages = {p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html")}
    commits = [p.name for p in (ROOT / "stack").iterdir() if p.is_dir()]
    lessons = [p.stem for p in (ROOT / "course").glob("[0-9][0-9]_*.py")]
    wanted = {"index.html", "install.html", "api.html", "search.html"}
    wanted |= {"notes/attn.html", "notes/attn_operator.html", "notes/attn_output.html"}
    wanted |= {f"generated/stack/{name}.html" for name in commits}
    wanted |= {f"course/{lesson}.html" for lesson in ("index", *lessons)}
    assert wanted <= pages
