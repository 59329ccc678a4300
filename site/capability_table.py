"""The page of capabilities: the table, what each cell says, the costs, and the sources."""

from __future__ import annotations

import ast
import html
from collections import Counter
from io import StringIO
from pathlib import Path

import probes
import record
import run
from packaging.version import Version

from fork.overlay import default_release

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "course" / "capabilities"
SOURCES = "generated/capability-sources.html"
SIGNS = {"yes": "✓", "no": "✗", "wrong": "≠"}
DIFFERS = "Δ"
FENCE = "`" * 5


def records() -> dict[str, dict]:
    """What was found on each release, the default one first, then the newest."""
    releases = [file.stem for file in record.PUBLISHED.glob("*.json")]
    releases.sort(key=lambda r: (r != default_release(), -Version(r).release[1]))
    return {release: record.read(release) for release in releases}


def heads() -> dict[str, str]:
    """The words for each probe, by its name."""
    return {probe.__name__: words for probe, words in probes.PROBES.items()}


def titles() -> dict[str, str]:
    """The words for each route, by its name."""
    return {name: way.title for name, way in run.ROUTES.items()}


def anchor(kind: str, name: str) -> str:
    """The place of a route or a probe on the page of the sources, as Sphinx writes it."""
    return f"{kind}-{name.replace('_', '-')}"


def source_of(kind: str, name: str) -> str:
    return f"{SOURCES}#{anchor(kind, name)}"


def others(found: dict[str, dict], route: str, probe: str) -> dict[str, dict]:
    """The cells of the releases in which the outcome is not the default's."""
    (_, first), *rest = found.items()
    here = first["cells"][route][probe]["outcome"]
    cells = {release: table["cells"][route][probe] for release, table in rest}
    return {release: cell for release, cell in cells.items() if cell["outcome"] != here}


def _cell(found: dict[str, dict], route: str, probe: str) -> str:
    outcome = next(iter(found.values()))["cells"][route][probe]["outcome"]
    mark = word = ""
    if differ := others(found, route, probe):
        mark, word = f"<sup>{DIFFERS}</sup>", f", not so on {' and '.join(differ)}"
    sign = f'<span aria-hidden="true">{SIGNS[outcome]}{mark}</span>'
    words = f'<span class="word">{record.WORDS[outcome]}{word}</span>'
    link = f'<a href="#{route}-{probe}">{sign}{words}</a>'
    return f'<td data-probe="{probe}" data-outcome="{outcome}">{link}</td>'


def table(found: dict[str, dict]) -> str:
    """A row for each route and a column for each probe; site/static/capabilities.js sorts it."""
    options = [f'<option value="{probe}">{words}</option>' for probe, words in heads().items()]
    columns = [
        f'<th scope="col" data-probe="{probe}"><button type="button">{words}</button></th>'
        for probe, words in heads().items()
    ]
    rows = [
        f'<tr><th scope="row"><a href="{source_of("route", route)}">{html.escape(title)}</a></th>'
        + "".join(_cell(found, route, probe) for probe in heads())
        + "</tr>"
        for route, title in titles().items()
    ]
    return "\n".join(
        [
            '<p class="capability-choice"><label for="capability">Sort by </label>',
            '<select id="capability"><option value="">route</option>',
            *options,
            "</select></p>",
            '<div class="table-wrapper capabilities" tabindex="0" role="region" '
            'aria-label="Capabilities by route">',
            '<table class="docutils capabilities">',
            f'<thead><tr><th scope="col">route</th>{"".join(columns)}</tr></thead>',
            "<tbody>",
            *rows,
            "</tbody></table></div>",
            "",
        ]
    )


def _said(cell: dict) -> str:
    return html.escape(record.said(cell))


