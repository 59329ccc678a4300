"""Tests of the two keys under which it is kept that a commit passed."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from fork.graft import open_graft
from fork.overlay import NATIVE, Stack, default_release
from fork.paths import ROOT
from fork.suites import keys
from fork.suites.keys import code, key
from fork.tests.conftest import message, write_files
from fork.tests.suites.test_plan import OPERATOR

FILES = {
    "stack/01-script/commit.md": message(
        ["test/attn_function.py"], plan="python test/attn_function.py"
    ),
    "stack/02-op/commit.md": message(
        ["aten/src/ATen/native/Attn.cpp", NATIVE, "test/test_attn.py"], title="Two"
    ),
    "stack/03-more/commit.md": message(
        [
            *("aten/src/ATen/native/cuda/Attn.cu", "benchmarks/attn/cases.py"),
            *("docs/source/attn.md", "test/more/machine.h", "test/test_attn_more.py"),
        ]
    ),
    "stack/04-bench/commit.md": message(
        ["benchmarks/attn/bench.py"], plan="python benchmarks/attn/bench.py"
    ),
    "stack/05-last/commit.md": message(["test/test_attn_last.py"]),
    "CMakeLists.txt": "",
    "aten/src/ATen/native/Attn.cpp": "",
    "aten/src/ATen/native/cuda/Attn.cu": "",
    "benchmarks/attn/bench.py": "",
    "benchmarks/attn/cases.py": "",
    "docs/source/attn.md": "",
    "test/attn_function.py": "",
    "test/test_attn.py": "from attn_function import Attn\n",
    "test/more/machine.h": "",
    "test/test_attn_more.py": 'def f():\n    import test_attn\n    print("more")\n',
    "test/test_attn_last.py": "",
    **OPERATOR,
}


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        ("aten/src/ATen/native/Attn.cpp", {2, 3, 4, 5}),
        ("aten/src/ATen/native/cuda/Attn.cu", {3, 4, 5}),
        ("benchmarks/attn/cases.py", {4}),  # commit 4 runs a file beside it
        ("docs/source/attn.md", set()),
        ("test/attn_function.py", {1, 2, 3}),  # 2 imports it, and 3 imports what 2 has
        ("test/test_attn.py", {2, 3}),
        ("test/more/machine.h", {3}),  # the folder is named by a test of 3
        ("test/test_attn_more.py", {3}),
        ("CMakeLists.txt", {1, 2, 3, 4, 5}),
    ],
)
def test_what_changes_a_key(tmp_path, path, changed):
    root = write_files(tmp_path / "stack", FILES)
    before = keys_of(root)
    (root / path).write_text(f"{FILES.get(path, '')}# a comment\n", encoding="utf-8")
    comment = set() if path.endswith(".py") else changed
    assert changes(before, keys_of(root)) == comment
    (root / path).write_text("changed\n", encoding="utf-8")
    assert changes(before, keys_of(root)) == changed


def test_a_key_is_of_contents_alone(tmp_path, monkeypatch):
    """It depends neither on the places of the clone and of a version, nor on name and message."""
    found = []
    for name in ("here", "there"):
        root = write_files(tmp_path / name, FILES)
        if name == "there":
            shutil.move(root / "stack/02-op", root / "stack/02-renamed")
            version = root / "stack/02-renamed/test/test_attn.py"
            version.parent.mkdir()
            version.write_text(FILES["test/test_attn.py"], encoding="utf-8")
        stack = Stack(root)
        found.append([key(stack, commit) for commit in stack.commits])
    assert found[0] == found[1]
    assert len(set(found[0])) == 5
    monkeypatch.setattr(keys, "suites_release", lambda: "2.7.0")
    assert not {key(stack, commit) for commit in stack.commits} & {*found[0]}


def keys_of(root):
    stack = Stack(root)
    return [key(stack, commit) for commit in stack.commits]


def changes(before, after):
    """The numbers of the commits whose keys differ."""
    return {n for n, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b}


# Prints both keys of the clone that it runs in: the first of each commit, the second of the tip.
KEYS = """
import json, sys
from pathlib import Path
from fork.graft import Base, Graft
from fork.overlay import Stack
from fork.paths import ROOT
from fork.suites.keys import key, key_made
from fork.suites.plan import Plan
stack = Stack(ROOT)
tip = stack.commits[-1]
graft = Graft(stack, Base(Path(sys.argv[1])))
graft.prepare()
firsts = [key(stack, commit) for commit in stack.commits]
print(json.dumps([firsts, key_made(Plan.of(stack, tip), stack, tip, graft)]))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of this clone, which a test may change."""
    folder = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns("build", "bench", "course", "extension", "site", ".*")
    return shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)


def both_keys(clone):
    base = open_graft(os.environ.get("BASE") or default_release()).base.folder
    command = [sys.executable, "-c", KEYS, base]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_what_voids_both_keys(clone):
    """A comment in each room voids none, other code the first alone, a flag both."""
    before = both_keys(clone)
    for room in sorted((clone / "fork").glob("*/__init__.py")):
        for file in room.parent.glob("*.py"):
            file.write_text(
                file.read_text(encoding="utf-8") + "\n\n# More is said here.\n", encoding="utf-8"
            )
    assert both_keys(clone) == before
    pack = clone / "fork/graft/pack.py"
    pack.write_text(pack.read_text(encoding="utf-8") + "\n\nMORE = 1\n", encoding="utf-8")
    cmake = clone / "CMakeLists.txt"
    cmake.write_text("# More is said here.\n" + cmake.read_text(encoding="utf-8"), encoding="utf-8")
    firsts, second = both_keys(clone)
    with_a_graft = {*range(2, len(before[0]) + 1)}  # the first commit is a note
    assert changes(before[0], firsts) == with_a_graft and second == before[1]
    cmake.write_text(
        cmake.read_text(encoding="utf-8") + "add_compile_options(-DMORE)\n", encoding="utf-8"
    )
    assert both_keys(clone)[1] != second


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# why\nx = 1  # one\n\n\ny = 2\n", "x = 1\ny = 2"),
        (
            '"""Doc."""\n\ndef f():\n    """Doc\n    more."""\n    return 1\n',
            "def f():\n    return 1",
        ),
        ('def f(): "doc"\n', 'def f(): "doc"'),
        ('x = """# no\n\ncomment"""\n', 'x = """# no\n\ncomment"""'),
        ('class A:\n    "doc"\n    """more"""\n', 'class A:\n    """more"""'),
        ("broken (", "broken ("),
    ],
)
def test_code_of_a_file(text, expected):
    assert code(text) == expected
