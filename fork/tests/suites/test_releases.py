"""Tests of the run through the releases, with small files in place of their grafts and tests."""

import json
from types import SimpleNamespace

import pytest

from fork import paths
from fork.errors import ForkError
from fork.overlay import NATIVE
from fork.suites import releases
from fork.suites.releases import BOUND, FORBIDDEN, PYTHON, PassedOn
from fork.suites.results import Result
from fork.tests.conftest import write_files
from fork.tests.test_cli import SERIES, invoke, stand_in

DEFAULT, KEPT, OTHER = "2.13.0", "2.6.0", "2.15.0"
WHEEL = "torch-{}+cpu-cp311"


class Runner:
    """Replaces the graft, which leaves a few files, and the runs, of which each has one test."""

    def __init__(self):
        self.ran, self.looked = [], []
        self.outcomes = {}  # release -> the outcome of its tests, or the error of its graft
        self.makes = {}  # release -> the second key

    def made_on(self, release):
        return self.makes.get(release, "")

    def graft_into(self, venv, release):
        self.release, name = release, WHEEL.format(release)
        assert "no-cache-dir" in (venv / "pip.conf").read_text(encoding="utf-8")
        places = (f"bases/{name}.whl", f"bases/{name}/torch.py", f"graft/{name}/tip/x")
        write_files(paths.BUILD, dict.fromkeys(places, ""))
        if isinstance(outcome := self.outcomes.get(release), BaseException):
            raise outcome
        return SimpleNamespace(base=SimpleNamespace(version=f"{release}+cpu"))

    def run_suites(self, python, tree, suites, *, log_dir, variables):
        self.ran.append(self.release)
        outcome = self.outcomes.get(self.release, "passed")
        return [Result(name, tests={"TestA.test_a": outcome}) for name in suites]

    def run(self, command, log, wrong, *, env, cwd):
        assert command[-2:] == [*releases.OF_GRAFT] and env["BASE"] == self.release
        self.looked.append(self.release)

    def releases(self):
        ran, self.ran = self.ran, []
        return ran


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """Three releases, of which the first two are in use by other commands too."""
    scripts = dict.fromkeys(releases.OF_GRAFT, "")
    root = write_files(tmp_path / "series", SERIES | scripts)
    stand_in(monkeypatch, root)
    made = Runner()
    monkeypatch.delenv("BASE", raising=False)
    monkeypatch.setattr(releases, "SUPPORTED", (KEPT, DEFAULT, OTHER))
    monkeypatch.setattr(releases, "make_venv", lambda venv, *_: venv.mkdir(parents=True))
    for name in ("graft_into", "made_on", "run_suites", "run"):
        monkeypatch.setattr(releases, name, getattr(made, name))
    return made


def there(release):
    """Returns in which folders of build/ there is something of the release."""
    return {path.parent.name for path in paths.BUILD.glob(f"*/{WHEEL.format(release)}*")}


def test_each_release_is_tested_once_and_removed(runner):
    code, output = invoke("test-releases")
    assert code == 0 and "3 of 3 releases passed, 0 failed, 0 to be run" in output
    assert runner.releases() == runner.looked == [KEPT, DEFAULT, OTHER]
    assert f"{OTHER} on Python {PYTHON} {OTHER}+cpu 3 0 " in output
    assert there(KEPT) == there(DEFAULT) == {"bases", "graft"} and there(OTHER) == set()
    assert not (paths.BUILD / "venv-releases").exists()
    assert (invoke("test-releases")[0], runner.releases()) == (0, [])


def test_what_was_there_before_stays(runner):
    write_files(paths.BUILD, {f"bases/{WHEEL.format(OTHER)}.whl": ""})
    assert invoke("test-releases")[0] == 0
    assert there(OTHER) == {"bases"}


@pytest.mark.parametrize("outcome", ["failed", ForkError("the compiler stopped")])
def test_a_release_that_fails_is_run_again(runner, outcome):
    runner.outcomes[DEFAULT] = outcome
    code, output = invoke("test-releases")
    assert code == 1 and "2 of 3 releases passed, 1 failed, 0 to be run" in output
    assert isinstance(outcome, str) or f"error: {outcome}" in output
    runner.releases()
    runner.outcomes.clear()
    assert invoke("test-releases")[0] == 0
    assert runner.releases() == [DEFAULT]


def test_a_release_that_pip_may_not_have_is_left(runner):
    runner.outcomes[OTHER] = ForkError(f"torch {OTHER} {FORBIDDEN} torch=={OTHER} because ...")
    code, output = invoke("test-releases")
    assert code == 0 and BOUND in output
    assert "2 of 3 releases passed, 0 failed, 1 to be run" in output


def test_a_run_that_is_stopped_goes_on_where_it_was(runner):
    runner.outcomes[OTHER] = KeyboardInterrupt()
    assert invoke("test-releases")[0] == 130
    assert there(OTHER) == set()
    runner.releases()
    runner.outcomes.clear()
    assert invoke("test-releases")[0] == 0
    assert runner.releases() == [OTHER]


@pytest.mark.parametrize(
    ("file", "again"),
    [
        ("torch/attn.py", True),
        ("test/test_attn.py", True),
        ("docs/note.md", False),
        (releases.OF_GRAFT[0], False),
        (f"aten/src/ATen/native/cuda/{NATIVE}", False),
    ],
)
def test_what_passed_is_run_again_where_it_changes(runner, file, again):
    invoke("test-releases")
    runner.releases()
    write_files(paths.ROOT, {file: "changed = True\n"})
    assert invoke("test-releases", "--base", OTHER)[0] == 0
    assert runner.releases() == [OTHER] * again


def test_what_makes_the_same_is_not_run_again(runner):
    runner.makes[OTHER] = "m1"
    invoke("test-releases")
    runner.releases()
    write_files(paths.ROOT, {"torch/attn.py": "changed = True\n"})
    code, output = invoke("test-releases", "--base", OTHER)
    assert (code, runner.releases()) == (0, [])
    assert "is the same as what passed" in output and f"{OTHER} on Python {PYTHON}" in output


def test_what_passed_with_another_python_is_kept(runner):
    invoke("test-releases")
    runner.releases()
    file = paths.ROOT / releases.ReleasesRecord.file
    entries = json.loads(file.read_text(encoding="utf-8"))
    older = PassedOn(OTHER, "3.10", f"{OTHER}+cpu", {"passed": 7}, 9, "A CPU", "2026-01-02")
    file.write_text(json.dumps(entries | {"k1": vars(older)}), encoding="utf-8")
    code, output = invoke("test-releases")
    assert (code, runner.releases()) == (0, [])
    row = f"{OTHER} on Python 3.10 {OTHER}+cpu 7 0 9 A CPU, 2026-01-02 to be run again"
    assert row in output and f"{DEFAULT} on Python 3.10" not in output


def test_only_a_release_of_the_list_is_run(runner):
    code, output = invoke("test-releases", "--base", "installed")
    assert code == 2 and "'installed' is not one of" in output
