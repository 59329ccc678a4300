"""Tests of the stack as real commits and as patches, which git itself makes and applies."""

import os
import subprocess
from functools import partial
from shutil import which

import pytest

from fork.errors import ForkError
from fork.overlay import Stack, Upstream, apply
from fork.series.absorb import absorb
from fork.series.branch import PENDING, commits, export
from fork.series.git import Git
from fork.tests.conftest import git, message, write_files
from fork.tests.overlay.test_stack import NATIVE, snapshot

CPP = "aten/src/ATen/native/Attn.cpp"


def state(tree):
    """Returns all that a failing command must not change."""
    refs = git(tree, "for-each-ref") if (tree / ".git").exists() else ""
    files = {p: b for p, b in snapshot(tree).items() if ".git" not in p.parts}
    return refs, files, (tree / ".git").exists() and git(tree, "status", "--branch", "--short")


def refusal(repo, tree, branch="attn"):
    """Returns the one line with which `commits` fails; it must have changed nothing."""
    before = state(tree)
    with pytest.raises(ForkError) as caught:
        commits(Stack(repo), tree, branch)
    assert state(tree) == before
    return str(caught.value)


@pytest.mark.parametrize("kind", ["source", "checkout"])
def test_a_commit_per_folder(repo, request, kind, tmp_path):
    tree = request.getfixturevalue(kind)
    _, made = commits(Stack(repo), tree, "attn")
    assert git(tree, "log", "--format=%H %s").splitlines()[:2] == [
        f"{made[1]} [attn 2/2] Do a thing",
        f"{made[0]} [attn 1/2] Do a thing",
    ]
    assert git(tree, "log", "-1", "--format=%B").splitlines() == [
        *("[attn 2/2] Do a thing", "", "because", "", "Review order:", "", "first", ""),
        *("Test plan:", "", "run it", "", "Stack-commit: 02-explicit"),
    ]
    assert (
        git(tree, "show", f"{made[0]}:{NATIVE.replace('.edit', '')}").count("attn(Tensor q)") == 1
    )
    assert git(tree, "symbolic-ref", "--short", "HEAD") == "attn"
    assert not git(tree, "status", "--porcelain")
    assert Git(tree).commit(PENDING) is None
    # The tip's tree is the one that `apply` makes of a pristine tree.
    tip = {p.relative_to(tree): b for p, b in snapshot(tree).items() if ".git" not in p.parts}
    git(tree, "checkout", "--quiet", "main")
    assert apply(Stack(repo), tree)
    assert tip == {
        p.relative_to(tree): b for p, b in snapshot(tree).items() if ".git" not in p.parts
    }


def test_the_hashes_are_the_same_every_time(repo, source, tmp_path, monkeypatch):
    subprocess.run(["cp", "-r", source, tmp_path / "other"], check=True)
    _, first = commits(Stack(repo), source, "attn")
    assert commits(Stack(repo), source, "attn")[1] == first
    monkeypatch.setenv("GIT_AUTHOR_NAME", "somebody")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2001-01-01T00:00:00")
    assert commits(Stack(repo), tmp_path / "other", "attn")[1] == first


def test_a_changed_stack_moves_the_branch(repo, checkout):
    commits(Stack(repo), checkout, "attn")
    (repo / CPP).write_text("int changed;\n", encoding="utf-8")
    commits(Stack(repo), checkout, "attn")
    assert (checkout / CPP).read_text(encoding="utf-8") == "int changed;\n"
    assert git(checkout, "rev-list", "--count", "main..attn") == "2"


def test_the_mode_of_an_edited_file_stays(repo, checkout):
    (checkout / "torch/overrides.py").chmod(0o755)
    git(checkout, "commit", "--quiet", "--all", "--message=executable")
    commits(Stack(repo), checkout, "attn")
    assert git(checkout, "ls-tree", "HEAD", "torch/overrides.py").startswith("100755")