def details(found: dict[str, dict]) -> str:
    """What each cell says, a section that opens for each route."""
    first = next(iter(found.values()))["cells"]
    parts = []
    for route, title in titles().items():
        counts = Counter(cell["outcome"] for cell in first[route].values())
        words = (("yes", "yes"), ("no", "no"), ("wrong", "silently wrong"))
        summary = ", ".join(f"{counts[key]} {word}" for key, word in words if counts[key])
        parts.append(f"<details><summary>{html.escape(title)}: {summary}</summary>")
        source = f'<a href="{source_of("route", route)}">The source of the route</a>.'
        parts.append(f'<div class="cells"><p>{source}</p><ul>')
        for probe, head in heads().items():
            link = f'<a href="{source_of("probe", probe)}">{head}</a>'
            text = _said(first[route][probe])
            for release, cell in others(found, route, probe).items():
                text += f"<br>{DIFFERS} on {release}: {_said(cell)}"
            parts.append(f'<li id="{route}-{probe}">{link}: {text}</li>')
        parts.append("</ul></div></details>")
    return "\n".join([*parts, ""])


def differences(found: dict[str, dict]) -> str:
    """A table of the cells whose outcome is not the same on all releases."""
    rows = []
    for route, title in titles().items():
        for probe, head in heads().items():
            if others(found, route, probe):
                outcomes = (t["cells"][route][probe]["outcome"] for t in found.values())
                cells = (f"{SIGNS[outcome]} {record.WORDS[outcome]}" for outcome in outcomes)
                link = f'<a href="#{route}-{probe}">{head}</a>'
                rows.append(f"| {title} | {link} | {' | '.join(cells)} |")
    if not rows:
        return "On the releases recorded, no cell differs.\n"
    columns = ["route", "capability", *found]
    return "\n".join([f"| {' | '.join(columns)} |", "| -- " * len(columns) + "|", *rows, ""])


def costs(found: dict[str, dict], narrow: bool) -> str:
    """The plot of the default release's costs, an SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    release, first = next(iter(found.items()))
    by_title = {titles()[route]: cost for route, cost in first["microseconds"].items()}
    with matplotlib.rc_context({"svg.hashsalt": "capabilities"}):
        figure = Figure(figsize=(4, 5.4) if narrow else (8, 4.6), layout="constrained")
        axes = figure.subplots()
        record.draw_costs(axes, by_title)
        axes.set_title(f"torch {release}, {first['cpu']}", fontsize=9)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _code(path: Path, text: str = "") -> str:
    language = {".py": "python", ".cpp": "cpp"}[path.suffix]
    return f"{FENCE}{language}\n{(text or path.read_text(encoding='utf-8')).rstrip()}\n{FENCE}\n"


def sources() -> str:
    """A page of the routes and the probes, each with an anchor."""
    parts = ["# Routes and probes", "The formulas that all routes share:"]
    parts += [_code(FOLDER / "formulas.py"), "## Routes"]
    for route, way in run.ROUTES.items():
        parts += [f"({anchor('route', route)})=", f"### {way.title}"]
        files = sorted((FOLDER / "routes").glob(f"{way.module}.*"))
        parts += [_code(file) for file in files if file.suffix in (".py", ".cpp")]
        if way.module == "native":
            parts.append(f"The sources are those of {way.where}, as [the commits](series.md) show.")
    parts += ["## Probes", "What several of them use:"]
    text = (FOLDER / "probes.py").read_text(encoding="utf-8")
    functions = {f.name: f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef)}
    source = {name: ast.get_source_segment(text, f) for name, f in functions.items()}
    shared = [name for name in source if name not in heads()]
    parts.append(_code(FOLDER / "probes.py", "\n\n\n".join(source[name] for name in shared)))
    for probe, words in heads().items():
        parts += [f"({anchor('probe', probe)})=", f"### {words}"]
        parts.append(_code(FOLDER / "probes.py", source[probe]))
    parts += ["## The program without Python", _code(FOLDER / "caller.cpp")]
    return "\n\n".join(parts)


def pages() -> dict[str, str]:
    """The generated files by their paths."""
    found = records()
    versions = [f"{release}: {t['versions']['torch']}" for release, t in found.items()]
    made_on = f"Python {next(iter(found.values()))['versions']['python']}; {'; '.join(versions)}."
    return {
        "generated/capability-table.inc": table(found),
        "generated/capability-cells.inc": details(found),
        "generated/capability-differences.inc": differences(found),
        "generated/capability-versions.inc": made_on + "\n",
        "generated/capability-costs.svg": costs(found, narrow=False),
        "generated/capability-costs-narrow.svg": costs(found, narrow=True),
        "generated/capability-sources.md": sources(),
    }
