"""Text files are UTF-8, whatever the user's encoding is, in which anything can be printed.

Ruff's own rule (PLW1514) finds one call in twenty: those on paths whose type it can infer.
"""

import ast
import os
import re
import subprocess
import sys

import pytest

from fork.paths import ROOT

FOLDERS = ("bench", "commands", "course", "extension", "fork", "site")
FILES = [
    file.relative_to(ROOT).as_posix()
    for file in sorted([ROOT / "setup.py", *(f for d in FOLDERS for f in (ROOT / d).rglob("*.py"))])
    if ".edit." not in file.name
]
MODE = re.compile(r"[rwax+bt]+")


def unnamed(text: str) -> list[int]:
    """Returns the lines that open a file as text without naming its encoding."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return sorted(call.lineno for call in calls if _is_unnamed(call))


def _is_unnamed(call: ast.Call) -> bool:
    name = re.search(r"(\w*)$", ast.unparse(call.func))[1]
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in named or ast.unparse(call.func) == "formatter.write_text":  # click's
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) < {"read_text": 1, "write_text": 2}[name]
    if name not in ("open", "fdopen"):
        return False
    method = name == "open" and isinstance(call.func, ast.Attribute)
    mode = named.get("mode", (*call.args, None, None)[0 if method else 1])
    mode = "r" if mode is None else getattr(mode, "value", "")
    # Other things than files are opened too: `browser.open(URL)`.
    return bool(MODE.fullmatch(str(mode))) and "b" not in mode


@pytest.mark.parametrize("file", FILES)
def test_encodings(file):
    assert unnamed((ROOT / file).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("p.read_text()", True),
        ("p.read_text(errors='replace')", True),
        ("p.read_text(encoding='utf-8')", False),
        ("f().p.write_text(text)", True),
        ("p.write_text(text, encoding='utf-8')", False),
        ("open(p)", True),
        ("open(p, mode='w')", True),
        ("open(p, 'rb')", False),
        ("open(p, 'w', encoding='utf-8')", False),
        ("p.open()", True),
        ("p.open('w', newline='')", True),
        ("p.open('wb')", False),
        ("os.fdopen(out)", True),
        ("browser.open(url)", False),
        ("tarfile.open(p, 'w:xz')", False),
        ("p.read_bytes()", False),
    ],
)
def test_a_file_whose_encoding_is_not_named_is_found(call, found):
    assert unnamed(call) == [1] * found


@pytest.mark.parametrize("encoding", ["ascii", "gbk", "euc-jp", "iso-8859-1"])
def test_a_line_that_the_users_encoding_lacks(tmp_path, encoding):
    folder = tmp_path / "∑é"
    folder.mkdir()
    command = [sys.executable, "-m", "fork", "check", "--upstream", folder]
    env = os.environ | {"PYTHONIOENCODING": encoding}
    said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True).stdout
    wanted = f"error: {folder}: not PyTorch".encode(encoding, errors="replace")
    assert said.splitlines()[-1].startswith(wanted)
