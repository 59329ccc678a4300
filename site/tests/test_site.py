"""Every page of the built site in a browser, at a telephone's width and at a desk's."""

from __future__ import annotations

import re
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
NARROW, DESK = 390, 1280
WIDTHS = (NARROW, 768, 1075, DESK, 1320)  # at 1072 and 1312 pixels a list of links comes or goes
THEMES = ("light", "dark")


@pytest.fixture(scope="module")
def browser():
    made = Browser()
    yield made
    made.close()


@pytest.fixture(scope="module")
def site():
    with served(SITE) as address:
        yield address


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


def test_the_decision_table(browser, site):
    """Nine cells, and each leads to the place in lesson 1 that has its example."""
    browser.open(f"{site}/course/index.html", DESK)
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


CARDS = """return [...document.querySelectorAll("table.cards tbody tr")].map(row =>
    [...row.cells].map(cell => [getComputedStyle(cell, "::before").content, cell.innerText,
                                cell.scrollWidth - cell.clientWidth]));"""


@pytest.mark.parametrize(
    "page", ["course/index.html", "generated/series.html", "stack.html", "ways.html"]
)
def test_a_row_is_a_card_on_a_narrow_page(browser, site, page):
    """Each cell has its column's name and is as wide as what it says; at a desk it is a table."""
    browser.open(f"{site}/{page}", NARROW)
    heads = "return document.querySelector('table.cards thead').offsetWidth"
    assert browser.driver.execute_script(heads) == 0
    cards = browser.driver.execute_script(CARDS)
    assert cards and all(wide <= 0 for card in cards for *_, wide in card)
    assert all(name.strip('"') for card in cards for name, said, _ in card[1:] if said)
    browser.open(f"{site}/{page}", DESK)
    assert browser.driver.execute_script(heads) > 0
    assert {name for card in browser.driver.execute_script(CARDS) for name, *_ in card} == {"none"}


CELLS = """return [...document.querySelectorAll("table.capabilities tbody tr")].map(row =>
    [...row.cells].filter(cell => cell.offsetWidth).map(cell => cell.innerText.trim()));"""


def test_the_capabilities_are_sorted_by_one(browser, site):
    """Yes first, then no, then silently wrong; by the same head again, as they were."""
    browser.open(f"{site}/capabilities.html", DESK)
    before = browser.driver.execute_script(CELLS)
    assert len(before) == 11 and {len(row) for row in before} == {21}
    head = browser.driver.find_element("css selector", "th[data-probe=forward_ad] button")
    head.click()
    column = [row[3] for row in browser.driver.execute_script(CELLS)]
    ranks = ["✓✗≠".index(cell[0]) for cell in column]
    assert ranks == sorted(ranks) and {*ranks} == {0, 1, 2}
    assert head.find_element("xpath", "..").get_attribute("aria-sort") == "ascending"
    head.click()
    assert browser.driver.execute_script(CELLS) == before


def test_a_narrow_page_shows_one_capability_in_words(browser, site):
    browser.open(f"{site}/capabilities.html", NARROW)
    rows = browser.driver.execute_script(CELLS)
    assert len(rows) == 11 and all(len(row) == 2 and "yes" in row[1] for row in rows)
    choose = """const choice = document.getElementById("capability");
        choice.value = "forward_ad";
        choice.dispatchEvent(new Event("change"));"""
    browser.driver.execute_script(choose)
    words = {
        row[1].split("Δ")[-1].strip("✓✗≠ ").split(",")[0]
        for row in browser.driver.execute_script(CELLS)
    }
    assert words == {"yes", "no", "silently wrong"}


# One of each kind.
KINDS = (
    *("index.html", "use.html", "testing.html", "api.html", "notes/attn.html", "search.html"),
    *("capabilities.html", "generated/capability-sources.html"),
    *("generated/series.html", "generated/stack/16-cpp.html", "genindex.html"),
    *("course/index.html", "course/05_kill_head.html", "course/10_cpp_extension.html"),
)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("page", KINDS)
def test_what_axe_finds(browser, site, page, theme):
    """Contrast of at least 4.5, landmarks with names, and its other rules."""
    found = []
    for width in (NARROW, DESK):
        browser.open(f"{site}/{page}", width, theme)
        found += browser.axe()
    assert found == []


