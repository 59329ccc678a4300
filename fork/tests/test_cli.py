"""Tests of the commands, called as a user calls them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest
from click.testing import CliRunner

from commands import bench as benchmark
from fork import bootstrap, paths
from fork.__main__ import main
from fork.errors import ForkError
from fork.overlay import NATIVE
from fork.paths import ROOT
from fork.project import PROJECT
from fork.series import documentation, linters, remarks
from fork.series.linters import Lint
from fork.source import build as source_build
from fork.source.build import Figures
from fork.source.place import Place
from fork.suites import commit, from_source, pending
from fork.suites.files import LAB, SUITES
from fork.suites.results import Result
from fork.tests.conftest import git, message, write_files

COMMANDS = (
    *("check", "stack", "new", "tree", "apply", "commits", "export", "absorb", "review"),
    *("graft", "install", "source", "site"),
    *("test", "test-upstream", "test-stack", "test-releases", "test-sanitizers"),
    *("test-arm64", "test-mutants", "cuda-check", "triton-check"),
    *("course", "extension", "wheel", "lint", "capabilities", "ci"),
    *("bench", "bench-gpu"),
)


@pytest.fixture
def in_repo(repo, monkeypatch):
    stand_in(monkeypatch, repo)
    return repo


def stand_in(monkeypatch, root):
    """Makes `root` the clone that the commands work in."""
    places = {"ROOT": "", "VENV": ".venv", "BUILD": "build", "SOURCES": "build/source"}
    for name, path in (places | {"BASES": "build/bases", "ANCHORS": "build/anchors"}).items():
        monkeypatch.setattr(paths, name, root / path)


def invoke(*args):
    result = CliRunner().invoke(main, [str(a) for a in args])
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command):
    code, output = invoke(command, "--help")
    assert code == 0 and f"{command} [OPTIONS]" in output


def test_every_command_is_listed_here_and_in_one_section():
    assert set(main.commands) == set(COMMANDS)
    sections = dict.fromkeys(c.section for c in main.commands.values())
    assert [*sections] == ["Build", "Test", "Stack", "Measure"]
    listed = [line.split() for line in CliRunner().invoke(main).output.splitlines()]
    assert set(COMMANDS) <= {words[0] for words in listed if words}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_of_each_command_is_one_that_it_takes(command, monkeypatch):
    example = main.commands[command].example
    assert example.split()[:4] == ["python", "-m", "fork", command]
    assert example in invoke(command, "--help")[1]
    args = [arg.replace("~/pytorch", str(ROOT)) for arg in shlex.split(example)[4:]]
    monkeypatch.setattr("fork.graft.base._installed", lambda: None)  # as if torch were there
    main.commands[command].make_context(command, args)


def test_stack(in_repo):
    commit = in_repo / "stack/01-implicit/commit.md"
    commit.write_text(
        commit.read_text(encoding="utf-8").replace("# Do a thing", "# Do [a] thing"),
        encoding="utf-8",
    )
    code, output = invoke("stack")
    assert code == 0 and "01-implicit Do [a] thing" in output and "02-explicit" in output


def test_tree_and_apply(in_repo, source, tmp_path):
    code, output = invoke("tree", 1, tmp_path / "new", "--upstream", source)
    assert code == 0 and "2 files" in output
    assert not (source / "aten/src/ATen/native/Attn.cpp").exists()
    assert invoke("tree", 9, tmp_path / "other", "--upstream", source) == (
        1,
        "error: commit 9: the stack has commits 1 to 2",
    )
    assert not (tmp_path / "other").exists()
    assert "3 files changed" in invoke("apply", source)[1]
    code, output = invoke("apply", source)
    assert code == 0 and "has the stack already" in output


def test_commits_export_and_absorb(in_repo, source, tmp_path):
    code, output = invoke("export", tmp_path / "patches", "--upstream", source)
    assert code == 0 and output.endswith("patches: 2 patches")
    code, output = invoke("commits", source, "--branch", "review")
    assert code == 0 and "[attn 2/2] Do a thing branch review: 2 commits on torch 2.6.0a0" in output
    assert invoke("absorb", source) == (0, "nothing to absorb")
    (source / "aten/src/ATen/native/Attn.cpp").write_text("int reviewed;\n", encoding="utf-8")
    git(source, "commit", "--quiet", "--all", "--amend", "--no-edit")
    code, output = invoke("absorb", source)
    assert code == 0 and output.endswith("stack/02-explicit/commit.md 3 files changed")
    code, output = invoke("commits", source, "--branch", "review")
    assert code == 0 and "branch review: 2 commits on torch 2.6.0a0" in output


BAD = Lint("a.py", 7, "RUFF", "E1", "bad")


@pytest.mark.parametrize("found, pages", [([], []), ([BAD], []), ([], [BAD])])
def test_review(in_repo, source, monkeypatch, found, pages):
    seen = []

    def lint(tree, base, before, venv, log):
        seen.append((git(tree, "rev-parse", "HEAD~1"), before))
        return found if len(seen) == 2 else []

    monkeypatch.setattr(
        remarks, "make_venv", lambda venv, file: seen.clear() or file.read_text(encoding="utf-8")
    )
    monkeypatch.setattr(linters, "requirements", lambda tree: ["ruff==0.7.4"])
    monkeypatch.setattr(linters, "lint", lint)
    monkeypatch.setattr(documentation, "requirements", lambda tree: ["sphinx==5.0.0"])
    monkeypatch.setattr(documentation, "lint", lambda tree, added, *_: pages)
    code, output = invoke("review", "--upstream", source)
    count = len(found + pages)
    assert code == count and f"{count} remarks; not run: ACTIONLINT" in output
    assert ("a.py:7: RUFF E1: bad" in output) == bool(count)
    assert len(seen) == 2 and all(parent == before for parent, before in seen)
    assert git(source, "symbolic-ref", "--short", "HEAD") == "attn"


@pytest.mark.parametrize(
    "fails, branch",
    [
        ("linters.requirements", "main"),
        ("documentation.requirements", "main"),
        ("make_venv", "main"),
        ("linters.lint", "attn"),
        ("documentation.lint", "attn"),
    ],
)
def test_a_review_that_fails_leaves_the_checkout_on_a_branch(
    in_repo, checkout, monkeypatch, fails, branch
):
    """It is the one that was checked out, until all that the review needs is there."""

    def fail(*_):
        raise ForkError("it fails")

    for name in ("linters.requirements", "linters.lint", "documentation.requirements"):
        monkeypatch.setattr(f"fork.series.{name}", lambda *_: [])
    monkeypatch.setattr("fork.series.documentation.lint", lambda *_: [])
    monkeypatch.setattr(remarks, "make_venv", lambda *_: None)
    room, _, name = fails.rpartition(".")
    modules = {"": remarks, "linters": linters, "documentation": documentation}
    monkeypatch.setattr(modules[room], name, fail)
    status, output = invoke("review", "--upstream", checkout)
    assert status == 1 and output.endswith("error: it fails")
    assert git(checkout, "symbolic-ref", "--short", "HEAD") == branch
    branches = git(checkout, "branch", "--format=%(refname:short)").split()
    assert branches == sorted({"main", branch})


@pytest.mark.parametrize("failed", [False, True])
def test_source(in_repo, source, tmp_path, monkeypatch, failed):
    calls = []
    place = Place(source, Path(sys.executable), tmp_path / "logs", {})
    monkeypatch.setattr("fork.source.checkout", lambda *args: calls.append(args) or place)
    cost = Figures(1380, 8575, 4500, 2**30, 1382, 9000, 2**33)
    monkeypatch.setattr(source_build, "configure", lambda *args: calls.append(args[2:]))
    monkeypatch.setattr("fork.source.build_whole", lambda _: cost)
    monkeypatch.setattr(from_source, "check", lambda *_: None)
    results = [Result(name, tests={"TestA.test_a": "passed"}) for name in LAB]
    results[0].tests["TestA.test_b"] = "failed" if failed else "passed"
    monkeypatch.setattr(from_source, "run_suites", lambda *_, **named: results)
    code, output = invoke("source", "--upstream", source, "--python", "python3.12")
    assert code == failed
    assert calls == [(source, "python3.12"), ("attn",)]
    assert "1380 8575 75 1.0 GiB" in output
    assert ("6 passed, 1 failed" if failed else "7 passed, 0 failed") in output
    calls.clear()
    monkeypatch.setattr("fork.source.build_whole", None)
    assert invoke("source", "--upstream", source, "--configure") == (0, "")
    assert calls[1:] == [("attn",)]


def test_check(in_repo, source, wheel, unpacked):
    code, output = invoke(
        "check", "--upstream", source, "--upstream", wheel, "--upstream", unpacked
    )
    assert code == 0 and output.count("all anchors match") >= 3
    (source / "torch/overrides.py").write_text("", encoding="utf-8")
    code, output = invoke("check", "--upstream", source)
    assert code == 1
    assert (
        "overrides.edit.py:1: 'torch.abs:' starts 0 lines of torch/overrides.py in torch 2.6.0a0"
        in output
    )


def test_check_says_what_it_cannot_try(in_repo, source, wheel):
    edited = "test/test_ops.edit.py"
    write_files(in_repo, {edited: "# @@ before: pass\nours\n"})
    commit = in_repo / "stack/02-explicit/commit.md"
    commit.write_text(
        commit.read_text(encoding="utf-8").replace("  - torch/", f"  - {edited}\n  - torch/"),
        encoding="utf-8",
    )
    code, output = invoke("check", "--upstream", source, "--upstream", wheel)
    assert code == 0
    assert "(source pytorch): all anchors match torch 2.13.0" in output
    assert output.endswith(": all anchors match; 1 of 3 edited files are in no wheel")


def test_check_of_an_unsound_stack(in_repo):
    (in_repo / "torch/stray.py").write_text("x", encoding="utf-8")
    code, output = invoke("check")
    assert code == 1 and "torch/stray.py: no commit of the stack claims this file" in output


def test_an_error_is_one_line(in_repo, tmp_path):
    assert invoke("apply", tmp_path) == (
        1,
        f"error: {tmp_path}: not PyTorch: neither a source tree (aten/, version.txt), "
        "nor a folder with an unpacked or installed torch/, nor a .whl file",
    )


WRONG_BASE = "torch 9.9: not a release that "
WRONG_COMMIT = "commit {}: the stack has commits 1 to 2"


@pytest.mark.parametrize(
    "command, words",
    [
        ("install --base 9.9", WRONG_BASE),
        ("install --base nowhere.whl", "nowhere.whl: no such wheel"),
        ("install --commit 3 --example", WRONG_COMMIT.format(3)),
        ("graft --base 9.9", WRONG_BASE),
        ("graft --commit 0", WRONG_COMMIT.format(0)),
        ("test --base 9.9", WRONG_BASE),
        ("test-upstream --commit 3", WRONG_COMMIT.format(3)),
        ("capabilities --base 9.9", WRONG_BASE),
        ("bench-gpu --base 9.9", WRONG_BASE),
        ("source --upstream stack --python python9", "python9: no such Python to build"),
        ("check --fetch --upstream stack", "stack: not PyTorch"),
    ],
)
def test_what_is_wrong_is_refused_before_a_lock_a_download_or_a_file(
    in_repo, monkeypatch, command, words
):
    def made(*_, **__):
        raise AssertionError("it waits for another run, or makes something")

    for name in ("fork.paths.alone", "fork.overlay.releases.run", "fork.bootstrap.run"):
        monkeypatch.setattr(name, made)
    monkeypatch.chdir(in_repo)
    before = {*in_repo.rglob("*")}
    code, output = invoke(*command.split())
    assert code == 1 and "error: " in output and words in output
    assert {*in_repo.rglob("*")} == before


SERIES = {
    "stack/01-note/commit.md": message(["docs/note.md"]),
    "stack/02-script/commit.md": message(
        ["test/attn_function.py"], plan="python test/attn_function.py --seed 1"
    ),
    "stack/03-op/commit.md": message([NATIVE, "test/test_attn.py", "torch/attn.py"]),
    "stack/04-kernel/commit.md": message(
        ["aten/src/ATen/native/cpu/Attn.h"], plan="python test/test_attn.py"
    ),
    "stack/05-vmap/commit.md": message(["test/test_attn_vmap.py"]),
    "CMakeLists.txt": "",
    "aten/src/ATen/native/cpu/Attn.h": "// fast\n",
    "docs/note.md": "why\n",
    NATIVE: "# @@ before: - func: baddbmm(\n- func: attn(Tensor q) -> Tensor\n",
    "test/attn_function.py": "script\n",
    "test/test_attn.py": "tests\n",
    "test/test_attn_vmap.py": "more tests\n",
    "torch/attn.py": "",
}


class Runner:
    """Replaces the graft, and the runs of suites and scripts, of which each then has one test."""

    def __init__(self):
        self.ran = []  # (commit, its suites and scripts)
        self.grafted = []
        self.libraries = []  # commits for which the library was made that TestFX loads
        self.outcomes = {}  # commit -> the outcome of its tests, or the error of its graft
        self.makes = {}  # commit -> the second key

    def graft_into(self, venv, release, number, *, folder):
        self.grafted.append((number, folder))
        return type("Grafted", (), {"base": number})

    def made_by(self, plan, stack, commit):
        return self.makes.get(commit.folder.name, "")

    def run(self, python, tree, wanted, *, log_dir):
        commit = log_dir.name.partition("-")[2]
        if wanted:
            self.ran.append((commit, list(wanted)))
        outcome = self.outcomes.get(commit, "passed")
        if isinstance(outcome, BaseException):
            raise outcome
        return [Result(name, tests={"TestA.test_a": outcome} if outcome else {}) for name in wanted]

    def run_script(self, python, tree, command, log_dir):
        return self.run(python, tree, [str(command)], log_dir=log_dir)[0]

    def commits(self):
        ran = [commit for commit, _ in self.ran]
        self.ran.clear()
        return ran


@pytest.fixture
def runner(tmp_path, source, monkeypatch):
    root = write_files(tmp_path / "series", SERIES)
    made = Runner()
    stand_in(monkeypatch, root)
    (root / "build").mkdir()
    monkeypatch.setattr(commit, "place", lambda upstream: (source, root / "venv"))
    monkeypatch.setattr(commit, "graft_into", made.graft_into)
    monkeypatch.setattr(commit, "made_by", made.made_by)
    monkeypatch.setattr(commit, "run_suites", made.run)
    monkeypatch.setattr(commit, "run_script", made.run_script)
    monkeypatch.setattr(commit.torchbind, "install", lambda base, *_: made.libraries.append(base))
    return made


@pytest.mark.parametrize(
    ("args", "ran"),
    [
        ((), ("05-vmap", [*SUITES])),
        (("--commit", 3), ("03-op", [*SUITES])),
        (("--suite", "test_ops.py"), ("05-vmap", ["test_ops.py"])),
    ],
)
def test_upstreams_suites_of_one_commit(runner, args, ran):
    code, output = invoke("test-upstream", *args)
    assert (code, runner.ran) == (0, [ran])
    commit, names = ran
    assert runner.libraries == ([int(commit[:2])] if "test_fx.py" in names else [])
    assert f"{len(names)} passed, 0 failed, 0 skipped" in output
    assert "/venv/bin/python test/test_ops.py -k attn" in output


def test_upstreams_suites_before_the_operator(runner):
    code, output = invoke("test-upstream", "--commit", 2)
    assert (code, runner.grafted) == (1, [])
    assert "error: stack/02-script has no operator yet: none of upstream's tests is ours" in output


@pytest.mark.parametrize(("outcome", "word"), [("failed", "22 failed"), (None, "error: none of")])
def test_upstreams_suites_that_fail(runner, outcome, word, monkeypatch):
    monkeypatch.setattr(commit, "SUITES", dict.fromkeys(map(str, range(22)), ()))
    runner.outcomes["05-vmap"] = outcome
    code, output = invoke("test-upstream")
    assert code == 1 and word in output


def test_each_commit_of_the_stack(runner):
    """Each runs its plan's files, its own, and the lab's suites if they see it or it is the tip."""
    code, output = invoke("test-stack")
    assert code == 0 and "5 of 5 commits passed, 0 failed, 0 to be run" in output
    assert runner.ran == [
        ("02-script", ["test/attn_function.py --seed 1"]),
        ("03-op", [*LAB, "test_attn.py"]),
        ("04-kernel", ["test_attn.py"]),
        ("05-vmap", [*LAB, "test_attn_vmap.py"]),
    ]
    assert runner.grafted == [(n, "stack") for n in (2, 3, 4, 5)]
    table = output.partition("Each commit by itself")[2]
    for row in ("01-note 0 0 0 0 0 0", "02-script 0 0 0 1 0 0", "05-vmap 6 0 0 1 0 0"):
        assert row in table
    runner.commits()
    assert invoke("test-stack")[0] == 0
    assert runner.commits() == []


def test_a_commit_that_makes_the_same_is_not_run_again(runner):
    runner.makes |= {"03-op": "m1", "04-kernel": "m2"}
    invoke("test-stack")
    runner.commits()
    (paths.ROOT / "CMakeLists.txt").write_text("# more", encoding="utf-8")
    runner.makes["04-kernel"] = "m3"
    code, output = invoke("test-stack")
    assert (code, runner.commits()) == (0, ["02-script", "04-kernel", "05-vmap"])
    assert output.count("is the same as what passed") == 1
    assert "5 of 5 commits passed, 0 failed, 0 to be run" in output
    assert (invoke("test-stack")[0], runner.commits()) == (0, [])


def test_what_passed_is_run_again_where_it_changes(runner):
    invoke("test-stack")
    kept = (paths.ROOT / "stack/results.json").read_text(encoding="utf-8")
    assert len(kept.splitlines()) == 5 + 2  # a line for each commit, and two braces
    runner.commits()
    (paths.ROOT / "aten/src/ATen/native/cpu/Attn.h").write_text("// faster\n", encoding="utf-8")
    code, output = invoke("test-stack", "--minutes", 0)
    assert (code, runner.commits()) == (0, [])
    assert output.count("to be run again") == 2
    assert "3 of 5 commits passed, 0 failed, 2 to be run" in output
    assert invoke("test-stack")[0] == 0
    assert runner.commits() == ["04-kernel", "05-vmap"]


@pytest.mark.parametrize("outcome", ["failed", ForkError("the compiler stopped"), None])
def test_a_commit_that_fails_fails_the_stack_and_is_run_again(runner, outcome):
    runner.outcomes["03-op"] = outcome
    code, output = invoke("test-stack")
    assert code == 1 and "03-op failed" in output and "05-vmap 6 0 0 1 0 0" in output
    assert "4 of 5 commits passed, 1 failed, 0 to be run" in output
    assert not isinstance(outcome, Exception) or f"error: {outcome}" in output
    runner.commits()
    runner.outcomes.clear()
    assert invoke("test-stack")[0] == 0
    assert runner.commits() == ["03-op"]


def test_a_stack_that_is_stopped_goes_on_where_it_was(runner):
    runner.outcomes["04-kernel"] = KeyboardInterrupt()
    assert invoke("test-stack") == (130, ANY)
    runner.commits()
    runner.outcomes.clear()
    assert invoke("test-stack")[0] == 0
    assert runner.commits() == ["04-kernel", "05-vmap"]


def test_a_commit_begins_only_if_it_is_likely_to_end_in_time(runner, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(pending.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pending, "cpu_seconds", lambda: 2 * now[0])
    monkeypatch.setattr(pending.os, "cpu_count", lambda: 2)
    took = {"02-script": 30, "03-op": 500, "04-kernel": 90, "05-vmap": 60}

    def run(python, tree, wanted, *, log_dir):
        now[0] += took.get(log_dir.name.partition("-")[2], 0)
        return runner.run(python, tree, wanted, log_dir=log_dir)

    monkeypatch.setattr(commit, "run_suites", run)
    code, output = invoke("test-stack", "--minutes", 2)
    assert (code, runner.commits()) == (0, ["02-script", "03-op"])
    assert "3 of 5 commits passed, 0 failed, 2 to be run" in output
    # The estimate for any other is as long as the third one took.
    assert (invoke("test-stack", "--minutes", 8)[0], runner.commits()) == (0, [])
    assert (invoke("test-stack")[0], runner.commits()) == (0, ["04-kernel", "05-vmap"])
    (paths.ROOT / "torch/attn.py").write_text("changed = True\n", encoding="utf-8")
    assert invoke("test-stack", "--minutes", 3)[0] == 0
    assert runner.commits() == ["04-kernel", "05-vmap"]


def test_a_plan_that_names_no_file_is_one_error(runner):
    plan = paths.ROOT / "stack/04-kernel/commit.md"
    plan.write_text(
        plan.read_text(encoding="utf-8").replace("test_attn.py", "test_attm.py"), encoding="utf-8"
    )
    wrong = "error: stack/04-kernel: its test plan names test/test_attm.py, "
    for command in ("check", "test-stack"):
        code, output = invoke(command)
        assert code == 1 and output.count(wrong) == 1 and not runner.ran


@pytest.mark.parametrize(
    "lie, words",
    [
        ("sys.platform = 'darwin'", "CPython on Linux is needed"),
        (
            "import sysconfig; sysconfig.get_paths = lambda: {'include': '/nowhere'}",
            "Python's headers are missing",
        ),
        ("import os; os.environ.pop('CXX', 0); os.environ['PATH'] = '/nowhere'", "install g++"),
        (
            "sys.argv += ['--base', 'installed']; bootstrap.VENV /= 'nowhere'; "
            "bootstrap.MODULES = ('nope', 'click', 'nor_it')",
            "lacks nope, nor_it",
        ),
        (
            "sys.argv += ['--base=installed']; bootstrap.VENV = bootstrap.Path(sys.prefix)",
            "is what is to be made: name another with PYTHON=",
        ),
    ],
)
def test_bootstrap_says_what_is_missing(lie, words):
    code = f"import sys; from fork import bootstrap; {lie}; bootstrap.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert (
        done.stderr.startswith("error: ") and words in done.stderr and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize("module", ["fork", "fork.bootstrap", "fork.__main__"])
@pytest.mark.parametrize("version", ["2.7.18", "3.9.18"])
def test_an_old_python_is_named_before_anything_is_imported(module, version):
    """An old Python cannot even read the other files."""
    numbers = tuple(map(int, version.split(".")))
    code = f"""
