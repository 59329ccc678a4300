"""Tests of the stack: its rules, its trees, and that all of it is applied, or nothing."""

import shutil

import pytest

from fork.errors import ForkError
from fork.overlay import Added, Stack, Upstream, apply, copy_pristine
from fork.tests.conftest import message, write_files

NATIVE = "aten/src/ATen/native/native_functions.edit.yaml"


def test_sound(repo):
    assert Stack(repo).problems() == []


def test_trees(repo):
    stack = Stack(repo)
    assert sorted(stack.tree(1)) == ["aten/src/ATen/native/Attn.cpp", NATIVE]
    assert stack.tree(1)[NATIVE] == repo / "stack/01-implicit" / NATIVE
    assert stack.tree()[NATIVE] == repo / NATIVE
    assert stack.added(stack.commits[1]) == Added(code=2)
    assert [stack.earlier(commit) for commit in stack.commits] == [2, 0]
    with pytest.raises(ForkError, match="commits 1 to 2"):
        stack.tree(3)


def test_what_is_counted(repo):
    files = {
        "aten/src/ATen/native/More.cpp": "// Why.\n#include <x>\n\nint attn; // x\n",
        "test/test_attn.py": "# Owner(s)\nimport torch\n",
        "docs/source/notes/attn.md": "# attn\n\nx\n",
        "torch/_torch_docs.edit.py": "# @@ after: x\n# y\nz\n",
    }
    write_files(repo, files)
    write_files(repo, {"stack/03-more/commit.md": message(sorted(files))})
    stack = Stack(repo)
    added = stack.added(stack.commits[2])
    assert added == Added(code=4, tests=2, docs=5)
    assert added + added == Added(code=8, tests=4, docs=10)


def test_a_commit_of_too_much_code(repo):
    lines = "".join(f"int attn{i};\n" for i in range(901))
    write_files(repo, {"aten/src/ATen/native/Attn.cpp": lines})
    (found,) = Stack(repo).problems()
    assert found == "stack/01-implicit: 902 lines of code: cut it, reviewers take 900"


@pytest.mark.parametrize(
    "files, words",
    [
        ({"torch/stray.py": "x\n"}, "torch/stray.py: no commit of the stack claims this file"),
        ({"build_variables.edit.bzl": "x\n"}, "build_variables.edit.bzl: no commit"),
        (
            {"stack/02-explicit/torch/x.py": "x\n"},
            "stack/02-explicit/torch/x.py: not among the files",
        ),
        ({f"stack/02-explicit/{NATIVE}": "x\n"}, "no later commit changes it"),
        ({"stack/02-explicit/commit.md": message([NATIVE])}, "torch/overrides.edit.py: no commit"),
        (
            {
                "stack/02-explicit/commit.md": message(
                    [NATIVE, "torch/a.py", "torch/overrides.edit.py"]
                )
            },
            "stack/02-explicit: torch/a.py: no such file",
        ),
        (
            {
                "stack/02-explicit/commit.md": message(
                    [NATIVE, "torch/overrides.edit.py"], ["torch/gone.py"]
                )
            },
            "removes torch/gone.py, which no commit before it has",
        ),
        ({"stack/03-empty/commit.md": message([])}, "stack/03-empty: changes nothing"),
        (
            {"stack/03-long/commit.md": message([], ["torch/overrides.edit.py"], "x" * 73)},
            "longer than 72",
        ),
        (
            {
                "stack/02-explicit/commit.md": message([NATIVE, "torch/overrides.edit.py"]).replace(
                    "because", ""
                )
            },
            "no '## Why'",
        ),
        (
            {
                "stack/02-explicit/commit.md": message([NATIVE, "torch/overrides.edit.py"]).replace(
                    "Test plan", "T"
                )
            },
            "no '## Test plan'",
        ),
    ],
)
def test_problems(repo, files, words):
    write_files(repo, files)
    assert any(words in problem for problem in Stack(repo).problems()), Stack(repo).problems()


def test_a_later_change_wants_its_earlier_version(repo):
    (repo / "stack/01-implicit" / NATIVE).unlink()
    assert (
        f"stack/01-implicit: {NATIVE}: a later commit changes it; put this version here"
        in Stack(repo).problems()
    )


def test_the_same_version_twice(repo):
    shutil.copy(repo / NATIVE, repo / "stack/01-implicit" / NATIVE)
    assert f"stack/02-explicit: {NATIVE}: the same as before this commit" in Stack(repo).problems()


