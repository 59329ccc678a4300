"""Tests of `make test-mutants`; no fault is compiled here."""

import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands import mutants
from commands.mutants import Lab, Mutant
from fork.errors import ForkError
from fork.graft.build import CPU_KERNELS
from fork.paths import ROOT

FAULT = Mutant("a", "x.py", "return 1", "return 2", "test_x.py -k one")
TABLE = mutants.read_table()


@pytest.mark.parametrize("mutant", TABLE, ids=lambda mutant: mutant.name)
def test_the_table(mutant):
    """Each fault is in one line of the tip, and has a test file and a kernel."""
    assert mutant.text(ROOT) != (ROOT / mutant.file).read_text(encoding="utf-8")
    assert (ROOT / "test" / mutant.test.split()[0]).is_file()
    assert (ROOT / CPU_KERNELS / f"{mutant.kernel}.cpp").is_file()
    assert [x.name for x in TABLE].count(mutant.name) == 1


@pytest.mark.parametrize("text", ["return 11", "return 1\n  return 1"])
def test_a_line_that_is_not_there_once(text, tmp_path):
    (tmp_path / "x.py").write_text(text, encoding="utf-8")
    with pytest.raises(ForkError, match="^a: [02] lines of x.py are `return 1`$"):
        FAULT.text(tmp_path)


def test_the_fault_stands_where_the_line_was(tmp_path):
    (tmp_path / "x.py").write_text("def f():\n    return 1\n", encoding="utf-8")
    assert FAULT.text(tmp_path) == "def f():\n    return 2\n"


def test_only():
    assert mutants.chosen([FAULT], []) == mutants.chosen([FAULT], ["a"]) == [FAULT]
    with pytest.raises(ForkError, match="no mutant is called b"):
        mutants.chosen([FAULT], ["b"])


@pytest.mark.parametrize(
    ("fails", "needs", "status", "said"),
    [
        (["a"], "", 0, "caught    a: test_x.py -k one"),
        ([], "", 1, "SURVIVED  a: test_x.py -k one"),
        ([], "a_flag", 0, "not seen here, without a_flag a: test_x.py -k one"),
    ],
)
def test_what_is_said_of_a_mutant(fails, needs, status, said, capsys):
    lab = SimpleNamespace(mutated=contextmanager(lambda mutant: (yield)))
    lab.failed = lambda test, name: name in fails
    assert mutants.run_all([FAULT._replace(needs=needs)], lab) == status
    assert said in capsys.readouterr().out


def test_a_test_that_fails_without_a_fault_is_an_error():
    lab = SimpleNamespace(failed=lambda test, name: True, log=str)
    with pytest.raises(ForkError, match="test_x.py fails without a fault: none"):
        mutants.run_all([FAULT], lab)


@pytest.mark.parametrize(
    ("code", "status"), [("exit(1)", 1), ("import os; os.abort()", -signal.SIGABRT), ("", 0)]
)
def test_a_status(code, status, tmp_path):
    command = [sys.executable, "-c", code]
    assert mutants.status_of(command, tmp_path, {}, tmp_path / "log") == status


def test_what_hangs_ends_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "LIMIT", 1.0)
    command = ["sh", "-c", "sleep 100 & echo $!; wait"]
    log = tmp_path / "log"
    assert mutants.status_of(command, tmp_path, os.environ, log) is None
    child = int(log.read_text(encoding="utf-8"))
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").read_text(encoding="utf-8").split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"{child} runs")


def test_a_file_is_exchanged_in_the_copy_alone(tmp_path):
    installed, site = tmp_path / "installed", tmp_path / "site"
    for folder in (installed, site):
        folder.mkdir()
    (installed / "x.py").write_text("right", encoding="utf-8")
    os.link(installed / "x.py", site / "x.py")
    lab = Lab.__new__(Lab)
    lab.installed, lab.site = installed, site
    with pytest.raises(ForkError), lab.exchanged({"x.py": b"wrong"}):
        assert (site / "x.py").read_text(encoding="utf-8") == "wrong"
        assert (installed / "x.py").read_text(encoding="utf-8") == "right"
        raise ForkError
    assert (site / "x.py").samefile(installed / "x.py")


@pytest.mark.parametrize(("status", "failed"), [(0, False), (1, True), (-6, True), (None, True)])
def test_what_pytest_says(status, failed, tmp_path, monkeypatch):
    lab = Lab.__new__(Lab)
    lab.folder, lab.site, lab.python, lab.env = tmp_path, tmp_path, "python", {}
    monkeypatch.setattr(mutants, "status_of", lambda *args: status)
    assert lab.failed("test_x.py -k one", "a") == failed
    monkeypatch.setattr(mutants, "status_of", lambda *args: 5)
    with pytest.raises(ForkError, match="pytest ends with status 5"):
        lab.failed("test_x.py -k one", "a")


@pytest.mark.parametrize(("file", "place"), [("test_x.py", "site"), ("test_t.py", "site:triton")])
def test_where_a_test_finds_its_modules(file, place, tmp_path, monkeypatch):
    lab, seen = Lab.__new__(Lab), []
    lab.folder, lab.site, lab.python, lab.env = tmp_path, "site", "python", {}
    monkeypatch.setattr(mutants, "status_of", lambda *args: seen.append(args[2]) or 0)
    triton = {"test_t.py": {"PYTHONPATH": "triton"}}
    monkeypatch.setattr(
        mutants, "with_triton", lambda suites: {x: triton[x] for x in suites if x in triton}
    )
    lab.failed(f"{file} -k one", "a")
    assert seen == [{"PYTHONPATH": place}]