import sys
sys.version_info, sys.version = {numbers}, "{version} (main)"
try:
    import {module}
finally:
    print([name for name in sys.modules if name.startswith("fork.")])
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    words = f"error: Python 3.10 or newer is needed, and this is {version}; name one with PYTHON=\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "[]\n", words)


# Of pip, only Python 3.10 imports something.
NEEDED = [m for m in bootstrap.MODULES if m != "pip" or sys.version_info < (3, 11)]


@pytest.mark.parametrize("lacks", [*NEEDED, "typing_extensions.Self"])
def test_a_python_without_the_requirements_is_one_line(lacks):
    """One that is too old lacks a name that is imported from it."""
    module, _, name = lacks.partition(".")
    hide = f"import {module}; del {lacks}" if name else f"sys.modules['{module}'] = None"
    code = f"import sys; {hide}; import runpy; runpy.run_module('fork', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {sys.executable}: ")
    assert (name or module) in done.stderr and ".venv/bin/python" in done.stderr


class TestReplacing:
    """`.venv` is made anew with another Python, or for another base."""

    @pytest.fixture(autouse=True)
    def environment(self, tmp_path, monkeypatch):
        monkeypatch.delenv("BASE", raising=False)  # `make test` sets it
        self.venv = tmp_path / ".venv"
        write_files(self.venv, {"works": "yes", ".requirements": "older", ".made": "older"})
        monkeypatch.setattr(bootstrap, "VENV", self.venv)
        self.monkeypatch, self.calls = monkeypatch, []
        monkeypatch.setattr(bootstrap, "check_machine", lambda: None)
        monkeypatch.setattr(bootstrap.os, "execv", lambda *args: self.calls.append(args[1]))
        monkeypatch.setattr(bootstrap.os, "chdir", lambda place: None)
        monkeypatch.setattr(bootstrap, "run", self.run)
        self.fails = ""

    def run(self, command, wrong):
        """Stands for the programs that make an environment; one may fail, or be stopped."""
        words = " ".join(command)
        if "-m venv" in words:
            python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
            write_files(self.venv, {"bin/python": python, "new": ""})
            (self.venv / "bin/python").chmod(0o755)
        if self.fails and self.fails in words:
            raise self.error

    def make(self, *args):
        self.monkeypatch.setattr(sys, "argv", ["bootstrap", *args])
        bootstrap.main()

    def kept(self):
        return [p.name for p in self.venv.parent.iterdir()] == [".venv"] and (
            self.venv / "works"
        ).exists()

    @pytest.mark.parametrize("fails", ["-m venv", "-m pip"])
    @pytest.mark.parametrize("error", [ForkError("no network"), KeyboardInterrupt(), OSError(28)])
    def test_one_that_cannot_be_made(self, fails, error):
        self.fails, self.error = fails, error
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            self.make("install")
        assert self.kept() and not self.calls

    @pytest.mark.parametrize(
        "args, words",
        [
            ("install --base 9.9", "error: torch 9.9: not a release"),
            ("install --base nowhere.whl", "error: nowhere.whl: no such wheel"),
            ("graft --commit 99", "error: commit 99: the stack has"),
            ("install --nope", "No such option"),
            ("nope", "No such command 'nope'"),
            ("install --base installed", f"no pristine torch is installed for {sys.executable}: "),
        ],
    )
    def test_a_command_that_is_refused(self, args, words):
        real = subprocess.run

        def without_torch(command, **named):
            """Hides a pristine torch, which this Python may have."""
            code = "import importlib.metadata as found, runpy; found.distributions = lambda **_: []"
            code += "; runpy.run_module('fork', run_name='__main__')"
            return real([command[0], "-c", code, *command[3:]], **named)

        self.monkeypatch.setattr(bootstrap.subprocess, "run", without_torch)
        with pytest.raises(SystemExit) as e:
            self.make(*args.split())
        assert words in str(e.value) and self.kept() and not self.calls

    def test_one_that_a_kill_left_half_made(self):
        """The one that was there before is back, and is replaced once the new one is complete."""
        self.venv.rename(self.venv.with_name(".venv.before"))
        write_files(self.venv, {".made": sys.version, "half": "made"})
        self.make("stack")
        assert [p.name for p in self.venv.parent.iterdir()] == [".venv"]
        assert not (self.venv / "works").exists() and not (self.venv / "half").exists()
        assert (self.venv / "new").exists() and len(self.calls) == 1


