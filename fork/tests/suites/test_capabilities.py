"""Tests of the environments that the course's table of capabilities is made in."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.version import Version

from commands import capabilities
from commands.capabilities import borrow
from fork import paths
from fork.bootstrap import new_venv
from fork.overlay import default_release


def packages(venv):
    (found,) = venv.glob("lib/python3*/site-packages")
    return found


def test_what_is_borrowed_comes_behind_what_is_there(tmp_path):
    lender, venv = tmp_path / "lender", tmp_path / "venv"
    new_venv(lender, "--without-pip")
    (packages(lender) / "lent.py").write_text("value = 1\n", encoding="utf-8")
    (packages(lender) / "both.py").write_text("value = 1\n", encoding="utf-8")
    borrow(lender, venv)
    (packages(venv) / "both.py").write_text("value = 2\n", encoding="utf-8")
    borrow(lender, venv)  # once more: what is there stays
    command = [venv / "bin" / "python", "-c", "import lent, both; print(lent.value, both.value)"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "1 2\n"


@pytest.mark.parametrize(
    ("base", "folder", "release"),
    [
        (default_release(), default_release(), default_release()),
        ("2.6.0", "2.6.0", "2.6.0"),
        ("some/where/torch-2.14.1-cp311.whl", "torch-2.14.1-cp311", "2.14.1"),
    ],
)
def test_the_routes_environments_and_the_record(monkeypatch, tmp_path, base, folder, release):
    """The tip is in .venv on the default release alone; a wheel's record is its release's."""
    monkeypatch.setattr(capabilities, "MADE", tmp_path)
    grafted, commands = [], []

    def graft_into(venv, base, commit=None, *, folder=""):
        grafted.append((venv, commit, folder))
        return SimpleNamespace(
            base=SimpleNamespace(upstream=SimpleNamespace(release=Version(release)))
        )

    def run(command, env):
        commands.append([str(word) for word in command])
        return SimpleNamespace(returncode=3)

    for name in ("make_venv", "install_packages", "borrow"):
        monkeypatch.setattr(capabilities, name, lambda *_: None)
    monkeypatch.setattr(capabilities, "graft_into", graft_into)
    monkeypatch.setattr(capabilities.subprocess, "run", run)
    with pytest.raises(SystemExit, match="^3$"):
        capabilities.capabilities.callback(base, publish=True)
    place = tmp_path / folder
    tip = paths.VENV if base == default_release() else place / "tip"
    implicit, explicit = place / "implicit", place / "explicit"
    shared = "capabilities"
    assert grafted == [(tip, None, ""), (implicit, 3, shared), (explicit, 4, shared)]
    ((python, script, of, *words),) = commands
    assert Path(python) == tip / "bin" / "python" and Path(script).name == "record.py"
    assert of == release and words[-1] == "--publish"
    assert f"implicit={implicit / 'bin' / 'python'}" in words
    assert f"explicit={explicit / 'bin' / 'python'}" in words
