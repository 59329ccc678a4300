"""Tests of `.ci/run`: which stages run, what is recorded, what a stage depends on."""

import json
import re
from datetime import date, timedelta

import pytest
import yaml

from commands import ci
from fork import paths
from fork.errors import ForkError
from fork.paths import ROOT
from fork.tests.conftest import git, write_files
from fork.tests.test_cli import SERIES, invoke, stand_in

STAGES = [
    {"name": "form", "run": "echo form >>ran", "reads": ["**"], "comments": True},
    {
        "name": "tests",
        "run": "echo tests >>ran",
        "reads": ["a/**", "!a/b/**"],
        "removes": ["build/gone"],
    },
    {"name": "built", "run": "echo built >>ran", "reads": ["a/b/*.py"], "graft": True},
    {"name": "always", "run": "echo always >>ran"},
]
FILES = {
    ".gitignore": "ran\nbuild/\n",
    ci.STAGES: yaml.safe_dump(STAGES),
    "a/one.py": "x = 1\n",
    "a/b/two.py": "y = 2\n",
    "build/gone/x": "",
}
ALL = ["form", "tests", "built", "always"]


@pytest.fixture
def clone(tmp_path, monkeypatch):
    root = write_files(tmp_path / "clone", SERIES | FILES)
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    stand_in(monkeypatch, root)
    monkeypatch.setattr(ci, "seconds_of", lambda since: {"test/a.py": 1.5})
    return root


def ran(clone, *args):
    """The stages that ran, in order."""
    file = clone / "ran"
    file.unlink(missing_ok=True)
    code, output = invoke("ci", *args)
    return (file.read_text(encoding="utf-8").split() if file.exists() else []), code, output


def test_what_passed_is_left_out(clone):
    assert ran(clone)[:2] == (ALL, 0)
    assert not (clone / ci.RECORD).exists() and not (clone / "build/gone").exists()
    assert ran(clone, "--record")[:2] == (ALL, 0)
    stages, code, output = ran(clone)
    assert (stages, code) == (["always"], 0)
    assert f"== tests: left out: nothing that it reads has changed since {date.today()}" in output
    assert ran(clone, "--all")[0] == ALL
    assert ran(clone, "--all", "--only", "tests", "--only", "form")[0] == ["form", "tests"]
    entry = json.loads((clone / ci.RECORD).read_text(encoding="utf-8"))["tests"]
    assert entry["files"] == {"test/a.py": 1.5} and entry["on"] == str(date.today())


@pytest.mark.parametrize(
    ("path", "text", "again"),
    [
        ("a/one.py", "x = 2\n", {"form", "tests"}),
        ("a/one.py", "x = 1  # one\n", {"form"}),  # the others do not read comments
        ("a/b/two.py", "y = 3\n", {"form", "built"}),
        ("a/new.txt", "", {"form", "tests"}),  # a new file, before it is added
        ("torch/attn.py", "x = 1\n", {"form", "built"}),  # of the graft
        ("docs/note.md", "why not\n", {"form"}),
        ("build/x", "", set()),
        (ci.RECORD, None, set()),
    ],
)
def test_what_makes_a_stage_run_again(clone, path, text, again):
    ran(clone, "--record")
    file = clone / path
    write_files(clone, {path: file.read_text(encoding="utf-8") + "\n" if text is None else text})
    assert {*ran(clone)[0]} - {"always"} == again


def test_another_command_or_package_is_another_stage(clone, monkeypatch):
    ran(clone, "--record")
    changed = [dict(stage) for stage in STAGES]
    changed[0]["run"] += "; true"
    changed[1]["packages"] = ["chromium"]
    write_files(clone, {ci.STAGES: yaml.safe_dump(changed)})
    monkeypatch.setattr(ci, "install", lambda packages: None)
    version = ["1"]
    monkeypatch.setattr(ci, "version", lambda package: version[0])
    assert ran(clone, "--record")[0] == ["form", "tests", "always"]
    assert ran(clone)[0] == ["always"]
    version[0] = "2"
    assert ran(clone)[0] == ["tests", "always"]


def test_a_record_lasts_for_two_weeks(clone):
    ran(clone, "--record")
    file = clone / ci.RECORD
    for days, stages in ((14, ["always"]), (15, ALL)):
        then = str(date.today() - timedelta(days))
        file.write_text(
            re.sub(r"\d{4}-\d\d-\d\d", then, file.read_text(encoding="utf-8")), encoding="utf-8"
        )
        assert ran(clone)[0] == stages


