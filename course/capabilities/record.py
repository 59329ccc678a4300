"""Makes the table on the torch that runs, and compares it with the record of that release.

python course/capabilities/record.py 2.13.0 --python implicit=PYTHON --python explicit=PYTHON
"""

import argparse
import json
from pathlib import Path

from run import ROUTES, run

PUBLISHED = Path(__file__).resolve().parent / "published"
WORDS = {"yes": "yes", "no": "no", "wrong": "silently wrong"}


def read(release: str) -> dict:
    """The record of a release."""
    return json.loads((PUBLISHED / f"{release}.json").read_text(encoding="utf-8"))


def said(cell: dict) -> str:
    """An outcome, with its words."""
    words = WORDS[cell["outcome"]]
    return f"{words}: {cell['says']}" if "says" in cell else words


def draw_costs(axes, costs: dict[str, dict[str, float]]) -> None:
    """Two bars for each title, on matplotlib's `axes`: without and with the gradient."""
    titles = list(costs)[::-1]
    kinds = {"inference": (0.2, "#a6c8e8", ""), "gradient": (-0.2, "#2f5d8a", "//")}
    for kind, (shift, color, hatch) in kinds.items():
        values = [costs[title][kind] for title in titles]
        places = [place + shift for place in range(len(titles))]
        words = {"inference": "call", "gradient": "call and gradient"}[kind]
        style = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        axes.barh(places, values, height=0.38, label=words, **style)
        for place, value in zip(places, values, strict=True):
            axes.text(value, place, f" {value:g}", va="center", fontsize=8)
    axes.set_yticks(range(len(titles)), titles, fontsize=9)
    axes.set_xlabel("microseconds")
    axes.margins(x=0.2)
    below = {"loc": "upper center", "bbox_to_anchor": (0.4, -0.12), "ncol": 2}
    axes.legend(**below, fontsize=8, frameon=False)


def differences(found: dict, recorded: dict) -> list[str]:
    """A line for each cell that is not as recorded; `found` may have fewer routes."""
    lines = []
    for route, cells in found.items():
        theirs = recorded.get(route, {})
        for probe in {**theirs, **cells}:
            now, then = (
                said(c[probe]) if probe in c else "none" for c in (cells, theirs)
            )
            if now != then:
                lines.append(f"{route}, {probe}: {now}; the record has {then}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("release", help="whose record it is")
    parser.add_argument("--python", action="append", default=[], help="ROUTE=PYTHON")
    parser.add_argument("--only", action="append", choices=ROUTES, help="this route")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--publish", action="store_true", help="measure, and write the record"
    )
    args = parser.parse_args()
    pythons = dict(pair.split("=", 1) for pair in args.python)
    table = run(pythons, args.only or list(ROUTES), args.jobs, costs=args.publish)
    place = PUBLISHED / f"{args.release}.json"
    if args.publish:
        place.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        print(place)
        return 0
    changed = differences(table["cells"], read(args.release)["cells"])
    print(*changed, sep="\n")
    count = sum(len(cells) for cells in table["cells"].values())
    print(f"{count} cells, {len(changed)} differ from {place.name}")
    return 1 if changed else 0


if __name__ == "__main__":
    raise SystemExit(main())
