"""The code that README.md and the manual show: Python is run, commands are commands that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from fork.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "fork/README.md", "stack/README.md")),
    *sorted((ROOT / "site").glob("*.md")),
]
FENCE = re.compile(r"^(`{3,})(.*?)\n(.*?)^\1", re.M | re.S)
INDENTED = re.compile(r"(?:^|(?<=\n\n))((?:    .*\n)+)")
LANGUAGES = {"sh", "python", "text", "{image}", "{include}", "{toctree}", "{eval-rst}"}
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
# In plain text, too: `make x` and `python -m fork x`, in a table or a sentence.
INLINE = re.compile(r"`((?:make|python -m fork) [^`]+)`")


def name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python(page):
    """Each page from its top, in a namespace of its own."""
    for example in Sybil(parsers=[PythonCodeBlockParser()]).parse(page):
        example.evaluate()


def test_there_is_python():
    assert "```python" in (ROOT / "README.md").read_text()
    assert ">>> " in (ROOT / "site" / "use.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_fence_says_what_it_is(page):
    heads = [language for _, language, _ in FENCE.findall(page.read_text())]
    assert {head.split()[0] if head else "" for head in heads} <= LANGUAGES


def commands(page):
    """The commands that a page names, each as its words."""
    text = page.read_text()
    blocks = [body for _, language, body in FENCE.findall(text) if language == "sh"]
    blocks += INDENTED.findall(FENCE.sub("", text))
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    for line in [*lines, *INLINE.findall(FENCE.sub("", text))]:
        line = line.removeprefix(".venv/bin/")
        if line.startswith(("make ", "python -m fork")):
            yield shlex.split(line.partition("  #")[0].replace("...", "x"), comments=True)


def refusal(words):
    """Why that is no command; empty if it is one."""
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        return "".join(f"no target {t}" for t in targets if t not in TARGETS)
    command = main.commands.get(words[3]) if len(words) > 3 else main
    if command is None:
        return f"no command {words[3]}"
    if words[4:] in ([], ["--help"]):
        return ""
    args = [str(ROOT) if re.match(r"[~/]|PATH$|pytorch", word) else word for word in words[4:]]
    try:
        command.make_context(words[3], args)
    except click.UsageError as e:
        return e.format_message()
    return ""


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands(page):
    assert {" ".join(words): refusal(words) for words in commands(page) if refusal(words)} == {}


def test_commands_are_seen():
    assert sum(len(list(commands(page))) for page in PAGES) > 30


@pytest.mark.parametrize(
    "words", ["make nothing", "python -m fork nothing", "python -m fork check --nothing"]
)
def test_what_is_no_command_is_refused(words):
    assert refusal(words.split())
