"""Tests of what is made of the linters' messages. A script that prints given ones replaces them."""

import json
import sys

import pytest

from fork.errors import ForkError
from fork.overlay import Stack
from fork.series.branch import commits
from fork.series.git import Git
from fork.series.linters import LINTRUNNER, Lint, added_lines, lint, requirements
from fork.tests.conftest import git, write_files

CONFIG = """
[[linter]]
code = "RUFF"
init_command = ["python3", "adapters/pip_init.py", "--dry-run={{DRYRUN}}", "ruff==0.7.4"]
[[linter]]
code = "CLANGFORMAT"
init_command = ["python3", "tools/linter/adapters/s3_init.py", "--linter=clang-format"]
[[linter]]
code = "MYPY"
init_command = ["python3", "tools/linter/adapters/pip_init.py", "mypy==1.13.0"]
[[linter]]
code = "NEWLINE"
"""
S3 = {"clang-format": {"Linux": {"download_url": "https://x.invalid/linux64/17.0.6/clang-format"}}}
LINTERS = {
    ".lintrunner.toml": CONFIG,
    "tools/linter/adapters/s3_init_config.json": json.dumps(S3),
}
RUNNER = f"""#!{sys.executable}
import json, pathlib, sys
assert pathlib.Path(".lintbin/clang-format").is_symlink()
print(json.dumps(sys.argv[1:]), file=open({{log!r}}, "w"))
print("WARNING: No previous init data found.", file=sys.stderr)
said = json.load(open({{said!r}}))
for lint in said:
    print(json.dumps(lint))
sys.exit(bool(said))
"""


def said(path, line=None, code="RUFF", original=None, replacement=None):
    form = {} if original is None else {"original": original, "replacement": replacement}
    return form | {
        **{"path": path, "line": line, "char": 1, "code": code, "severity": "warning"},
        **{"name": "name", "description": "Because.\nMore."},
    }


@pytest.fixture
def run(repo, source, tmp_path):
    """Returns a function that runs the linters, and returns their messages about the stack."""
    write_files(source, LINTERS)
    base, _ = commits(Stack(repo), source, "attn")
    log, words = tmp_path / "argv", tmp_path / "said"
    text = RUNNER.format(log=str(log), said=str(words))
    runner = write_files(tmp_path, {"venv/bin/lintrunner": text}) / "venv/bin/lintrunner"
    runner.chmod(0o755)

    def run(lints):
        words.write_text(json.dumps(lints), encoding="utf-8")
        found = lint(source, base.commit, "HEAD~1", tmp_path / "venv", tmp_path / "log")
        assert "--merge-base-with HEAD~1" in " ".join(json.loads(log.read_text(encoding="utf-8")))
        assert "--skip=MYPY" in json.loads(log.read_text(encoding="utf-8"))
        return found

    return run


def test_the_tools_are_those_of_upstream(source):
    write_files(source, LINTERS)
    assert requirements(source) == ["clang-format==17.0.6", LINTRUNNER, "ruff==0.7.4"]


def test_a_tree_without_linters(source):
    with pytest.raises(ForkError, match="has no .lintrunner.toml"):
        requirements(source)


OVERRIDES = "torch/overrides.py"  # its third line is the stack's


@pytest.mark.parametrize(
    "setting",
    [
        "diff.external=false",
        "diff.interHunkContext=9",
        "color.ui=always",
        "diff.mnemonicPrefix=true",
    ],
)
def test_the_lines_of_the_stack_under_settings_of_git(repo, checkout, setting):
    base, _ = commits(Stack(repo), checkout, "attn")
    before = added_lines(Git(checkout), base.commit)
    git(checkout, "config", *setting.split("="))
    assert added_lines(Git(checkout), base.commit) == before
    assert before[OVERRIDES] == {3}


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize(
    "lints, lines",
    [
        ([], []),
        ([said(OVERRIDES, 3)], [3]),
        ([said(OVERRIDES, 2)], []),
        ([said("aten/src/ATen/native/Attn.cpp", 1)], [1]),
        ([said(OVERRIDES)], [0]),  # a message about the whole file has no line
        ([said(OVERRIDES, None, "PYFMT", "a\nb\nc\nd\n", "a\nb\nC\nd\n")], [3]),
        ([said(OVERRIDES, None, "PYFMT", "a\nb\nc\nd\n", "A\nb\nc\nD\n")], []),
        ([said(OVERRIDES, None, "PYFMT", "a\nb\nc\nd\n", "a\nb\nc\n\n\nd\n")], [4]),
        ([said(OVERRIDES, None, "PYFMT", "a\nb\nc\nd\n", "a\nB\nc\nd\n")], []),
    ],
)
def test_what_is_said_of_our_lines(run, source, lints, lines, absolute):
    # New dictionaries: another test may have the same ones.
    at = f"{source}/" if absolute else ""
    found = run([one | {"path": at + one["path"]} for one in lints])
    assert [one.line for one in found] == lines
    assert all(not one.path.startswith("/") for one in found)


def test_how_it_reads(run):
    assert [str(one) for one in run([said(OVERRIDES, 3)])] == [
        "torch/overrides.py:3: RUFF name: Because."
    ]
    assert run([said(OVERRIDES, 3)] * 2) == [Lint(OVERRIDES, 3, "RUFF", "name", "Because.")]


def test_a_linter_that_breaks(run):
    with pytest.raises(ForkError, match="TESTS: Because. More."):
        run([said(None, None, "TESTS")])


def test_a_lintrunner_that_breaks(run, tmp_path):
    (tmp_path / "venv/bin/lintrunner").write_text(
        "#!/bin/sh\necho error: no such option; exit 2\n", encoding="utf-8"
    )
    with pytest.raises(ForkError, match="lintrunner: error: no such option"):
        run([])
