"""The built site without a browser: which pages are there."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"


def test_the_pages_are_there():
    pages = {p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html")}
    commits = [p.name for p in (ROOT / "stack").iterdir() if p.is_dir()]
    lessons = [p.stem for p in (ROOT / "course").glob("[0-9][0-9]_*.py")]
    wanted = {"index.html", "install.html", "api.html", "search.html"}
    wanted |= {"notes/attn.html", "notes/attn_operator.html", "notes/attn_output.html"}
    wanted |= {f"generated/stack/{name}.html" for name in commits}
    wanted |= {f"course/{lesson}.html" for lesson in ("index", *lessons)}
    assert wanted <= pages
