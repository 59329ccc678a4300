"""Tests of fetching the pristine source; small scripts replace apt-get and dpkg-source."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from fork.errors import ForkError
from fork.source import debian

DEBIAN = "mirror://one.invalid/debian/"
OTHER = "mirror://two.invalid/other/"
TARGETS = f"Other\tmain\t{OTHER}\nDebian\tmain\t{DEBIAN}\nDebian\tmain\t{DEBIAN}\n"
TARGETS += "Apps\tcontrib\tmirror://three.invalid/apps/\nnoise\n"

APT = """
config = next((a.partition("=")[2] for a in sys.argv if a.startswith("--config-file=")), None)
if "indextargets" in sys.argv:
    print((lab / "targets").read_text(), end="")
elif "update" in sys.argv:
    text = open(config).read()
    (lab / "apt.conf").write_text(text)
    sources = open(pathlib.Path(config).parent / "debian.sources").read()
    (lab / "debian.sources").write_text(sources)
    for refused in (lab / "refused").read_text().split():
        if refused in sources:
            sys.exit(f"W: odd\\nE: Failed to fetch {refused}\\nE: Some index files failed")
elif "source" in sys.argv:
    if not any((lab / "package").iterdir()):
        sys.exit("E: Unable to find a source package for pytorch")
    shutil.copytree(lab / "package", ".", dirs_exist_ok=True)
"""

DPKG_SOURCE = """
assert "--skip-patches" in sys.argv
(lab / "unpacking").touch()
if (lab / "kill").exists():
    (lab / "kill").unlink()
    os.makedirs(sys.argv[-1])
    os.kill(os.getppid(), 9)
if (lab / "full").exists():
    sys.exit("tar: a: write: No space left on device\\ndpkg-source: error: tar failed")
tree = pathlib.Path(sys.argv[-1])
tarfile.open(next(pathlib.Path().glob("*.orig.tar.xz"))).extractall(tree, filter="data")
(tree / "debian/patches").mkdir(parents=True)
(tree / "debian/patches/series").touch()
"""


class Lab:
    """Replaces a machine: its tools, the settings of its apt, the package in the archive."""

    def __init__(self, root: Path):
        self.root = root
        self.bin = root / "bin"
        self.into = root / "into"
        for folder in (self.bin, root / "package"):
            folder.mkdir()
        (root / "targets").write_text(TARGETS, encoding="utf-8")
        (root / "refused").touch()
        self.tool("apt-get", APT)
        self.tool("dpkg-source", DPKG_SOURCE)
        self.package("2.6.0+dfsg-7")

    def tool(self, name: str, body: str):
        head = f"#!{sys.executable}\nimport os, pathlib, shutil, sys, tarfile\n"
        log = f"print(*sys.argv[1:], file=open({str(self.root / name)!r}, 'a'))\n"
        lab = f"lab = pathlib.Path({str(self.root)!r})\n"
        (self.bin / name).write_text(head + log + lab + body, encoding="utf-8")
        (self.bin / name).chmod(0o755)

    def package(self, version: str):
        folder = self.root / "package"
        tarball = folder / f"pytorch_{version.partition('-')[0]}.orig.tar.xz"
        with tarfile.open(tarball, "w:xz") as tar:
            for name in ("CMakeLists.txt", "test/test_ops.py", "version.txt"):
                tar.addfile(tarfile.TarInfo(name), io.BytesIO())
        (folder / f"pytorch_{version}.dsc").touch()

    def calls(self, name: str) -> list[str]:
        log = self.root / name
        return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


@pytest.fixture
def lab(tmp_path, monkeypatch):
    made = Lab(tmp_path)
    keyring = tmp_path / "keyring.gpg"
    keyring.touch()
    monkeypatch.setattr(debian, "KEYRING", keyring)
    monkeypatch.setenv("PATH", str(made.bin))
    return made


def refusal(lab) -> str:
    """Returns the line with which fetch fails; it must have left no tree, nor half of one."""
    with pytest.raises(ForkError) as caught:
        debian.fetch(lab.into)
    assert not list(lab.into.glob("pytorch-2.6.0*/"))
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_the_tree_is_unpacked_once(lab):
    tree = debian.fetch(lab.into)
    assert (tree / "test/test_ops.py").is_file()
    assert tree.parent == lab.into
    calls = lab.calls("apt-get")
    assert debian.fetch(lab.into) == tree
    assert lab.calls("apt-get") == calls
    assert [p for p in lab.into.iterdir() if p.is_dir()] == [tree]


def test_a_relative_folder_will_do(lab, monkeypatch):
    monkeypatch.chdir(lab.root)
    assert debian.fetch(Path("into")) == lab.into / "pytorch-2.6.0"


def test_a_half_made_tree_is_remade(lab):
    half = lab.into / "pytorch-2.6.0"
    half.mkdir(parents=True)
    (half / "version.txt").write_text("half", encoding="utf-8")
    stale = lab.into / "pytorch-2.6.0.part-x/lists"
    stale.mkdir(parents=True)
    tree = debian.fetch(lab.into)
    assert debian.whole(tree)
    assert (tree / "version.txt").read_text(encoding="utf-8") == ""
    assert not stale.parent.exists()


def test_a_killed_fetch_is_made_good(lab):
    (lab.root / "kill").touch()
    code = f"""
