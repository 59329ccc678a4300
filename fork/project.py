"""The name of this repository's project: its branch, commits, wheels and first target have it."""

import re
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # in Python 3.10
    from pip._vendor import tomli as tomllib

FILE = "pyproject.toml"
TABLES = tomllib.loads((Path(__file__).parents[1] / FILE).read_text(encoding="utf-8"))
PROJECT: str = TABLES["tool"]["fork"]["project"]
# The last part of the version of a grafted torch, in which only dots may separate words.
LOCAL = re.sub("[-_]", ".", PROJECT)
