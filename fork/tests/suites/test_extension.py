"""Tests of `python -m fork extension`. Nothing is compiled or installed."""

import subprocess
import sys
import zipfile

import pytest

from commands import extension
from fork.console import new_table
from fork.errors import ForkError


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


def test_the_wheel_is_built_once_for_the_same_sources(tmp_path, monkeypatch):
    sources = tmp_path / "extension"
    (sources / "tests").mkdir(parents=True)
    (sources / "a.cpp").write_text("1", encoding="utf-8")
    monkeypatch.setattr(extension, "EXTENSION", sources)
    monkeypatch.setattr(extension, "headers", lambda: tmp_path)
    built = []

    def run(command, log, wrong, env):
        folder = command[command.index("-w") + 1]
        folder.mkdir(parents=True)
        (folder / "torch_attn-1.0.whl").touch()
        built.append(folder)

    monkeypatch.setattr(extension, "run", run)
    first = extension.build()
    (sources / "tests" / "test_new.py").touch()
    assert extension.build() == first
    (sources / "a.cpp").write_text("2", encoding="utf-8")
    assert extension.build() != first
    assert len(built) == 2


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
