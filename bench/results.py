"""Writes the results of a run to a folder: as JSON, as tables, and as plots.

`results.py FOLDER` makes the tables and plots of the FOLDER's .json files again.
"""

import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from report import device_of, markdown

try:
    import plot
except ImportError:  # matplotlib, or a module of it, is missing
    plot = None


def write_tables(name: str, result: dict, text: str, out: Path) -> list[str]:
    """Writes the result and its tables into the folder `out`; returns the files' names."""
    out.mkdir(parents=True, exist_ok=True)
    written = [f"{name}{suffix}" for suffix in (".json", ".md")]
    (out / written[0]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / written[1]).write_text(text, encoding="utf-8")
    return written


def write_page(name: str, result: dict, text: str, draw: Callable, out: Path) -> None:
    """Writes what a page of the manual shows; draw(result, narrow) makes its plot."""
    write_tables(name, result, text, out)
    for suffix, narrow in (("", False), ("-narrow", True)):
        plot.save(partial(draw, result, narrow), out / f"{name}{suffix}.svg")


def write(result: dict, out: Path) -> list[str]:
    """Writes the files into the folder `out`; returns their names."""
    written = write_tables(device_of(result), result, markdown(result), out)
    if plot:
        written += plot.write(result, out)
    return written


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for file in sorted(folder.glob("*.json")):
        script = file.stem.removeprefix("cpu-")  # that wrote it, but for bench.py's files
        is_script = Path(__file__).with_name(f"{script}.py").is_file()
        write_again = importlib.import_module(script).write if is_script else write
        write_again(json.loads(file.read_text(encoding="utf-8")), folder)