def test_a_file_that_a_commit_removes(repo, checkout):
    (repo / "stack/02-explicit/torch").mkdir()
    (repo / "torch/overrides.edit.py").rename(repo / "stack/02-explicit/torch/overrides.edit.py")
    (repo / "stack/01-implicit/aten/src/ATen/native/Attn.cpp").write_bytes(
        (repo / CPP).read_bytes()
    )
    (repo / CPP).unlink()
    gone = [CPP, "torch/overrides.edit.py"]
    write_files(repo, {"stack/03-remove/commit.md": message([], gone)})
    assert Stack(repo).problems() == []
    commits(Stack(repo), checkout, "attn")
    assert git(checkout, "diff", "--name-status", "HEAD~1").split() == [
        *("D", CPP),
        *("M", "torch/overrides.py"),
    ]
    assert not git(checkout, "diff", "main", "--", "torch/overrides.py")


def test_another_branch(repo, checkout):
    commits(Stack(repo), checkout, "review/attn")
    assert git(checkout, "rev-list", "--count", "main..review/attn") == "2"


def test_a_tree_that_was_left_half_way_to_a_checkout(repo, source):
    git(source, "init", "--quiet")
    git(source, "add", "version.txt")
    _, made = commits(Stack(repo), source, "attn")
    git(source, "update-ref", PENDING, made[0])  # a run that was killed leaves this
    assert commits(Stack(repo), source, "attn")[1] == made


@pytest.mark.parametrize("kind", ["source", "checkout"])
def test_an_anchor_that_fails_half_way(repo, request, kind):
    tree = request.getfixturevalue(kind)
    (tree / "torch/overrides.py").write_text("table = {}\n", encoding="utf-8")
    if kind == "checkout":
        git(tree, "commit", "--quiet", "--all", "--message=other")
    line = refusal(repo, tree)
    assert (
        "torch/overrides.edit.py:1: 'torch.abs:' starts 0 lines of torch/overrides.py in " in line
    )
    assert "torch 2.6.0a0 (" in line


def test_a_tree_that_has_the_stack_already(repo, source):
    apply(Stack(repo), source)
    assert "not pristine: it holds" in refusal(repo, source)


def test_not_pytorch(repo, checkout, tmp_path):
    with pytest.raises(ForkError, match="not PyTorch"):
        commits(Stack(repo), tmp_path / "repo", "attn")
    git(checkout, "rm", "--quiet", "version.txt")
    git(checkout, "commit", "--quiet", "--message=without")
    assert "not PyTorch" in refusal(repo, checkout)


def test_a_dirty_checkout(repo, checkout):
    (checkout / "test/test_ops.py").write_text("changed\n", encoding="utf-8")
    assert "has changes without a commit, in test/test_ops.py" in refusal(repo, checkout)
    git(checkout, "add", "--all")
    assert "has changes without a commit, in test/test_ops.py" in refusal(repo, checkout)


def test_a_file_in_the_way(repo, checkout):
    write_files(checkout, {CPP: "mine\n", "notes.txt": "not in the way\n"})
    assert f"{CPP}: git does not know this file; the stack has one" in refusal(repo, checkout)


def test_in_the_middle_of_a_merge(repo, checkout):
    git(checkout, "checkout", "--quiet", "-b", "other")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message=a")
    git(checkout, "checkout", "--quiet", "main")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message=b")
    git(checkout, "merge", "--quiet", "--no-commit", "other")
    assert "in the middle of a rebase, merge or pick" in refusal(repo, checkout)


def test_somebodys_branch(repo, checkout):
    git(checkout, "checkout", "--quiet", "-b", "attn")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message=mine")
    git(checkout, "checkout", "--quiet", "main")
    assert "the branch attn is not the stack's" in refusal(repo, checkout)


def test_a_commit_that_was_changed_there(repo, checkout):
    commits(Stack(repo), checkout, "attn")
    (checkout / CPP).write_text("int reviewed;\n", encoding="utf-8")
    git(checkout, "commit", "--quiet", "--all", "--amend", "--no-edit")
    assert "'[attn 2/2] Do a thing' of attn was changed there" in refusal(repo, checkout)
    git(checkout, "checkout", "--quiet", "main")
    assert "absorb" in refusal(repo, checkout)