@pytest.mark.parametrize(
    "args, variables, base",
    [
        (["install"], {}, None),
        (["install", "--example"], {"BASE": "installed"}, "installed"),
        (["bench-gpu", "--base", "installed"], {}, "installed"),
        (["install", "--base=other"], {"BASE": "installed"}, "other"),
        (["install", "--base"], {}, None),
    ],
)
def test_chosen_base(args, variables, base):
    assert bootstrap.chosen_base(args, variables) == base


@pytest.mark.parametrize(
    ("args", "status", "kept"),
    [
        (("--only", "n=4"), 0, []),
        (("--publish", "--quick"), 0, ["cpu.json", "cpu.svg"]),
        (("--publish",), 3, []),
        (("--script", "lengths", "--publish", "--largest", "512"), 0, ["cpu-lengths.json"]),
    ],
)
def test_bench(tmp_path, monkeypatch, args, status, kept):
    """The benchmark gets the arguments; its results are kept if that was asked for and it ran."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "fork").mkdir()
    scripts = {"bench": ["cpu.json", "cpu.svg", "other"], "lengths": ["cpu-lengths.json"]}
    for script, names in scripts.items():
        (tmp_path / f"bench/{script}.py").write_text(
            "import json, pathlib, sys\n"
            "out = pathlib.Path(sys.argv[2]); out.mkdir(parents=True)\n"
            f"for name in {names}:\n"
            "    (out / name).write_text(json.dumps({'args': sys.argv[3:]}))\n"
            f"sys.exit({status})\n",
            encoding="utf-8",
        )
    python = tmp_path / "build/venv-bench/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    stand_in(monkeypatch, tmp_path)
    monkeypatch.setattr(benchmark, "make_venv", lambda venv, requirements: None)
    monkeypatch.setattr(benchmark, "graft_into", lambda venv, release: None)
    monkeypatch.setattr(benchmark, "kernel", lambda device: "a hash")
    assert invoke("bench", *args)[0] == status
    passed = [arg for arg in args if arg not in ("--publish", "--script", "lengths")]
    script = "lengths" if "lengths" in args else "bench"
    result = scripts[script][0]
    # Random shapes for two minutes, unless the arguments say otherwise.
    sweep = ["--sweep", "120"] if script == "bench" else []
    measured = json.loads((tmp_path / "build" / script / result).read_text(encoding="utf-8"))
    assert measured == {"args": sweep + passed}
    assert sorted(f.name for f in tmp_path.glob("bench/published/*")) == kept
    if kept:  # the file then says which kernel was measured
        published = json.loads((tmp_path / "bench/published" / result).read_text(encoding="utf-8"))
        assert published == {"kernel": "a hash", **measured}


@pytest.mark.parametrize(
    ("changed", "states"),
    [
        (None, {"cpu": "this one", "cuda": "this one"}),
        ("aten/src/ATen/native/cpu/Attn.h", {"cpu": "an older one", "cuda": "this one"}),
        ("aten/src/ATen/native/Attn.cpp", {"cpu": "this one", "cuda": "this one"}),
        ("torch/_native/ops/attn/triton.py", {"cpu": "this one", "cuda": "an older one"}),
        ("aten/src/ATen/native/cuda/Attn.cu", {"cpu": "this one", "cuda": "an older one"}),
        (NATIVE, {"cpu": "this one", "cuda": "this one"}),
        ("test/test_attn.py", {"cpu": "this one", "cuda": "this one"}),
    ],
)
def test_published_figures_say_of_which_kernel_they_are(tmp_path, monkeypatch, changed, states):
    kernels = ["aten/src/ATen/native/cuda/Attn.cu", "torch/_native/ops/attn/triton.py"]
    files = {"stack/06-gpu/commit.md": message(kernels), **dict.fromkeys(kernels, ""), **SERIES}
    root = write_files(tmp_path / "series", files)
    stand_in(monkeypatch, root)
    of = "; kernel of commit 0123456 of 2026-01-02"
    report = f"# torch.attn\n\nA CPU, 1 of 2 cores; L1d 1 KiB{of}.\n"
    for device in states:
        result = json.dumps({"kernel": benchmark.kernel(device)})
        kept = {f"{device}.json": result, f"{device}.md": report, f"{device}-lost.md": report}
        write_files(root / "bench/published", kept)
    if changed:
        (root / changed).write_text("changed\n", encoding="utf-8")
    machine = "A CPU, 1 of 2 cores"
    found = {Path(path).stem: of for path, *of in benchmark.figures()}
    older = "an older one, of commit 0123456 of 2026-01-02"
    told = {"this one": "this one", "an older one": older}
    assert found == {
        **{device: [machine, told[state]] for device, state in states.items()},
        **{f"{device}-lost": [machine, older] for device in states},
    }


def test_what_is_published_names_the_commit_of_its_kernel():
    """In the report's line on the machine, and in each plot."""
    published = ROOT / benchmark.PUBLISHED
    for report in published.glob("*.md"):
        about = report.read_text(encoding="utf-8").splitlines()[2]
        commit = benchmark.COMMIT.search(about)[1].split()[0]
        name = report.stem
        ends = ("", "-dark", "-narrow", "-bars", "-bars-dark", "-bars-narrow")
        plots = [published / f"{name}{end}.svg" for end in ends]
        for plot in filter(Path.exists, plots):
            assert commit in plot.read_text(encoding="utf-8"), plot


