"""The results of a run, written to a folder: as they are, as a table, and as a plot.

`results.py FOLDER` makes the table and the plot of FOLDER/cpu.json again.
"""

import importlib.util
import json
import sys
from pathlib import Path

from report import markdown, NAME


PLOTS = importlib.util.find_spec("matplotlib") is not None


def write(result: dict, out: Path) -> list[str]:
    """The files, by name, that it wrote into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{NAME}.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / f"{NAME}.md").write_text(markdown(result))
    written = [f"{NAME}.json", f"{NAME}.md"]
    if PLOTS and result["rows"]:
        import plot

        written += plot.write(result, out)
    return written


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write(json.loads((folder / f"{NAME}.json").read_text()), folder)