@pytest.mark.parametrize("what", ["a file", "a message", "a trailer", "a commit on top"])
def test_what_absorb_took_over_can_be_made_anew(repo, checkout, what):
    commits(Stack(repo), checkout, "attn")
    text = git(checkout, "log", "-1", "--format=%B")
    if what == "a file":
        (checkout / CPP).write_text("int reviewed;\n", encoding="utf-8")
        git(checkout, "add", "--all")
    amended = {"a message": text.replace("because", "as"), "a trailer": f"{text}\nReviewed-by: X"}
    if what == "a commit on top":
        text = text.partition("Stack-commit")[0].replace("Do a thing", "Do more")
        write_files(checkout, {"test/test_more.py": ""})
        git(checkout, "add", "--all")
        git(checkout, "commit", "--quiet", f"--message={text}")
    else:
        git(checkout, "commit", "--quiet", "--amend", f"--message={amended.get(what, text)}")
    git(checkout, "checkout", "--quiet", "main")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message=the next release")
    assert "was changed there: take that over first" in refusal(repo, checkout)
    git(checkout, "checkout", "--quiet", "attn")
    assert absorb(Stack(repo), checkout)
    tree = git(checkout, "rev-parse", "attn^{tree}")
    git(checkout, "checkout", "--quiet", "main")
    commits(Stack(repo), checkout, "attn")
    assert git(checkout, "rev-parse", "attn^{tree}") == tree
    assert git(checkout, "merge-base", "attn", "main") == git(checkout, "rev-parse", "main")


@pytest.mark.parametrize("hook", ["post-checkout", "reference-transaction"])
def test_a_hook_that_fails(repo, checkout, tmp_path, hook):
    path = write_files(tmp_path / "hooks", {hook: "#!/bin/sh\nexit 2\n"}) / hook
    path.chmod(0o700)
    git(checkout, "config", "core.hooksPath", str(tmp_path / "hooks"))
    _, made = commits(Stack(repo), checkout, "attn")
    assert git(checkout, "rev-parse", "HEAD") == made[-1]


OTHERS = """#!/bin/sh
GIT_TEST_ASSUME_DIFFERENT_OWNER=1 GIT_CONFIG_NOSYSTEM=1 exec {} "$@"
"""


@pytest.mark.parametrize("act", [partial(commits, branch="attn"), absorb])
def test_another_users_checkout(repo, checkout, monkeypatch, tmp_path, act):
    before = snapshot(checkout)
    write_files(tmp_path / "bin", {"git": OTHERS.format(which("git"))}).joinpath("git").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ForkError, match="owned by another user.*safe.directory"):
        act(Stack(repo), checkout)
    assert snapshot(checkout) == before


def test_a_commit_on_top(repo, checkout):
    commits(Stack(repo), checkout, "attn")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message=fix a typo")
    assert "'fix a typo' of attn was changed there: take that over first" in refusal(repo, checkout)


def test_no_git(repo, source, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ForkError, match="git: not found: install the package git"):
        commits(Stack(repo), source, "attn")


