"""Tests of `python -m fork test-arm64`. Nothing is downloaded, compiled or emulated."""

import os
import platform
import subprocess
import sys

import pytest

from fork import paths
from fork.errors import ForkError
from fork.suites import arm64
from fork.suites.results import Result
from fork.tests.conftest import write_files
from fork.tests.test_cli import SERIES, invoke, stand_in

FILES = [f"test/test_attn_{name}.py" for name in ("compile", "kernel", "tanh", "new")]


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Programs for all that is called: each prints its arguments, a line each."""
    folder = tmp_path / "tools"
    for name in arm64.PROGRAMS:
        program = write_files(folder, {name: '#!/bin/sh\nprintf "%s\\n" "$@"\n'}) / name
        program.chmod(0o755)
    keyring = write_files(tmp_path, {"keyring": ""}) / "keyring"
    monkeypatch.setattr(arm64, "KEYRING", keyring)
    monkeypatch.setattr(arm64, "PYTHON", f"{sys.version_info.major}.{sys.version_info.minor}")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("PATH", str(folder))
    return folder


class Runner:
    """Replaces what takes long, and keeps what it was asked for."""

    def __init__(self):
        self.commands, self.grafts, self.ran, self.outcome = [], [], [], "passed"

    def run(self, command, log, wrong, **kwargs):
        self.commands.append([str(word) for word in command])
        if command[0] == "mmdebstrap":
            command[-2].mkdir()

    def graft_into(self, venv, base, *, toolchain):
        self.grafts.append((venv, base, toolchain))

    def run_suites(self, python, tree, suites, *, log_dir, variables):
        self.ran.append((python, suites, variables))
        return [Result(name, tests={"TestA.test_a": self.outcome}) for name in suites]


@pytest.fixture
def runner(tmp_path, tools, monkeypatch):
    root = write_files(tmp_path / "series", SERIES | dict.fromkeys(FILES, ""))
    stand_in(monkeypatch, root)
    made = Runner()
    monkeypatch.setattr(arm64, "make_venv", lambda venv, *_: venv / "bin" / "python")
    monkeypatch.setattr(arm64, "mirrors", lambda: ["http://mirror.invalid/debian"])
    for name in ("graft_into", "run_suites", "run"):
        monkeypatch.setattr(arm64, name, getattr(made, name))
    return made


def test_all_of_it(runner, tools):
    code, output = invoke("test-arm64")
    assert code == 0 and " passed, 0 failed" in output
    folder = paths.BUILD / "arm64"
    debian, pip, probe = runner.commands
    assert "--variant=extract" in debian and "--architectures=arm64" in debian
    assert debian[-1] == f"deb http://mirror.invalid/debian {arm64.DEBIAN} main"
    assert pip[-2:] == ["pip", "setuptools"]
    ((venv, base, toolchain),) = runner.grafts
    headers = folder / arm64.DEBIAN / "usr" / "include"
    assert (venv, base, toolchain.machine) == (folder / "venv", "2.6.0", "aarch64")
    assert toolchain.python_include == headers / f"python{arm64.PYTHON}"
    assert toolchain.cxx == f"aarch64-linux-gnu-g++ -idirafter {headers}"
    pythons, suites, variables = zip(*runner.ran, strict=True)
    assert {*pythons, probe[0]} <= {venv / "bin" / "python", str(venv / "bin" / "python")}
    # Tests compile for the emulated machine, by a compiler and a Ninja of this machine.
    for each in variables:
        assert each["CXX"] == toolchain.cxx
        assert each["PATH"] == f"{os.path.dirname(sys.executable)}:{tools}"
    small, compiled, sve = suites
    assert small.keys() == {"test_attn.py", "test_attn_kernel.py", "test_attn_new.py"}
    assert not small["test_attn_new.py"] and small["test_attn_kernel.py"]
    assert compiled.keys() == {"test_attn_tanh.py"} and sve.keys() == {"test_attn_kernel.py"}
    assert ["PYTORCH_TEST_WITH_ASAN" in each for each in variables] == [True, False, True]
    assert ["QEMU_CPU" in each for each in variables] == [False, False, True]
    assert "test_attn_kernel.py (SVE256)" in output
    # A second run keeps the environment that it finds.
    assert invoke("test-arm64")[0] == 0 and len(runner.commands) == 4


def test_a_failure_is_one(runner):
    runner.outcome = "failed"
    code, output = invoke("test-arm64")
    assert code == 1 and "0 passed, " in output


def test_python_is_run_by_qemu(runner, tools, tmp_path):
    """By its name it finds its packages, and starts other Pythons."""
    venv, tree = tmp_path / "venv", tmp_path / "tree"
    arm64.make_environment(venv, tree, tmp_path)
    python = venv / "bin" / "python"
    said = subprocess.run([python, "-c", "a b"], capture_output=True, text=True, check=True).stdout
    binary = f"{tree}/usr/bin/python{arm64.PYTHON}"
    assert said.splitlines() == ["-L", str(tree), "-0", str(python), binary, "-c", "a b"]
    assert (venv / "pyvenv.cfg").read_text(encoding="utf-8") == f"home = {tree}/usr/bin\n"


@pytest.mark.parametrize("program", [*arm64.PROGRAMS, "keyring"])
def test_debians_packages_are_named(tools, program, tmp_path):
    if program == "keyring":
        arm64.KEYRING.unlink()
    else:
        (tools / program).unlink()
    package = arm64.PROGRAMS.get(program, "debian-archive-keyring")
    with pytest.raises(ForkError, match=f"apt-get install {package.replace('+', '.')}$"):
        arm64.check_machine()


def test_other_machines(tools, monkeypatch):
    arm64.check_machine()
    monkeypatch.setattr(arm64, "PYTHON", "3.0")
    with pytest.raises(ForkError, match="Python 3.0 is needed, which Debian "):
        arm64.check_machine()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ForkError, match="this machine is aarch64: `make test` runs all"):
        arm64.check_machine()