from pathlib import Path
from fork.source import debian
debian.KEYRING = Path({str(debian.KEYRING)!r})
debian.fetch(Path({str(lab.into)!r}))
"""
    command = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(Path(debian.__file__).parents[2])}
    assert subprocess.run(command, env=env, check=False).returncode == -9
    assert list(lab.into.glob("pytorch-2.6.0.part-*/tree"))
    assert not (lab.into / "pytorch-2.6.0").exists()
    assert debian.whole(debian.fetch(lab.into))


def test_apt_is_private(lab):
    debian.fetch(lab.into)
    text = (lab.root / "apt.conf").read_text(encoding="utf-8")
    for setting in ("Dir::Etc::SourceList", "Dir::State::Lists", "Dir::Cache"):
        assert f'{setting} "{lab.into}/pytorch-2.6.0.part' in text
    assert 'Dir::Etc::SourceParts "-"' in text
    assert "#clear APT::Update;" in text
    assert 'Acquire::Retries "1"' in text  # where nothing answers
    listed = (lab.root / "debian.sources").read_text(encoding="utf-8").splitlines()
    assert f"URIs: {DEBIAN}" in listed
    assert f"Signed-By: {debian.KEYRING}" in listed


def test_debians_archive_comes_first_and_each_once(lab):
    assert debian.mirrors() == [DEBIAN, OTHER]


def test_the_next_archive_is_tried(lab):
    (lab.root / "refused").write_text(DEBIAN, encoding="utf-8")
    debian.fetch(lab.into)
    assert f"URIs: {OTHER}" in (lab.root / "debian.sources").read_text(encoding="utf-8")


def test_no_archive_has_the_index(lab):
    (lab.root / "refused").write_text(f"{DEBIAN}\n{OTHER}", encoding="utf-8")
    assert refusal(lab) == f"no Debian trixie source index: apt-get: E: Failed to fetch {DEBIAN}"


def test_a_machine_without_archive(lab):
    (lab.root / "targets").write_text("", encoding="utf-8")
    assert "is this a Debian machine?" in refusal(lab)


def test_no_such_package(lab):
    for file in (lab.root / "package").iterdir():
        file.unlink()
    assert "Unable to find a source package" in refusal(lab)


def test_another_release(lab):
    next((lab.root / "package").glob("*.dsc")).unlink()
    lab.package("2.6.1+dfsg-1")
    assert refusal(lab) == "apt-get source pytorch: this is not PyTorch 2.6.0"


@pytest.mark.parametrize(("tool", "package"), [("apt-get", "apt"), ("dpkg-source", "dpkg-dev")])
def test_a_missing_tool(lab, tool, package):
    (lab.bin / tool).unlink()
    assert refusal(lab) == f"{tool}: not found: install the package {package}"


def test_a_missing_keyring(lab):
    debian.KEYRING.unlink()
    assert "debian-archive-keyring" in refusal(lab)


def test_a_full_disk_while_unpacking(lab):
    (lab.root / "full").touch()
    assert refusal(lab) == "dpkg-source: tar: a: write: No space left on device"


def test_a_full_disk_while_preparing(lab, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(debian, "private_apt", full)
    assert refusal(lab) == "x: No space left on device"


def test_a_file_in_the_way(lab):
    lab.into.touch()
    with pytest.raises(ForkError, match="File exists"):
        debian.fetch(lab.into)