@pytest.mark.parametrize("kind", ["source", "checkout"])
def test_upstreams_line_ends_stay(repo, request, kind, tmp_path):
    """An edited file of upstream's ends its lines with CRLF: so do all of its lines afterwards."""
    tree, path = request.getfixturevalue(kind), "torch/overrides.py"
    (tree / path).write_bytes((tree / path).read_bytes().replace(b"\n", b"\r\n"))
    if kind == "checkout":
        git(tree, "commit", "--quiet", "--all", "--message=other line ends")
    names = export(Stack(repo), Upstream(tree), tmp_path / "patches")
    applied = tmp_path / "applied"
    subprocess.run(["cp", "-r", tree, applied], check=True)
    apply(Stack(repo), applied)
    _, made = commits(Stack(repo), tree, "attn")
    found = Git(tree).bytes("show", f"{made[-1]}:{path}")
    assert found == (applied / path).read_bytes() == (tree / path).read_bytes()
    assert found.count(b"\n") == found.count(b"\r\n") == 5
    git(tree, "checkout", "--quiet", "-b", "am", "main")
    git(tree, "am", "--quiet", "--keep-cr", *(str(tmp_path / "patches" / name) for name in names))
    assert git(tree, "diff", "attn", "am") == ""
    # What is changed there is taken back.
    git(tree, "checkout", "--quiet", "attn")
    (tree / path).write_bytes(found.replace(b"torch.attn: 3,", b"torch.attn: 4,"))
    git(tree, "commit", "--quiet", "--all", "--amend", "--no-edit")
    assert absorb(Stack(repo), tree) == ["torch/overrides.edit.py"]
    edit = (repo / "torch/overrides.edit.py").read_bytes()
    assert edit == b"# @@ after: torch.abs:\n    torch.attn: 4,\n"


def test_a_working_tree_to_which_git_gave_other_line_ends(repo, checkout):
    git(checkout, "config", "core.autocrlf", "true")
    commits(Stack(repo), checkout, "attn")
    assert (checkout / CPP).read_bytes().endswith(b"\r\n")
    assert apply(Stack(repo), checkout) == []


def test_export_is_what_git_am_takes(repo, source, checkout, tmp_path):
    _, made = commits(Stack(repo), checkout, "attn")
    git(checkout, "checkout", "--quiet", "-b", "am", "main")
    names = export(Stack(repo), Upstream(source), tmp_path / "patches")
    assert names == ["0001-implicit.patch", "0002-explicit.patch"]
    listed = (tmp_path / "patches/series").read_text(encoding="utf-8").split()
    git(checkout, "am", "--quiet", *(str(tmp_path / "patches" / name) for name in listed))
    assert git(checkout, "rev-parse", "am^{tree}") == git(
        checkout, "rev-parse", f"{made[-1]}^{{tree}}"
    )
    assert "Stack-commit: 02-explicit" in git(checkout, "log", "-1", "--format=%B")


def test_export_is_the_same_to_the_byte(repo, source, tmp_path, monkeypatch):
    def written():
        export(Stack(repo), Upstream(source), tmp_path / "patches")
        return snapshot(tmp_path / "patches")

    first = written()
    home = write_files(tmp_path / "home", {".gitconfig": "[diff]\nnoprefix = true\ncontext = 9\n"})
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2001-01-01T00:00:00")
    assert written() == first
    assert all(b"-- \n" not in content for content in first.values())  # git's version would follow


def test_export_replaces_an_export_only(repo, source, tmp_path):
    stack, upstream = Stack(repo), Upstream(source)
    out = tmp_path / "patches"
    export(stack, upstream, out)
    stale = write_files(out, {"0003-gone.patch": ""}) / "0003-gone.patch"
    with pytest.raises(ForkError, match="is there already, and no earlier export"):
        export(stack, upstream, out)
    with (out / "series").open("a", encoding="utf-8") as series:
        series.write("0003-gone.patch\n")
    export(stack, upstream, out)
    assert not stale.exists()
    write_files(out, {"notes.txt": "mine\n"})
    with pytest.raises(ForkError, match="no earlier export"):
        export(stack, upstream, out)
    assert (out / "notes.txt").exists() and len(list(out.glob("*.patch"))) == 2
    assert not list(tmp_path.glob(".export-*"))


def test_an_export_that_fails_leaves_the_earlier_one(repo, source, tmp_path):
    export(Stack(repo), Upstream(source), tmp_path / "patches")
    before = snapshot(tmp_path / "patches")
    (source / "torch/overrides.py").write_text("table = {}\n", encoding="utf-8")
    with pytest.raises(ForkError, match="starts 0 lines"):
        export(Stack(repo), Upstream(source), tmp_path / "patches")
    assert snapshot(tmp_path / "patches") == before