@pytest.mark.parametrize("page", [page for page in PAGES if "/stack/" not in page])
def test_no_code_is_cut_at_a_desk(opened, page):
    """But the diffs, whose lines are as long as upstream's linters let them be."""
    assert opened[page, DESK]["cut"] == []


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    ("page", "box"),
    [("use.html", ".highlight pre"), ("index.html", ".highlight pre")],
)
def test_what_is_cut_has_a_shade(browser, site, page, box, theme):
    """At the edge beyond which there is more; each edge is looked at above the text."""
    browser.open(f"{site}/{page}", NARROW, theme)
    for share, shaded in ((0, [False, True]), (0.5, [True, True]), (1, [True, False])):
        scroll = """const box = document.querySelector(arguments[0]);
            box.scrollLeft = arguments[1] * (box.scrollWidth - box.clientWidth);"""
        browser.driver.execute_script(scroll, box, share)
        picture = browser.picture(box)
        left, ground, right = (
            picture.getpixel((column, 1)) for column in (1, picture.width // 2, picture.width - 2)
        )
        assert [abs(edge - ground) > 15 for edge in (left, right)] == shaded


@pytest.mark.parametrize(
    ("page", "plots"),
    [
        ("index.html", 1),
        ("speed.html", 2),
        ("lengths.html", 1),
        ("fields.html", 2),
        ("ring.html", 1),
    ],
)
def test_plots_are_of_the_page_s_width(browser, site, page, plots):
    """Each is shown once, and at a telephone's width its letters are nearly as large as drawn."""
    for width, scale in ((NARROW, 0.9), (DESK, 0.55)):
        browser.open(f"{site}/{page}", width)
        shown = """return [...document.querySelectorAll("article img")]
            .filter(image => image.clientWidth).map(image => image.width / image.naturalWidth);"""
        scales = browser.driver.execute_script(shown)
        assert len(scales) == plots and min(scales) >= scale


@pytest.mark.parametrize(
    ("page", "picture"),
    [
        ("course/index.html", ".sphx-glr-thumbcontainer img"),
        ("index.html", "article img"),
    ],
)
def test_pictures_are_dark_on_a_dark_page(browser, site, page, picture):
    shades = {}
    for theme in THEMES:
        browser.open(f"{site}/{page}", DESK, theme)
        shades[theme] = max(browser.picture(picture).getcolors())[1]  # that of most pixels
    assert shades["light"] > 240 and shades["dark"] < 40


@pytest.mark.parametrize("page", ["index.html", "api.html", "notes/attn.html"])
def test_pages_with_mathematics(opened, page):
    assert opened[page, NARROW]["formulas"] > 0


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
    assert browser.open(f"{site}/search.html?q={word}", DESK)["faults"] == []
    assert found(browser), f"the search finds no {word}"


def test_the_manual_is_found_before_the_diffs(browser, site):
    browser.open(f"{site}/search.html?q=vmap", DESK)
    pages = [urlsplit(link.get_attribute("href")).path for link in found(browser)]
    assert {*pages[:2]} == {"/use.html", "/api.html"}
    diffs = ["/stack/" in page for page in pages]
    assert any(diffs) and diffs == sorted(diffs)


def test_the_page_that_is_called_so_is_found_first(browser, site):
    """And no excerpt has TeX in it."""
    browser.open(f"{site}/search.html?q=gradcheck", DESK)
    assert urlsplit(found(browser)[0].get_attribute("href")).path == "/course/06_gradcheck.html"
    end = time.monotonic() + 20
    excerpts = []
    while len(excerpts) < 5 and time.monotonic() < end:  # each page is fetched
        excerpts = browser.driver.find_elements("css selector", "#search-results p.context")
        time.sleep(0.5)
    said = "\n".join(excerpt.text for excerpt in excerpts)
    assert len(excerpts) >= 5 and not re.search(r"\\[a-z(\[]", said), said


def test_search_for_nothing_that_is_there(browser, site):
    browser.open(f"{site}/search.html?q=nosuchwordhere", DESK)
    assert not found(browser)


def found(browser, seconds=20):
    """The links that the search shows once it has finished."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        summary = browser.driver.find_elements("css selector", ".search-summary")
        if summary and summary[0].text:
            return browser.driver.find_elements("css selector", "#search-results li a")
        time.sleep(0.1)
    raise AssertionError("the search does not finish")


PLANTED = {
    "an image that is missing": ("<img src=missing.png>", "404: "),
    "an image that is none": ("<img src=index.html>", "no image: "),
    "an error": ("<script>nope()</script>", "console: "),
    "too wide": ("<div style='width: 2000px'>x</div>", "wider than 390 pixels by"),
    "broken": (
        "<table class=docutils><td style='width: 2em; word-break: break-all'>unbelievable</table>",
        "broken in a table: unbelievable",
    ),
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
    (tmp_path / "index.html").write_text(f"{head}<p>fine</p>", encoding="utf-8")
    (tmp_path / "bad.html").write_text(head + body, encoding="utf-8")
    with served(tmp_path) as address:
        assert browser.open(f"{address}/index.html", NARROW)["faults"] == []
        faults = browser.open(f"{address}/bad.html", NARROW)["faults"]
    assert any(fault in line for line in faults), faults


def test_axe_finds_a_fault(browser, tmp_path):
    head = "<!doctype html><html lang=en><link rel=icon href=data:,><title>x</title>"
    pale, nameless = "<p style='color: #888'>pale</p>", "<aside>one</aside><aside>two</aside>"
    (tmp_path / "index.html").write_text(
        f"{head}<main><h1>x</h1>{pale}</main>{nameless}", encoding="utf-8"
    )
    with served(tmp_path) as address:
        browser.open(f"{address}/index.html", DESK)
        rules = {line.partition(":")[0] for line in browser.axe()}
    assert rules == {"color-contrast", "landmark-unique"}
