"""Tests that the Debian in which PyTorch is built is made once, and whole or not at all."""

import os
import sys
from collections import namedtuple

import pytest

from fork.errors import ForkError
from fork.source import sandbox
from fork.source.sandbox import in_debian


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Replaces mmdebstrap by a script that writes a file, or fails when a test says so."""
    folder = tmp_path / "bin"
    folder.mkdir()
    made = f"""#!{sys.executable}
import pathlib, sys
root = pathlib.Path(next(a for a in sys.argv if a.endswith("/.root.partial")))
assert not root.exists()
(root / "etc").mkdir(parents=True)
if pathlib.Path({str(tmp_path)!r}, "fail").exists():
    sys.exit("E: Unable to locate package python3-scipy")
"""
    inner = '#!/bin/sh\nwhile [ "$1" != mmdebstrap ]; do shift; done\nexec "$@"\n'
    tools = {"mmdebstrap": made, "setpriv": inner, "unshare": ""}
    for name, text in tools.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sandbox.debian, "mirrors", lambda: ["http://debian.invalid/debian"])
    monkeypatch.setattr(sandbox, "_make_tree", lambda tree, *_: tree.mkdir())
    monkeypatch.setattr(sandbox.debian, "fetch", lambda into: into)
    return folder


def test_debian_is_made_once(tmp_path, machine):
    folder = tmp_path / "from source"
    place = in_debian(folder, tmp_path / "source")
    assert (folder / "root/etc").is_dir() and place.tree == folder / "pytorch"
    assert os.access(place.python, os.X_OK)
    (folder / "root/mine").touch()
    assert in_debian(folder, tmp_path / "source") == place
    assert (folder / "root/mine").exists()


def test_a_build_of_another_place_is_removed(tmp_path, machine):
    """CMake would refuse it; ccache still has what was compiled."""
    folder = tmp_path / "first"
    build = in_debian(folder, tmp_path / "source").tree / "build"
    build.mkdir()
    names = {"CMAKE_CACHEFILE_DIR": build, "CMAKE_HOME_DIRECTORY": build.parent}
    cache = "".join(f"{name}:INTERNAL={place}\n" for name, place in names.items())
    (build / "CMakeCache.txt").write_text(cache, encoding="utf-8")
    (build / "build.ninja").touch()
    in_debian(folder, tmp_path / "source")
    assert build.exists()
    folder.rename(tmp_path / "second")
    tree = in_debian(tmp_path / "second", tmp_path / "source").tree
    assert tree.exists() and not (tree / "build").exists()


def test_a_debian_that_cannot_be_made(tmp_path, machine):
    (tmp_path / "fail").touch()
    with pytest.raises(ForkError, match="Debian cannot be made: E: Unable to locate package"):
        in_debian(tmp_path / "here", tmp_path / "source")
    assert not (tmp_path / "here/root").exists()
    (tmp_path / "fail").unlink()
    in_debian(tmp_path / "here", tmp_path / "source")
    assert not (tmp_path / "here/.root.partial").exists()


@pytest.mark.parametrize("tool, package", [("mmdebstrap",) * 2, ("setpriv", "util-linux")])
def test_a_missing_tool(tmp_path, machine, monkeypatch, tool, package):
    (machine / tool).unlink()
    monkeypatch.setenv("PATH", str(machine))
    with pytest.raises(ForkError, match=f"{tool}: not found: install the package {package}"):
        in_debian(tmp_path / "here", tmp_path / "source")
    assert not (tmp_path / "here").exists()


def test_not_root(tmp_path, machine, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ForkError, match="run this as root, or name a checkout"):
        in_debian(tmp_path / "here", tmp_path / "source")


def test_too_little_disk(tmp_path, machine, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(sandbox.shutil, "disk_usage", lambda _: usage(5 * 2**30))
    with pytest.raises(ForkError, match=r"takes \d+ GiB of disk, and 5.0 GiB are free"):
        in_debian(tmp_path / "here", tmp_path / "source")
    assert list((tmp_path / "here").iterdir()) == []