def test_what_make_is_told_is_not_for_a_make_that_a_command_calls(tmp_path):
    python = write_files(tmp_path, {"python": '#!/bin/sh\necho "$@; $ONLY; $MAKEFLAGS; $BASE"\n'})
    (python / "python").chmod(0o755)
    command = ["make", "--no-print-directory", "test", "ONLY=fork", f"PYTHON={python / 'python'}"]
    said = subprocess.run([*command, "BASE=2.6.0"], cwd=ROOT, capture_output=True, text=True).stdout
    assert said.split(";") == ["-m fork.bootstrap test --only fork", " ", ANY, " 2.6.0\n"]
    assert "ONLY" not in said.partition(";")[2]


def test_make_help_lists_every_target():
    phony = subprocess.run(["make", "-pn"], cwd=ROOT, capture_output=True, text=True).stdout
    targets = {x for line in re.findall(r"^\.PHONY: (.*)", phony, re.M) for x in line.split()}
    command = ["make", "--no-print-directory", "help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    listed = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert listed.keys() == targets and {PROJECT, "site"} < targets
    assert listed["clean"] == "remove all that was built and downloaded"


@pytest.mark.parametrize("command", [["make", "lint"], [ROOT / ".ci/run", "--record"]])
def test_a_clone_finds_its_own_modules_where_python_keeps_the_folder_out(tmp_path, command):
    said = f"#!/bin/sh\n{sys.executable} -c 'import fork.bootstrap' && echo found\n"
    tools = ("python3", "apt-get", "dpkg-source")  # CI looks for these, and calls the first
    for tool in write_files(tmp_path, dict.fromkeys(tools, said)).iterdir():
        tool.chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.endswith("found\n"), done.stderr