def test_a_stage_that_fails_is_the_last_one(clone):
    changed = [dict(stage) for stage in STAGES]
    changed[1]["run"] = "false"
    write_files(clone, {ci.STAGES: yaml.safe_dump(changed)})
    stages, code, output = ran(clone, "--record")
    assert (stages, code) == (["form"], 1) and output.endswith("error: tests failed")
    assert [*json.loads((clone / ci.RECORD).read_text(encoding="utf-8"))] == ["form"]


def test_a_stage_whose_inputs_change_meanwhile_is_not_recorded(clone):
    changed = [dict(stage) for stage in STAGES]
    changed[1]["run"] = "echo 'x = 3' >a/one.py"
    write_files(clone, {ci.STAGES: yaml.safe_dump(changed)})
    assert "tests: not recorded" in ran(clone, "--record")[2]
    assert "tests" not in json.loads((clone / ci.RECORD).read_text(encoding="utf-8"))


def test_what_another_run_records_meanwhile_stays(clone, tmp_path):
    ran(clone, "--record", "--only", "built")
    other = (clone / ci.RECORD).rename(tmp_path / "record.json")
    changed = [dict(stage) for stage in STAGES]
    changed[1]["run"] = f"cp {other} {ci.RECORD}"
    write_files(clone, {ci.STAGES: yaml.safe_dump(changed)})
    assert ran(clone, "--record", "--only", "tests")[1] == 0
    assert {*json.loads((clone / ci.RECORD).read_text(encoding="utf-8"))} == {"tests", "built"}


def test_errors(clone):
    assert ran(clone, "--only", "none")[1:] == (1, f"error: none: no stage of {ci.STAGES}")
    write_files(clone, {ci.RECORD: "[]"})
    assert "record.json: not as `.ci/run --record` writes it" in ran(clone)[2]
    write_files(clone, {ci.STAGES: "- name: a\n  runs: b\n"})
    assert f"error: {ci.STAGES}: " in ran(clone)[2]


POLICY = "bash:\n  Installed: {}\n  Candidate: {}\n  Version table:\n"


@pytest.mark.parametrize(
    ("installed", "candidate", "updated", "version"),
    [
        ("5.2", "5.3", "", "5.2"),
        ("(none)", "5.3", "", "5.3"),
        ("(none)", "(none)", "5.4", "5.4"),  # which `apt-get update` brings
        ("(none)", "(none)", "(none)", None),
    ],
)
def test_the_version_of_a_package(monkeypatch, installed, candidate, updated, version):
    said = [candidate, updated]

    def output(command, package):
        if command[0] == "apt-get":
            said.pop(0)
        return POLICY.format(installed, said[0]).encode()

    monkeypatch.setattr(ci, "output", output)
    if version:
        assert ci.version("bash") == version
    else:
        with pytest.raises(ForkError, match="^bash: Debian has no such package$"):
            ci.version("bash")


def test_seconds_of_reports(tmp_path, monkeypatch):
    case = '<testcase file="{}" time="{}"/>'
    for name, *cases in (("a", ("x.py", 1), ("y.py", 2.25)), ("b/c", ("x.py", 3))):
        lines = "".join(case.format(*each) for each in cases)
        write_files(tmp_path, {f"reports/{name}.xml": f"<testsuite>{lines}</testsuite>"})
    monkeypatch.setattr(paths, "BUILD", tmp_path)
    assert ci.seconds_of(0) == {"x.py": 4.0, "y.py": 2.2}
    assert ci.seconds_of((tmp_path / "reports/a.xml").stat().st_mtime + 60) == {}


def test_the_stages_of_this_clone():
    """Each command exists, and each glob is one of a file."""
    targets = (ROOT / "Makefile").read_text(encoding="utf-8") + (ROOT / "attn.mk").read_text(
        encoding="utf-8"
    )
    for stage in ci.read_stages():
        for target in re.findall(r"make ([\w-]+)", stage.run):
            assert re.search(rf"^{target}:", targets.replace("$(PROJECT)", "attn"), re.M), target
        for glob in stage.reads:
            assert ci.files_of((glob.removeprefix("!"),)), glob


def test_what_a_page_and_a_test_make_run():
    """A page's push runs neither tests nor lessons; a kernel's runs all that compile it."""
    stages = {stage.name: {*ci.files_of(stage.reads)} for stage in ci.read_stages()}

    def runs(path):
        return {name for name, files in stages.items() if path in files}

    assert runs("site/use.md") == {"form", "fork", "pages", "browser"}
    assert "operator" in runs("test/test_attn_vmap.py") and "lessons" not in runs(
        "test/test_attn.py"
    )
    assert {"extension", "source", "upstream"} <= runs("aten/src/ATen/native/cpu/AttnForward.h")
    assert runs(ci.RECORD) == set()
