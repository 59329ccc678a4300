"""All code that the pages show: Python is run, commands exist, quotations are of what is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from sphinx_gallery.py_source_parser import split_code_and_text_blocks
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from fork.__main__ import main
from fork.overlay import Stack
from fork.project import PROJECT
from fork.suites import SUITES

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted((ROOT / "course").glob("[0-9][0-9]_*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / name for name in ("fork/README.md", "stack/README.md")),
    ROOT / "extension/README.md",
    *sorted((ROOT / "site").glob("*.md")),
    *sorted((ROOT / "docs/source/notes").glob("*.md")),
    ROOT / "course/GALLERY_HEADER.rst",
    *LESSONS,
]
FENCE = re.compile(r"^(`{3,})(.*?)\n(.*?)^\1", re.M | re.S)
BLOCK = re.compile(r"^\.\. code-block:: (\S+)\n\n((?:   .*\n|\n)+)", re.M)  # reStructuredText's
INDENTED = re.compile(r"(?:^|(?<=\n\n))((?:    .*\n)+)")
LANGUAGES = ("python", "sh", "text", "diff")
DIRECTIVES = {"{image}", "{include}", "{toctree}", "{eval-rst}", "{math}"}  # MyST's
MAKEFILES = "".join(
    (ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", f"{PROJECT}.mk")
)
# The first target is the project's name: of this folder, and of those in the examples of `--into`.
TARGETS = {PROJECT, "log_cosh", "to_polar", *re.findall(r"^([a-z][\w-]*):", MAKEFILES, re.M)}
# In plain text, too: `make x` and `python -m fork x`, in a table or a sentence.
INLINE = re.compile(r"`((?:make|(?:\.venv/bin/)?python -m fork) [^`]+)`")
PROGRAMS = {"apt-get", "cd", "ghstack", "git", "make", "pip", "python", "torchrun"}
# torchrun sets these variables; here, to those of one process.
ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
# What only a command makes, or the reader has.
ELSEWHERE = re.compile(r"[~/$]|(build|dist|patches)(/|$)|.*pytorch|ring\.py$")
OVERLAY = {file.read_text(encoding="utf-8") for file in Stack(ROOT).tree().values()}
STEPS = {
    title
    for file in (*(ROOT / "fork").rglob("*.py"), *(ROOT / "commands").glob("*.py"))
    for title in re.findall(r"step\(\s*f?\"([\w ]+)", file.read_text(encoding="utf-8"))
}


def prose(page):
    """What a page says: of a lesson its text without the code."""
    if page.suffix != ".py":
        return page.read_text(encoding="utf-8")
    _, blocks = split_code_and_text_blocks(str(page))
    return "\n\n".join(text for kind, text, _ in blocks if kind == "text") + "\n"


def fences(page):
    """The language and the body of each piece of code set apart."""
    text = prose(page)
    if page.suffix == ".md":
        found = [(language.partition(" ")[0], body) for _, language, body in FENCE.findall(text)]
        return [pair for pair in found if pair[0] not in DIRECTIVES]
    found = BLOCK.findall(text)
    return [(language, re.sub("^   ", "", body, flags=re.M)) for language, body in found]


def name(page):
    return page.relative_to(ROOT).as_posix()


# The extension's own tests run the code of its page.
@pytest.mark.parametrize("page", [x for x in PAGES if x.parent.name != "extension"], ids=name)
def test_python(page, monkeypatch):
    """Each page from its top, in a namespace of its own."""
    for variable, value in ONE_PROCESS.items():
        monkeypatch.setenv(variable, value)
    for example in Sybil(parsers=[PythonCodeBlockParser()]).parse(page):
        example.evaluate()


def test_the_ring_of_two_processes(tmp_path):
    """What site/ring.md shows is what its first code prints."""
    found = fences(ROOT / "site" / "ring.md")
    code, command, printed = (next(x for y, x in found if y == kind) for kind in LANGUAGES[:3])
    (tmp_path / "ring.py").write_text(code, encoding="utf-8")
    words = shlex.split(command)
    run = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # One process may write between another's line and its end.
    assert [line for line in printed.splitlines() if line not in done.stdout] == []
    assert len("".join(done.stdout.split())) == len("".join(printed.split()))


def test_there_is_python():
    assert "```python" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert ">>> " in (ROOT / "site" / "use.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_fence_says_what_it_is(page):
    assert {language for language, _ in fences(page)} <= set(LANGUAGES)
    if page.suffix != ".md":  # no code in another form
        assert "```" not in prose(page)
        assert not re.search(r"^(?!\s*\.\. ).*::$", prose(page), re.M)


def lines(page):
    """The lines of shell that a page shows."""
    shell = "\n".join(body for language, body in fences(page) if language == "sh")
    plain = INDENTED.findall(FENCE.sub("", prose(page))) if page.suffix == ".md" else []
    begins = ("make ", "python ", ".venv/bin/python ")
    indented = [line.strip() for body in plain for line in body.splitlines()]
    return [
        *(line.strip() for line in shell.splitlines() if line.strip()),
        *(line for line in indented if line.startswith(begins)),
    ]


def commands(page):
    """The commands that a page names, each as its words."""
    inline = INLINE.findall(FENCE.sub("", prose(page)).replace("``", "`"))
    for line in [*lines(page), *inline]:
        for part in re.sub(r"  #.*|\$\(.*?\)", "", line).replace("...", "x").split(" && "):
            words = shlex.split(part.removeprefix(".venv/bin/"), comments=True)
            if words:
                yield words


def refusal(words):
    """Why that is no command; empty if it is one."""
    if words[0] not in PROGRAMS:
        return f"no program {words[0]}"
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        return "".join(f"no target {t}" for t in targets if t not in TARGETS)
    if words[:3] == ["python", "-m", "fork"]:
        return refusal_of_fork(words)
    lost = [word for word in words[1:] if "/" in word or word.endswith((".py", ".txt"))]
    lost = [word for word in lost if not ELSEWHERE.match(word) and not (ROOT / word).exists()]
    return "".join(f"no file {word}" for word in lost)


def refusal_of_fork(words):
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
def test_shell(page):
    """It is shell at all."""
    for language, body in fences(page):
        if language == "sh":
            done = subprocess.run(["bash", "-n"], input=body, text=True, capture_output=True)
            assert done.returncode == 0, f"{body}{done.stderr}"


def quoted(page):
    """Lines that are what a command says, or a file."""
    text = prose(page)
    shown = [body for language, body in fences(page) if language == "text"]
    shown += INDENTED.findall(FENCE.sub("", text)) if page.suffix == ".md" else []
    return [line for body in shown for line in body.splitlines()]


def strange(line):
    """What in a quoted line is not there."""
    commits = {commit.folder.name for commit in Stack(ROOT).commits}
    tests = {*SUITES, *(file.name for file in (ROOT / "test").glob("*.py"))}
    lost = {*re.findall(r"\b\d\d-[a-z]+(?:-[a-z]+)*\b", line)} - commits
    lost |= {*re.findall(r"[\w/]*test_\w+\.py", line)} - tests
    edits = re.findall(r"\b[\w/]+\.edit\.\w+", line)
    lost |= {path for path in edits if not (ROOT / path).exists()}
    if line.startswith("+ ") and not any(line[2:].startswith(title) for title in STEPS):
        lost.add(line)
    if line.startswith(("# @@ ", "- func: ")) and not any(line in text for text in OVERLAY):
        lost.add(line)
    return lost


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_quotations(page):
    """What is quoted names steps, commits, tests and lines of the overlay that exist."""
    assert [lost for line in quoted(page) for lost in strange(line)] == []


def test_quotations_are_seen():
    assert sum(len(quoted(page)) for page in PAGES) > 50
    for line in (
        "+ knit a wheel",
        "99-nothing  0",
        "test_nothing.py",
        "- func: nothing(",
        "x/y.edit.py",
    ):
        assert strange(line), line


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=name)
def test_the_python_that_runs_the_machinery_is_named(page):
    """A bare `python` has no click: what one copies begins with .venv/bin/python."""
    code = "\n".join(body for _, body in fences(page))
    assert re.findall(r"^(?:\$ )?python -m fork.*", code, re.M) == []
    text = prose(page)
    assert "python -m fork" not in text or ".venv/bin/python -m fork" in text


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands(page):
    assert {" ".join(words): refusal(words) for words in commands(page) if refusal(words)} == {}


def test_commands_are_seen():
    assert sum(len(list(commands(page))) for page in PAGES) > 30


@pytest.mark.parametrize(
    "words",
    [
        *("make nothing", "python -m fork nothing", "python -m fork check --nothing"),
        *("python course/99_nothing.py", "pip install nothing/at/all", "nothing at all"),
    ],
)
def test_what_is_no_command_is_refused(words):
    assert refusal(words.split())