def test_removal(repo):
    write_files(repo, {"stack/03-remove/commit.md": message([], ["torch/overrides.edit.py"])})
    assert (
        "torch/overrides.edit.py: no commit of the stack claims this file" in Stack(repo).problems()
    )
    (repo / "stack/02-explicit/torch").mkdir()
    (repo / "torch/overrides.edit.py").rename(repo / "stack/02-explicit/torch/overrides.edit.py")
    stack = Stack(repo)
    assert stack.problems() == []
    assert "torch/overrides.edit.py" not in stack.tree()
    assert "torch/overrides.edit.py" in stack.tree(2)


@pytest.mark.parametrize(
    "folder, text, words",
    [
        ("03_bad", "", "is called NN-name"),
        ("04-gap", message([]), "without a gap"),
        ("03-none", None, "has no commit.md"),
        ("03-bad", "no front matter\n", "wants front matter"),
        ("03-bad", "---\nfiles: [\n---\n# x\n\ny", "front matter: "),
        ("03-bad", "---\nowner: x\n---\n# x\n\ny", "has the keys files, removes, trailers"),
        ("03-bad", "---\ntrailers: [x]\n---\n# x\n\ny", "'trailers' is a line 'Key: value'"),
        ("03-bad", "---\ntrailers: [A: x]\n---\n# x\n\ny", "'trailers' is a list of lines"),
        ("03-bad", "---\nfiles: x\n---\n# x\n\ny", "'files' is a list of paths"),
        ("03-bad", "---\nfiles: [b, a]\n---\n# x\n\ny", "'files' is sorted"),
    ],
)
def test_malformed_commits(repo, folder, text, words):
    (repo / "stack" / folder).mkdir()
    if text is not None:
        (repo / "stack" / folder / "commit.md").write_text(text, encoding="utf-8")
    with pytest.raises(ForkError, match=words):
        Stack(repo)


def test_debts(repo):
    held = 'DecorateInfo(unittest.expectedFailure, "TestX"),  # no rule yet\n'
    write_files(
        repo,
        {
            "stack/01-implicit/test/test_vmap.edit.py": (
                f"# @@ after: xfail('x'),\n{held}xfail('attn'),\n"
            ),
            "stack/01-implicit/commit.md": message(
                ["aten/src/ATen/native/Attn.cpp", NATIVE, "test/test_vmap.edit.py"]
            ),
            "test/test_vmap.edit.py": f"# @@ after: x\n{held}unittest.skipIf(windows)\n",
            "stack/02-explicit/commit.md": message(
                [NATIVE, "test/test_vmap.edit.py", "torch/overrides.edit.py"]
            ),
        },
    )
    stack = Stack(repo)
    assert stack.problems() == []
    assert [stack.debts(n).total() for n in (0, 1, 2)] == [0, 2, 1]


def snapshot(root):
    return {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_apply_then_again(repo, source):
    stack = Stack(repo)
    written = apply(stack, source)
    assert written == [
        "aten/src/ATen/native/Attn.cpp",
        "aten/src/ATen/native/native_functions.yaml",
        "torch/overrides.py",
    ]
    assert "    torch.abs: 1,\n    torch.attn: 3,\n" in (source / "torch/overrides.py").read_text(
        encoding="utf-8"
    )
    before = snapshot(source)
    assert apply(stack, source) == []
    assert snapshot(source) == before


def test_apply_is_all_or_nothing(repo, source):
    (source / "torch/overrides.py").write_text("table = {}\n", encoding="utf-8")
    before = snapshot(source)
    with pytest.raises(ForkError, match="torch/overrides.edit.py:1: 'torch.abs:' starts 0 lines"):
        apply(Stack(repo), source)
    assert snapshot(source) == before


def test_apply_over_an_earlier_commit_is_refused(repo, source):
    apply(Stack(repo), source, 1)
    with pytest.raises(ForkError, match="half patched"):
        apply(Stack(repo), source)


def test_a_write_that_fails_leaves_nothing(repo, source, monkeypatch):
    before = snapshot(source)

    def full(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(ForkError, match="No space left"):
        apply(Stack(repo), source)
    assert snapshot(source) == before


def test_copy_pristine(source, wheel, tmp_path):
    copy_pristine(Upstream(source), tmp_path / "copy")
    assert (tmp_path / "copy/version.txt").read_text(encoding="utf-8") == "2.6.0a0\n"
    with pytest.raises(ForkError, match="is there already"):
        copy_pristine(Upstream(source), tmp_path / "copy")
    with pytest.raises(ForkError, match="inside the upstream"):
        copy_pristine(Upstream(source), source / "copy")
    with pytest.raises(ForkError, match="unpack the wheel"):
        copy_pristine(Upstream(wheel), tmp_path / "other")
