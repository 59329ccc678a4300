"""Writes the results of a run to a folder: as JSON, as tables, and as plots.

`results.py FOLDER` makes the tables and plots of the FOLDER's .json files again.
"""

import json
import sys
from pathlib import Path

from report import device_of, markdown

try:
    import plot
except ImportError:  # matplotlib, or a module of it, is missing
    plot = None


def write(result: dict, out: Path) -> list[str]:
    """Writes the files into the folder `out`; returns their names."""
    out.mkdir(parents=True, exist_ok=True)
    written = [f"{device_of(result)}{suffix}" for suffix in (".json", ".md")]
    (out / written[0]).write_text(json.dumps(result, indent=1) + "\n")
    (out / written[1]).write_text(markdown(result))
    if plot:
        written += plot.write(result, out)
    return written


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for file in sorted(folder.glob("*.json")):
        write(json.loads(file.read_text()), folder)
