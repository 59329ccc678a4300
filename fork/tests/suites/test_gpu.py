"""Tests of `make bench-gpu` without a GPU: the order of its steps, its errors, what it runs."""

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from commands import bench
from fork import paths
from fork.errors import ForkError
from fork.graft import build
from fork.paths import ROOT
from fork.suites.files import own_files
from fork.suites.results import Result
from fork.tests.conftest import write_files
from fork.tests.test_cli import invoke, stand_in

DRIVER = """
int cuInit(unsigned flags) { return %d; }
int cuDeviceGetCount(int* count) { *count = 3; return 0; }
"""


@pytest.mark.parametrize(("status", "count"), [(0, 3), (100, 0)])
def test_devices_of_the_driver(tmp_path, monkeypatch, status, count):
    source = write_files(tmp_path, {"driver.c": DRIVER % status}) / "driver.c"
    driver = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", driver], check=True)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(tmp_path / name)))
    assert bench.devices() == count
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(tmp_path / "missing" / name)))
    assert bench.devices() == 0


def test_files_with_tests_on_cuda():
    found = bench.chosen(own_files(ROOT), ROOT)
    assert {"test_attn.py", "test_attn_autograd.py", "test_attn_compile.py"} <= set(found)
    for name in {*own_files(ROOT)} - {*found}:
        text = (ROOT / "test" / name).read_text(encoding="utf-8")
        left_out = 'globals(), only_for="cpu"' in text
        assert "instantiate_device_type_tests(" not in text or left_out


@pytest.mark.parametrize(("ago", "minutes"), [(0, 3), (3, 2.5), (30, 1.5)])
def test_minutes_left_to_measure(monkeypatch, ago, minutes):
    monkeypatch.setattr(bench.time, "monotonic", lambda: 1e4)
    assert bench.minutes_left(1e4 - 60 * ago) == minutes


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """Returns the list of the steps that bench-gpu takes; each is replaced and does nothing."""
    taken = []

    def fake(where, name, returned=None):
        monkeypatch.setattr(where, name, lambda *args, **kw: taken.append((name, args)) or returned)

    stand_in(monkeypatch, tmp_path)
    monkeypatch.setattr(build, "Stack", lambda root: None)
    monkeypatch.setattr(build, "get", lambda release, *_: release)
    monkeypatch.setattr(build.Graft, "__init__", lambda self, *args: None)
    base = SimpleNamespace(version="2.13.0")
    monkeypatch.setattr(build.Graft, "base", base, raising=False)
    monkeypatch.setattr(build.cuda, "built_for", lambda base: "13.0")
    monkeypatch.delenv("BASE", raising=False)  # `make test` sets it
    monkeypatch.setattr(bench, "devices", lambda: 1)
    monkeypatch.setattr("fork.graft.base._installed", lambda: None)  # as if torch were there
    monkeypatch.setattr(bench, "sanitizer", lambda: "sanitizer")
    fake(bench, "graft_into")
    fake(bench, "check")
    fake(bench, "sanitize")
    fake(bench, "run_suites", [Result("test_attn.py", tests={"TestAttnCUDA.test_a": "passed"})])
    fake(bench, "measure", 0)
    return SimpleNamespace(taken=taken, fake=fake)


def names(steps):
    return [name for name, _ in steps.taken]


def test_builds_then_tests_then_measures(steps):
    status, output = invoke("bench-gpu", "--base", "installed", "--publish", "--only", "n=4")
    assert status == 0 and "1 passed, 0 failed" in output and "minutes in all" in output
    assert names(steps) == ["graft_into", "check", "run_suites", "measure"]
    assert steps.taken[0][1] == (paths.VENV, "installed")
    _, _, name, publish, command, variables = steps.taken[-1][1]
    expected = ("bench.py", "--device", "cuda", "--minutes", "3.0", "--only", "n=4")
    assert (name, publish, command) == ("cuda", True, expected)
    assert variables == {"TORCH_ATTN_TRITON_FLOAT": "1"}


def test_measures_although_a_test_fails(steps):
    failed = Result("test_attn.py", tests={"TestAttnCUDA.test_a": "failed"})
    steps.fake(bench, "run_suites", [failed])
    status, output = invoke("bench-gpu")
    assert status == 1 and "0 passed, 1 failed" in output and names(steps)[-1] == "measure"


def test_a_failure_of_the_benchmark_is_one(steps):
    steps.fake(bench, "measure", 3)
    assert invoke("bench-gpu")[0] == 3


def test_without_a_gpu_nothing_is_built(steps, monkeypatch):
    monkeypatch.setattr(bench, "devices", lambda: 0)
    status, output = invoke("bench-gpu")
    assert (status, output) == (1, "error: no GPU: NVIDIA's driver is missing, or shows none")
    assert names(steps) == []


def test_on_a_base_for_cpus_nothing_is_built(steps, monkeypatch):
    monkeypatch.setattr(build.cuda, "built_for", lambda base: None)
    assert invoke("bench-gpu") == (1, "error: torch 2.13.0 is not built for CUDA")
    assert names(steps) == []


def test_sanitizer_instead(steps):
    assert invoke("bench-gpu", "--sanitize")[0] == 0
    assert names(steps) == ["graft_into", "check", "sanitize"]
    assert steps.taken[0][1] == (paths.VENV, "installed")
    assert steps.taken[-1][1][0] == "sanitizer"


def test_no_sanitizer(steps, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ForkError, match="^no compute-sanitizer: "):
        bench.sanitizer()


def sanitize(folder, script):
    files = {"sanitizer": f"#!/bin/sh\n{script}\n", "test/test_attn.py": ""}
    program = write_files(folder, files) / "sanitizer"
    program.chmod(0o755)
    bench.sanitize(program, sys.executable, folder, folder / "logs", dict(os.environ))


def test_each_tool_of_the_sanitizer(tmp_path):
    said = 'echo "$@ $PYTORCH_TESTING_DEVICE_ONLY_FOR"'
    with pytest.raises(ForkError, match="^synccheck finds fault: "):
        sanitize(tmp_path, f"{said}; [ $2 != synccheck ]")
    said = (tmp_path / "logs/memcheck.log").read_text(encoding="utf-8")
    assert "and float cuda" in said
    assert said.startswith("--tool memcheck --kernel-regex kns=attn_ --error-exitcode 1 ")


def test_a_sanitizer_that_saw_no_test(tmp_path):
    with pytest.raises(ForkError, match="^memcheck finds fault: "):
        sanitize(tmp_path, "exit 5")  # pytest's, for no test


def test_torch_that_cannot_use_the_gpu(tmp_path):
    python = write_files(tmp_path, {"python": "#!/bin/sh\necho RuntimeError: too old\nexit 1\n"})
    (python / "python").chmod(0o755)
    with pytest.raises(ForkError, match="^torch cannot use the GPU: RuntimeError: too old"):
        bench.check(python / "python", tmp_path / "log")
