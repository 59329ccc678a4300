"""Every page of the built site in a browser, at a telephone's width and at a desk's."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import urldefrag, urlsplit

import pytest
from browser import Browser, served

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
PAGES = sorted(
    p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html") if "_static" not in p.parts
)
WIDTHS = (390, 1280)
LESSONS = sorted(p.stem for p in (ROOT / "course").glob("[0-9][0-9]_*.py"))


@pytest.fixture(scope="module")
def browser():
    made = Browser()
    yield made
    made.close()


@pytest.fixture(scope="module")
def site():
    with served(SITE) as address:
        yield address


def test_the_pages_are_there():
    commits = [p.name for p in (ROOT / "stack").iterdir() if p.is_dir()]
    wanted = {"index.html", "install.html", "api.html", "search.html"}
    wanted |= {"notes/attn.html", "notes/attn_operator.html"}
    wanted |= {f"generated/stack/{name}.html" for name in commits}
    wanted |= {f"course/{lesson}.html" for lesson in ("index", *LESSONS)}
    assert wanted <= set(PAGES)


@pytest.fixture(scope="module")
def opened(browser, site):
    """What the browser found on each page, at each width."""
    return {
        (page, width): browser.open(f"{site}/{page}", width) for page in PAGES for width in WIDTHS
    }


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_a_page(opened, page, width):
    """No failed request, no error, nothing from elsewhere, nothing that overflows, all typeset."""
    assert opened[page, width]["faults"] == []


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_lesson_has_a_picture_and_was_run(browser, site, lesson):
    assert browser.open(f"{site}/course/{lesson}.html", WIDTHS[1])["faults"] == []
    assert browser.driver.find_elements("css selector", "article img.sphx-glr-single-img")
    outputs = browser.driver.find_elements("css selector", ".sphx-glr-script-out")
    assert outputs and "Exercise: to do." in outputs[-1].text


def test_the_decision_table(browser, site):
    """Nine cells, and each leads to the place in lesson 1 that has its example."""
    browser.open(f"{site}/course/index.html", WIDTHS[1])
    cells = browser.driver.find_elements("css selector", "table.decision td p:first-child a")
    links = [cell.get_attribute("href") for cell in cells]
    assert len(links) == len({*links}) == 9
    for link in links:
        browser.driver.get(link)
        place = urldefrag(link)[1]
        shown = (
            f"const s = document.getElementById({place!r}); return s.closest('section').innerText"
        )
        assert "gradcheck" in browser.driver.execute_script(shown)


@pytest.mark.parametrize("page", ["index.html", "api.html", "notes/attn.html"])
def test_pages_with_mathematics(opened, page):
    assert opened[page, WIDTHS[0]]["formulas"] > 0


def test_links_lead_somewhere(opened, site):
    ids = {page: set(found["ids"]) for (page, _), found in opened.items()}
    lost = []
    for (page, _), found in opened.items():
        for link in found["lost"]:
            address, anchor = urldefrag(link)
            if not address.startswith(site):
                continue
            target = urlsplit(address).path.lstrip("/") or "index.html"
            if target not in ids:
                if not (SITE / target).is_file():
                    lost.append(f"{page}: {link}: no such page")
            elif anchor and anchor not in ids[target]:
                lost.append(f"{page}: {link}: no such place on it")
    assert lost == []


@pytest.mark.parametrize("word", ["gradgradcheck", "vmap", "roofline", "Stack-commit", "KillHead"])
def test_search(browser, site, word):
    assert browser.open(f"{site}/search.html?q={word}", WIDTHS[1])["faults"] == []
    assert found(browser), f"the search finds no {word}"


def test_search_for_nothing_that_is_there(browser, site):
    browser.open(f"{site}/search.html?q=nosuchwordhere", WIDTHS[1])
    assert not found(browser, seconds=2)


def found(browser, seconds=20):
    """The links that the search shows."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if links := browser.driver.find_elements("css selector", "#search-results li a"):
            return links
        time.sleep(0.1)
    return []


PLANTED = {
    "an image that is missing": ("<img src=missing.png>", "404: "),
    "an image that is none": ("<img src=index.html>", "no image: "),
    "an error": ("<script>nope()</script>", "console: "),
    "too wide": ("<div style='width: 2000px'>x</div>", "wider than 390 pixels by"),
    "from elsewhere": (
        "<script src=http://elsewhere.invalid/x.js></script>",
        "that leaves the site",
    ),
    "not typeset": ("<span class='math'>x^2</span>", "not typeset: x^2"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_fault_is_found(browser, tmp_path, what):
    body, fault = PLANTED[what]
    head = "<!doctype html><link rel=icon href=data:,><title>x</title>"
    (tmp_path / "index.html").write_text(f"{head}<p>fine</p>")
    (tmp_path / "bad.html").write_text(head + body)
    with served(tmp_path) as address:
        assert browser.open(f"{address}/index.html", WIDTHS[0])["faults"] == []
        faults = browser.open(f"{address}/bad.html", WIDTHS[0])["faults"]
    assert any(fault in line for line in faults), faults
