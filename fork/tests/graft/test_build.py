"""Tests of the graft's steps on small inputs, and of the wheel that it made of the tip."""

import contextlib
import csv
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.version import Version
from wheel.wheelfile import WheelFile

from fork.bootstrap import borrow_venv, make_venv
from fork.console import step
from fork.errors import ForkError
from fork.graft import base as bases
from fork.graft import build
from fork.graft.base import Base
from fork.graft.build import EXPORTS, Graft, Toolchain, check_exports, mirror
from fork.graft.codegen import fragment
from fork.graft.generate import check_formulas, without_key
from fork.graft.install import UNDER_WAY, clear, exchange, install
from fork.graft.pack import header, pack
from fork.overlay import NATIVE, Stack, releases
from fork.paths import BASES, ROOT
from fork.tests.conftest import PLATFORM, PYTHON, TAG, WHEEL_FILES, message, write_files

DIST_INFO = "torch-2.13.0+cpu.dist-info"
OTHER_MACHINE = "x86_64" if platform.machine() == "aarch64" else "aarch64"


def test_fragment():
    schema = 'TORCH_LIBRARY(aten, m) {\n  m.def("attn()");\n  m.def("get_gradients(int c)");\n}\n'
    assert fragment(schema) == 'TORCH_LIBRARY_FRAGMENT(aten, m) {\n  m.def("attn()");\n}\n'
    with pytest.raises(SystemExit, match="not as the graft knows it"):
        fragment("TORCH_LIBRARY(prim, m) {}\n")


def test_without_key():
    entries = """
- func: f(Tensor x) -> Tensor
  variants: function
  dispatch:
    CPU, CUDA, MPS: f_fast
    CompositeExplicitAutograd: f
- func: g(Tensor x) -> Tensor
  dispatch:
    CUDA: g
"""
    assert yaml.safe_load(without_key(entries, "CUDA")) == [
        {
            "func": "f(Tensor x) -> Tensor",
            "variants": "function",
            "dispatch": {"CPU, MPS": "f_fast", "CompositeExplicitAutograd": "f"},
        },
        {"func": "g(Tensor x) -> Tensor"},
    ]


def test_a_formula_has_no_word_of_the_generators_after_at():
    """It makes of at::zeros_like(x) what no compiler takes; the error says what to write."""
    check_formulas("grad * at::zeros(3) + x_info.zeros() + at::mv(x_info.zeros(), x)")
    with pytest.raises(ForkError, match=r"at::zeros_like\(x\): write zeros_like\(x\)"):
        check_formulas("grad.defined() ? grad : at::x_info.zeros()")


def test_mirror_keeps_the_time_of_what_did_not_change(tmp_path):
    mirror({Path("a/x"): b"1", Path("y"): b"2"}, tmp_path)
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "a/x", tmp_path / "y")}
    mirror({Path("a/x"): b"1", Path("z"): b"3"}, tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["x", "z"]
    assert (tmp_path / "a/x").stat().st_mtime_ns == times[tmp_path / "a/x"]


def test_header_keeps_the_text_below():
    text = "Name: torch\nVersion: 1\nTag: a\nTag: b\n\nTensors — fast\n"
    assert (
        header(text, Version="2", Tag="c") == "Name: torch\nVersion: 2\nTag: c\n\nTensors — fast\n"
    )


@pytest.mark.parametrize("compress", [False, True])
def test_pack(wheel, unpacked, tmp_path, compress):
    stage = write_files(
        tmp_path / "stage", {"torch/overrides.py": "new\n", "torch/lib/libnew.so": "so"}
    )
    made = pack(Base(unpacked), stage, tmp_path / "out", compress)
    assert made.name.startswith(f"torch-2.13.0+cpu.attn-{TAG}-linux_")
    with WheelFile(made) as new:  # which compares each file with its hash in RECORD
        files = {i.filename: new.read(i).decode() for i in new.infolist()}
    record = files.pop("torch-2.13.0+cpu.attn.dist-info/RECORD")
    assert {row[0] for row in csv.reader(record.splitlines())} == {
        *files,
        "torch-2.13.0+cpu.attn.dist-info/RECORD",
    }
    assert files["torch/overrides.py"] == "new\n"
    assert files["torch/lib/libnew.so"] == "so"
    assert files["torch/_C.so"] == "\x7fELF"
    metadata = files["torch-2.13.0+cpu.attn.dist-info/METADATA"]
    assert "Version: 2.13.0+cpu.attn\n" in metadata and "Tensors — fast" in metadata


def test_a_packed_wheel_installs_and_uninstalls_clean(wheel, unpacked, tmp_path):
    stage = write_files(tmp_path / "stage", {"torch/attn.py": "x = 1\n"})
    made = pack(Base(unpacked), stage, tmp_path / "out", False)
    env = tmp_path / "env"
    venv.create(env, with_pip=True)
    site = next(env.glob("lib/python3*/site-packages"))
    pristine = files(site)

    install(made, "first", env)
    assert (site / "torch/attn.py").exists()
    installed = files(site)
    install(made, "first", env)  # it is installed: this does nothing

    # The next install was killed: half of torch is left, and what pip had renamed.
    (env / ".graft-installed").write_text(UNDER_WAY, encoding="utf-8")
    (site / "torch").rename(site / "~orch")
    (site / "torch-2.13.0+cpu.attn.dist-info/RECORD").unlink()
    install(made, "second", env)
    assert files(site) == installed

    pip = [env / "bin/python", "-m", "pip", "-q", "uninstall", "-y", "torch"]
    subprocess.run(pip, check=True)
    assert files(site) == pristine


def test_a_graft_is_exchanged_for_another(wheel, unpacked, tmp_path):
    """The result is the same as a new installation's, and pip can uninstall all of it."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extract(f"{DIST_INFO}/RECORD", unpacked)  # which has hashes

    class Made:
        base = Base(unpacked)

        def __init__(self, fingerprint, **of_torch):
            texts = {f"torch/{name}.py": text for name, text in of_torch.items()}
            self.fingerprint, self.stage = fingerprint, tmp_path / fingerprint
            write_files(self.stage, texts)
            self.made = 0

        def make(self):
            self.made += 1

    first = Made("first", version="1", overrides="first", gone="1", same="1", attn="1")
    second = Made("second", version="2", attn="longer", same="1", new="1")
    envs = [tmp_path / name for name in ("exchanged", "fresh")]
    for env, made in zip(envs, (first, second), strict=True):
        venv.create(env, with_pip=True)
        assert not exchange(made, env)  # no graft is installed
        install(pack(made.base, made.stage, tmp_path / "out", False), made.fingerprint, env)
    exchanged, fresh = envs
    same = next(exchanged.glob("lib/python3*/site-packages/torch/same.py")).stat().st_mtime_ns
    assert exchange(second, exchanged) and second.made == 1
    assert contents(exchanged) == contents(fresh)
    assert (
        next(exchanged.glob("lib/python3*/site-packages/torch/same.py")).stat().st_mtime_ns == same
    )
    assert exchange(second, exchanged) and second.made == 1  # it is installed: this does nothing
    (exchanged / ".graft-installed").write_text(UNDER_WAY, encoding="utf-8")
    assert not exchange(first, exchanged)  # the last one was killed half way
    pip = [exchanged / "bin/python", "-m", "pip", "-q", "uninstall", "-y", "torch"]
    subprocess.run(pip, check=True)
    assert not contents(exchanged)


def contents(env: Path) -> dict[Path, bytes | set[bytes]]:
    """Returns torch's files with their contents, RECORD as a set of lines; not pip's own."""
    site, found = next(env.glob("lib/python3*/site-packages")), {}
    for file in files(site):
        place, text = file.relative_to(site), file.read_bytes()
        if file.name == "RECORD":
            text = {line for line in text.split() if b"direct_url.json" not in line}
        if place.parts[0].startswith("torch") and file.name != "direct_url.json":
            found[place] = text
    return found


def test_install_beside_borrowed_packages(unpacked, tmp_path, monkeypatch):
    """Nothing is downloaded, and the loader finds the libraries of the borrowed packages."""
    host = write_files(tmp_path / "host/site-packages", {"nvidia/cu13/lib/libcudart.so": ""})
    monkeypatch.setattr("sys.path", [str(host), *sys.path])
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    python = borrow_venv(tmp_path / "env")
    rpath = "\0$ORIGIN/../../nvidia/cu13/lib:$ORIGIN/../../absent/lib:$ORIGIN\0"
    needs = {f"{DIST_INFO}/METADATA": "Name: torch\nVersion: 1\nRequires-Dist: nowhere\n\n"}
    package = {"torch/__init__.py": "", "torch/lib/libtorch_global_deps.so": rpath}
    stage = write_files(tmp_path / "stage", {**package, **needs})
    made = pack(Base(unpacked), stage, tmp_path / "out", False)
    for fingerprint in ("first", "second"):
        install(made, fingerprint, tmp_path / "env")
    site = next((tmp_path / "env").glob("lib/python3*/site-packages"))
    assert (site / "nvidia").readlink() == host / "nvidia"
    assert not (site / "absent").exists()
    first, *_, last = (site / "borrowed.pth").read_text(encoding="utf-8").splitlines()
    assert (first, last) == (str(host), str(ROOT / "fork/suites/stand_ins"))
    code = "import click, torch; print(torch.__file__)"
    found = subprocess.check_output([python, "-I", "-c", code], text=True)
    assert found.strip() == str(site / "torch/__init__.py")

    assert borrow_venv(tmp_path / "env") == python  # the environment, in which torch stays
    assert (site / "torch").exists()


@pytest.mark.parametrize("borrowed", [False, True], ids=["own packages", "borrowed"])
def test_an_environment_that_moved_is_made_anew(tmp_path, borrowed):
    """Its scripts name the place that it was made at."""
    requirements = write_files(tmp_path, {"requirements.txt": ""}) / "requirements.txt"
    first, second = tmp_path / "first", tmp_path / "second"

    def make(env: Path) -> None:
        borrow_venv(env) if borrowed else make_venv(env, requirements)

    make(first)
    (first / "kept").touch()
    make(first)
    assert (first / "kept").exists()
    first.rename(second)
    make(second)
    assert not (second / "kept").exists()
    assert str(first) not in (second / "bin" / "activate").read_text(encoding="utf-8")


def files(folder: Path) -> set[Path]:
    return {p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"}


def test_clear_removes_the_remains_of_a_killed_install(tmp_path):
    remains = (
        "torch/x.py",
        "~orch/x.py",
        "torchgen/x.py",
        "functorch/x.py",
        "torch-2.13.0.dist-info/METADATA",
    )
    write_files(tmp_path, {**dict.fromkeys(remains, ""), "torchvision/x.py": "", "numpy/x.py": ""})
    clear(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["numpy", "torchvision"]


@pytest.mark.parametrize(
    "release, words",
    [
        ("1.13.1", "torch 1.13.1: not a release that the graft supports: .*2.13.0[^;]*$"),
        ("2", "torch 2: not a release that the graft supports: .*2.13.0[^;]*$"),
        ("2.13", r"torch 2.13: not a release .*2.13.0.*; did you mean 2\.13\.0\?$"),
        ("2.13.0+cu130", r"torch 2.13.0\+cu130: not a release .*; did you mean 2\.13\.0\?$"),
        ("/nowhere/torch.whl", "/nowhere/torch.whl: no such wheel"),
    ],
)
def test_unsupported_bases(release, words, tmp_path):
    with pytest.raises(ForkError, match=words):
        bases.get(release, tmp_path)


def test_an_installed_base(installed, tmp_path):
    base = bases.get("installed", tmp_path / "cache")
    assert (base.folder, base.name) == (installed, f"torch-2.13.0+cpu-{PYTHON}-installed")
    assert base.tags == TAG and base.grafted_version == "2.13.0+cpu.attn"
    assert set(base.files()) == {*WHEEL_FILES}  # without the files that the installer added
    stage = write_files(tmp_path / "stage", {"torch/overrides.py": "new\n"})
    made = pack(base, stage, tmp_path / "out", False)
    assert made.name.startswith(f"torch-2.13.0+cpu.attn-{TAG}-linux_")
    with zipfile.ZipFile(made) as new:
        modes = {i.filename: i.external_attr >> 16 & 0o777 for i in new.infolist()}
    assert modes["torch/_C.so"] == 0o755 and modes["torch/overrides.py"] == 0o644
    assert len(modes) == len(WHEEL_FILES) + 1


def test_an_installed_base_that_is_replaced_is_grafted_anew(installed, tmp_path):
    prints = []
    for hashed in ("", "torch/new.py,sha256=1,1\n"):
        with (installed / "torch-2.13.0+cpu.dist-info/RECORD").open(
            "a", encoding="utf-8"
        ) as record:
            record.write(hashed)
        prints.append(Graft(Stack(ROOT), bases.get("installed", tmp_path)).fingerprint)
    assert prints[0] != prints[1]


def test_a_grafted_torch_is_no_base(installed, tmp_path, monkeypatch):
    grafted = {
        "torch-2.13.0+cpu.attn.dist-info/METADATA": "Name: torch\nVersion: 2.13.0+cpu.attn\n"
    }
    first = write_files(tmp_path / "first", grafted)
    monkeypatch.setattr("sys.path", [str(first), str(installed)])
    assert bases.get("installed", tmp_path).folder == installed
    monkeypatch.setattr("sys.path", [str(first)])
    with pytest.raises(ForkError, match="no pristine torch is installed for .*python.*: name a"):
        bases.get("installed", tmp_path)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({f"{DIST_INFO}/RECORD": "__editable__.torch.pth,,\n"}, "not installed from a wheel"),
        (
            {
                f"{DIST_INFO}/METADATA": "Name: torch\nVersion: 2.5.1\n",
                "torch/version.py": "__version__ = '2.5.1'\n",
            },
            "torch 2.5.1 in .*: not a release that the fork knows: 2.6.0, ",
        ),
    ],
    ids=["editable", "an unknown release"],
)
def test_installed_torches_that_are_no_base(installed, tmp_path, changed, words):
    write_files(installed, changed)
    with pytest.raises(ForkError, match=words):
        bases.get("installed", tmp_path)


def test_unpacking_keeps_the_modes(tmp_path):
    path = tmp_path / f"torch-2.13.0+cpu-{TAG}-{PLATFORM}.whl"
    with WheelFile(path, "w") as out:
        for name, text in {**WHEEL_FILES, "torch/bin/protoc": "#!/bin/sh\n"}.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o755 if "/bin/" in name else 0o644) << 16
            out.writestr(info, text)
    base = bases.get(str(path), tmp_path / "cache")
    runs = [p for p in base.files() if (base.folder / p).stat().st_mode & 0o100]
    assert runs == ["torch/bin/protoc"]


def test_a_release_is_downloaded_once(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    cache = tmp_path / "bases"
    for _ in range(2):
        base = bases.get("2.13.0", cache)
        assert (base.version, base.folder) == ("2.13.0+cpu", cache / wheel.stem)
        wheel.unlink(missing_ok=True)  # a second download would fail
    assert sorted(p.name for p in cache.iterdir()) == [wheel.stem, wheel.name]


@pytest.mark.parametrize(
    ("version", "found"),
    [("2.13.0", 1), ("2.13.0+cpu", 1), ("2.13.0-3", 1), ("2.13.0+cpu-3", 1), ("2.13.0rc1", 0)],
)
def test_a_wheel_is_found_by_its_name(tmp_path, version, found):
    wheel = tmp_path / f"torch-{version}-{TAG}-{PLATFORM}.whl"
    wheel.touch()
    for other in (f"cp39-cp39-{PLATFORM}", f"{TAG}-manylinux_2_28_{OTHER_MACHINE}"):
        (tmp_path / f"torch-{version}-{other}.whl").touch()
    assert bases._find("2.13.0", tmp_path, platform.machine()) == (wheel if found else None)


@pytest.mark.parametrize(
    ("tag", "machine"),
    [
        ("linux_x86_64", "x86_64"),
        ("manylinux1_x86_64", "x86_64"),
        ("manylinux2014_aarch64", "aarch64"),
        ("manylinux_2_28_aarch64", "aarch64"),
        ("manylinux_2_17_x86_64\nTag: cp311-cp311-manylinux2014_x86_64", "x86_64"),
        ("macosx_11_0_arm64", None),
    ],
)
def test_the_machine_is_that_of_the_wheels_tag(unpacked, tmp_path, tag, machine):
    write_files(unpacked, {f"{DIST_INFO}/WHEEL": f"Tag: cp311-cp311-{tag}\n"})
    base = Base(unpacked)
    if machine is None:
        with pytest.raises(ForkError, match="the wheel is not for Linux"):
            print(base.machine)
        return
    assert (base.tags, base.machine) == ("cp311-cp311", machine)
    made = pack(base, write_files(tmp_path / "stage", {}), tmp_path / "out", False)
    assert made.name == f"torch-2.13.0+cpu.attn-cp311-cp311-linux_{machine}.whl"


def test_a_wheel_for_another_machine_is_downloaded(tmp_path, monkeypatch):
    """It lies beside that for this one."""
    asked = []

    def download(release, folder, doing, what, *, options, equals):
        asked.append(options)
        of = options[0].removeprefix("--platform=") if options else PLATFORM
        with WheelFile(folder / f"torch-{release}+cpu-{TAG}-{of}.whl", "w") as out:
            for name, text in WHEEL_FILES.items():
                out.writestr(name, text.replace(PLATFORM, of))

    monkeypatch.setattr(bases, "download_wheel", download)
    for _ in range(2):
        for machine in (platform.machine(), OTHER_MACHINE):
            assert bases.get("2.13.0", tmp_path, machine=machine).machine == machine
    assert asked == [(), (f"--platform=manylinux_2_28_{OTHER_MACHINE}",)]


def test_the_compiler_is_for_the_wheels_machine(repo, unpacked, monkeypatch):
    """It compiles for the machine of the wheel, with the headers of Python there, or not at all."""
    other = f"Tag: {TAG}-manylinux_2_28_{OTHER_MACHINE}\n"
    base = Base(write_files(unpacked, {f"{DIST_INFO}/WHEEL": other}))
    with pytest.raises(ForkError, match=f"a wheel for {OTHER_MACHINE}, and the compiler is for "):
        Graft(Stack(repo), base).compile(None)
    graft = Graft(Stack(repo), base, toolchain=Toolchain(OTHER_MACHINE, Path("/python"), "c++ -x"))
    monkeypatch.setattr(Graft, "configuration", lambda self: "")
    ran = []
    monkeypatch.setattr(build, "run", lambda command, *_, env, **__: ran.append(env["CXX"]))
    graft.compile(None)
    assert ran == ["c++ -x"] * 3  # to set up, for the overlay's own file, for all


GENERATED = """\
cmake_minimum_required(VERSION 3.25)
project(graft LANGUAGES CXX)
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/Op.DEFAULT.cpp CONTENT "#include <Op.cpp>\\n")
include_directories(aten/src/ATen/native/cpu)
add_library(torch SHARED gen.cpp aten/src/ATen/native/Once.cpp edited.cpp Op.DEFAULT.cpp)
"""


@pytest.mark.parametrize("wrong", ["", "Once.cpp", "Op.cpp", "edited.cpp"])
def test_the_overlays_own_files_are_compiled_first(tmp_path, unpacked, monkeypatch, wrong):
    """A mistake in one of them stops the compiler before it has seen generated code."""
    folder = "aten/src/ATen/native"
    ours = [f"{folder}/Once.cpp", f"{folder}/cpu/Op.cpp"]
    commit = {"CMakeLists.txt": GENERATED, "stack/01-a/commit.md": message(ours)}
    sources = {
        path: f"int {Path(path).stem} = {'nothing' if Path(path).name == wrong else 1};\n"
        for path in ("gen.cpp", *ours, "edited.cpp")
    }
    write_files(tmp_path, commit | sources)
    monkeypatch.setattr(Graft, "configuration", lambda self: "")
    monkeypatch.setattr(Graft, "_contexts", lambda self: {tmp_path / "edited.cpp": None})
    graft = Graft(Stack(tmp_path), Base(unpacked))
    with (
        pytest.raises(ForkError, match="the compiler stopped: .*nothing")
        if wrong
        else contextlib.nullcontext(),
        step("compile") as doing,
    ):
        assert graft.compile(doing) == "5 steps"
    made = {file.name for file in graft.dir.rglob("*.cpp.o")}
    assert ("gen.cpp.o" in made) == (not wrong)
    assert wrong or len(made) == 4


def version_of(repo: Path, base: Path, commit: int | None = None) -> str:
    """Returns what the version file of a graft says."""
    graft = Graft(Stack(repo), Base(base), commit)
    graft.stage_version()
    return (graft.stage / "torch/version.py").read_text(encoding="utf-8")


def test_the_version_file_says_what_a_graft_is_made_of(repo, unpacked):
    """Each change of what the wheel has gives another line, and a change of anything else does not.

    Compiled programs are kept by a key that has this file in it, and no C++.
    """
    formulas = "tools/autograd/derivatives.edit.yaml"
    listed = [
        "aten/src/ATen/native/native_functions.edit.yaml",
        formulas,
        "torch/overrides.edit.py",
    ]
    files = {"stack/02-explicit/commit.md": message(listed), formulas: "# @@ before: x\n"}
    write_files(repo, {**files, "CMakeLists.txt": ""})
    first = version_of(repo, unpacked)
    assert re.fullmatch(r"__version__ = '2\.13\.0\+cpu\.attn'\nattn = '[0-9a-f]{64}'\n", first)
    for unseen in ("test/test_attn.py", "README.md"):
        write_files(repo, {unseen: "x = 1\n"})
        assert version_of(repo, unpacked) == first, unseen
    said = {first, version_of(repo, unpacked, 1)}
    for seen in (
        "aten/src/ATen/native/Attn.cpp",
        "torch/overrides.edit.py",
        formulas,
        "CMakeLists.txt",
    ):
        with (repo / seen).open("a", encoding="utf-8") as file:
            file.write("# more\n")
        assert (now := version_of(repo, unpacked)) not in said, seen
        said.add(now)
    with (unpacked / f"{DIST_INFO}/RECORD").open("a", encoding="utf-8") as file:
        file.write("torch/new.py,sha256=1,1\n")
    assert version_of(repo, unpacked) not in said


def test_the_keys_of_compiled_programs_have_the_version_file(tmp_path):
    code = "from torch._inductor import codecache as c; c._TORCH_PATH = {!r}; print(c.torch_key())"
    keys = []
    for made in ("first", "second"):
        folder = write_files(tmp_path / made, {"version.py": f"attn = '{made}'\n"})
        command = [sys.executable, "-P", "-c", code.format(str(folder))]
        keys.append(subprocess.check_output(command))
    assert keys[0] != keys[1]


WORD = """\
cmake_minimum_required(VERSION 3.25)
project(word LANGUAGES NONE)
add_custom_command(OUTPUT word COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_SOURCE_DIR}/word.txt word
                   DEPENDS ${CMAKE_SOURCE_DIR}/word.txt)
add_custom_target(torch ALL DEPENDS word)
"""


@pytest.mark.parametrize("change", ["copied", "moved", "another clone's folder", "half set up"])
def test_a_build_folder_is_of_its_place(tmp_path, unpacked, monkeypatch, change):
    """A copy of a clone compiles its own sources, whether the original is still there or not."""
    monkeypatch.setattr(Graft, "configuration", lambda self: "")
    first, second = tmp_path / "first", tmp_path / "second"
    files = {
        "CMakeLists.txt": WORD,
        "word.txt": "old",
        "torch/attn.py": "",
        "stack/01-a/commit.md": message(["torch/attn.py"]),
    }

    def made_in(clone: Path) -> str:
        graft = Graft(Stack(clone), Base(unpacked))
        graft.dir.mkdir(parents=True, exist_ok=True)
        with step("compile") as doing:
            graft.compile(doing)
        return (graft.dir / "cmake" / "word").read_text(encoding="utf-8")

    assert made_in(write_files(first, files)) == "old"
    if change == "moved":
        first.rename(second)
    elif change == "another clone's folder":
        write_files(second, files)
        (second / "build").symlink_to(first / "build")
    else:
        shutil.copytree(first, second)
    if change == "half set up":
        for cache in second.rglob("CMakeCache.txt"):
            cache.write_text("", encoding="utf-8")
    (second / "word.txt").write_text("new", encoding="utf-8")
    assert made_in(second) == "new"
    assert made_in(second) == "new"  # and does nothing


HELD = """\
#include <sstream>
#include <string>
#include <vector>
struct Held { std::string text; };
template class std::vector<Held>;
std::string held(int n) { std::ostringstream out; out << n; return out.str() + std::to_string(n); }
"""


@pytest.mark.parametrize("options", [[], ["-static-libstdc++"]], ids=["shared", "static"])
def test_no_symbol_of_the_cpp_library_is_exported(tmp_path, options):
    """Whether the compiler links that library statically or makes code of its templates."""
    write_files(tmp_path, {"held.cpp": HELD, "CMakeCache.txt": "CMAKE_NM:FILEPATH=nm\n"})
    library = tmp_path / "libheld.so"
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", *options]
    command += ["-o", library, tmp_path / "held.cpp"]
    subprocess.run(command, check=True)
    with pytest.raises(
        ForkError, match=r"^libheld.so exports \d+ symbols of the C\+\+ library, _Z"
    ):
        check_exports(tmp_path, library.name)
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    (found,) = re.findall(r"^add_link_options\((.*)\)$", text, re.M)
    ours = found.replace("LINKER:", "-Wl,").replace("${exports}", str(EXPORTS)).split()
    subprocess.run([*command, *ours], check=True)
    check_exports(tmp_path, library.name)
    assert any("held" in name for name in defined(library))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"\0$ORIGIN\0", ["$ORIGIN"]),
        (b"\0$ORIGIN/../../nvidia/lib:$ORIGIN\0", ["$ORIGIN/../../nvidia/lib", "$ORIGIN"]),
        (
            b"\0$ORIGIN\0\0$ORIGIN:$ORIGIN/../../torch.libs\0",
            ["$ORIGIN", "$ORIGIN/../../torch.libs"],
        ),
        (b"\0", []),
    ],
)
def test_rpath(tmp_path, text, found):
    """auditwheel leaves the former string in the file."""
    (tmp_path / "libtorch.so").write_bytes(text)
    assert bases.rpath(tmp_path / "libtorch.so") == found


def test_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        ForkError, match=r"torch 2.13.0 for this Python \(cp3\d+\) cannot be downloaded: ERROR"
    ):
        bases.get("2.13.0", tmp_path)


def test_a_proxy_that_says_nothing_is_asked_twice(tmp_path):
    """Pip would ask it six times, for two minutes. It is told so only if the user says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        mine = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
        settings = {"CONFIG_FILE": os.devnull, "TIMEOUT": "0.2", "INDEX_URL": "https://nowhere/"}
        settings["PROXY"] = "http://{}:{}".format(*proxy.getsockname())
        env = mine | {f"PIP_{name}": text for name, text in settings.items()}
        code = "import sys, pathlib; from fork.graft.base import get; "
        code += "get('2.13.0', pathlib.Path(sys.argv[1]))"
        command = [sys.executable, "-c", code, tmp_path / "bases"]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        proxy.settimeout(0.2)
        asked = 0
        with contextlib.suppress(TimeoutError):
            while proxy.accept():
                asked += 1
    last = done.stderr.splitlines()[-1]
    assert asked == 2 and "cannot be downloaded: no network? ERROR: " in last
    assert "timed out" in last


def test_anchors_of_what_may_not_be_installed(tmp_path, monkeypatch):
    """Constraints of pip forbid an installation, but not this download."""
    release = releases.RELEASES[-1]["torch"]
    (tmp_path / "constraints.txt").write_text(f"torch<{release}", encoding="utf-8")
    name = f"torch-{release}-cp311-none-macosx_11_0_arm64.whl"
    with WheelFile(tmp_path / name, "w") as out:
        metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {release}\n"
        out.writestr(f"torch-{release}.dist-info/METADATA", metadata)
        out.writestr(f"torch-{release}.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    monkeypatch.setattr(releases, "RELEASES", releases.RELEASES[-1:])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    releases.fetch_anchors(tmp_path / "anchors")
    assert [p.name for p in (tmp_path / "anchors").iterdir()] == [name]


def make_wheel(path: Path, **changed: str) -> Path:
    """Makes a wheel in which files are `changed` after their hashes were taken."""
    with WheelFile(path, "w") as out:
        for name, text in WHEEL_FILES.items():
            out.writestr(name, text)
    with zipfile.ZipFile(path) as packed:
        contents = {name: packed.read(name) for name in packed.namelist()}
    with zipfile.ZipFile(path, "w") as out:
        for name, content in contents.items():
            out.writestr(name, changed.get(Path(name).stem, content))
    return path


GRAFTED, UNKNOWN = ({"version": f"__version__ = '{v}'\n"} for v in ("2.13.0+cpu.attn", "2.5.1"))


@pytest.mark.parametrize(
    "name, changed, words",
    [
        (f"torch-2.13.0+cpu.attn-{TAG}-{PLATFORM}", GRAFTED, "already grafted"),
        (f"torch-2.5.1-{TAG}-{PLATFORM}", UNKNOWN, "not a release that the fork knows: 2.6.0, "),
        (f"torch-2.13.0-{TAG}-{PLATFORM}", {"version": ""}, "version cannot be read"),
        (f"torch-2.13.0-cp39-cp39-{PLATFORM}", {}, "not a wheel for "),
        (f"torch-2.13.0-{TAG}-manylinux_2_28_{OTHER_MACHINE}", {}, "not a wheel for "),
        (f"numpy-2.13.0-{TAG}-{PLATFORM}", {}, "not a wheel of torch"),
        ("torch", {}, "not a wheel of torch"),
        (f"torch-2.13.0+cpu-{TAG}-{PLATFORM}", {"overrides": "changed"}, "broken .*overrides"),
        (f"torch-2.13.0-{TAG}-{PLATFORM}", None, "not a readable wheel"),
    ],
)
def test_a_wheel_that_is_refused_stays_and_leaves_nothing(tmp_path, name, changed, words):
    """Whatever lay among the bases, `check` would look at, in each later run."""
    wheel = make_wheel(tmp_path / "torch-2.13.0+cpu-py3-none-any.whl", **(changed or {}))
    content = wheel.read_bytes() if changed is not None else wheel.read_bytes()[:-30]
    wheel = wheel.rename(tmp_path / f"{name}.whl")
    wheel.write_bytes(content)
    cache = tmp_path / "bases"
    with pytest.raises(ForkError, match=f"^{re.escape(str(wheel))}: .*{words}"):
        bases.get(str(wheel), cache)
    assert wheel.read_bytes() == content and not [*cache.glob("*")]


def test_a_truncated_download_is_removed(wheel, tmp_path):
    cache = tmp_path / "bases"
    cache.mkdir()
    wheel = wheel.rename(cache / wheel.name)
    wheel.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(ForkError, match="broken .* run this again"):
        bases.get("2.13.0", cache)
    assert not [*cache.iterdir()]


@pytest.fixture(scope="module")
def grafted():
    """Returns the tip's graft and wheel; `make test` made it before."""
    base = os.environ.get("BASE") or releases.default_release()
    graft = Graft(Stack(ROOT), bases.get(base, BASES))
    return graft, graft.build()


def records(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as z:
        name = next(n for n in z.namelist() if n.endswith(".dist-info/RECORD"))
        return digests(z.read(name).decode())


def base_records(base: Base) -> dict[str, str]:
    found = digests(base.record)
    return {path: found[path] for path in base.files()}


def digests(record: str) -> dict[str, str]:
    return {path: digest for path, digest, _ in csv.reader(record.splitlines()) if digest}


def test_only_the_edits_differ_from_the_base(grafted):
    graft, wheel = grafted
    old, new = base_records(graft.base), records(wheel)
    meta = {p for p in (*old, *new) if ".dist-info/" in p}
    changed = {p for p in old if p not in meta and new.get(p) != old[p]}
    added = set(new) - set(old) - meta
    staged = {p.relative_to(graft.stage).as_posix() for p in graft.stage.rglob("*") if p.is_file()}
    assert changed | added == staged
    assert {p for p in changed if p.endswith(".so")} == {"torch/lib/libtorch.so"}
    assert {p.split(".")[0] for p in added if p.endswith(".so")} == {"torch/_C_graft"}


def test_our_libtorch_stands_for_upstreams(grafted):
    """It needs what upstream's needs and looks in the same places; no symbol is lost."""
    graft, _ = grafted
    place = Path("torch", "lib", "libtorch.so")
    theirs, ours = graft.base.folder / place, graft.stage / place
    for tag in ("SONAME", "R(?:UN)?PATH"):
        assert dynamic(ours, tag) == dynamic(theirs, tag)
    # libc.so.6 has had all of libpthread.so.0 since glibc 2.34.
    assert {*dynamic(theirs, "NEEDED")} - {"libpthread.so.0"} <= {*dynamic(ours, "NEEDED")}
    # Some wheels have copies of what the C++ library of their build machine lacked: std::, and
    # operator delete (dl). 2.14.0's has cpuinfo, which libtorch_cpu.so finds in libc10.so too.
    own = {s for s in defined(theirs) if not re.match(r"_Z(dl|(T\w|GTt)?(N[KRO]*)?St)", s)}
    own -= defined(theirs.with_name("libc10.so"))
    assert own <= {"__bss_start", "_edata", "_end", "_init", "_fini"}


def defined(library: Path) -> set[str]:
    """Returns the names of the symbols that others can find in the library."""
    nm = ["nm", "--dynamic", "--defined-only", "--format=posix", library]
    return {line.split()[0] for line in subprocess.check_output(nm, text=True).splitlines()}


def test_instruction_sets_share_no_symbol_of_ours(grafted):
    """Code for AVX-512 never runs on a CPU without it.

    The linker keeps one definition of each weak symbol, and that could be the one for AVX-512.

    Symbols that PyTorch's and C++'s headers define alone are shared anyway. Every other, also an
    instance of their templates for our types, has our namespace in its name.
    """
    graft, _ = grafted
    sets: dict[str, set[str]] = {}
    for file in (graft.dir / "cmake").rglob("*.*.cpp.o"):
        _, instruction_set, *_ = file.name.split(".")
        said = subprocess.check_output(["nm", "--demangle", "--defined-only", file], text=True)
        for symbol in re.findall(r"^\w+ [uVvWw] (.*at::native::.*)", said, re.M):
            sets.setdefault(symbol, set()).add(instruction_set)
    assert "DEFAULT" in set.union(*sets.values())
    assert {symbol: found for symbol, found in sets.items() if len(found) > 1} == {}


def dynamic(library: Path, tag: str) -> list[str]:
    """Returns the entries for `tag` in the dynamic section, by readelf, which comes with g++."""
    said = subprocess.check_output(["readelf", "--dynamic", library], text=True)
    return re.findall(rf"\({tag}\).*\[(.*)\]", said)


def test_the_wheels_headers_have_our_operators(grafted):
    graft, wheel = grafted
    include = "torch/include/"
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
        header = {h: z.read(include + h).decode() for h in MERGED}
    assert f"{include}ATen/ops/attn.h" in names
    for name, text in header.items():
        assert text.count(MERGED[name]) == 1, name
        old = (graft.base.folder / include / name).read_text(encoding="utf-8")
        assert lines_added(old, text), f"{name}: the wheel's own lines stay as they are"
    # This header stays: libtorch_cpu was compiled with the numbers that it gives to strings.
    interned = "torch/include/ATen/core/aten_interned_strings.h"
    assert records(wheel)[interned] == base_records(graft.base)[interned]


MERGED = {
    "ATen/Functions.h": "#include <ATen/ops/attn.h>",
    "ATen/NativeFunctions.h": "#include <ATen/ops/attn_native.h>",
    "ATen/Operators.h": "#include <ATen/ops/attn_ops.h>",
    "ATen/RedispatchFunctions.h": "at::_ops::attn::redispatch(",
    "torch/csrc/autograd/generated/Functions.h": "struct TORCH_API AttnBackward0",
    "torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h": "aoti_torch_cpu_attn(",
}


FOUND = """
import importlib.metadata, json, sys, torch
print(json.dumps({
    "imported": "triton" in sys.modules,
    "for CUDA": torch.backends.cuda.is_built(),
    "versions": {x.metadata["Name"]: x.version for x in importlib.metadata.distributions()},
    "registered": [
        op
        for op in sys.argv[1:]
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "CUDA")
    ],
}))
"""


def test_kernels_for_gpus_are_registered_and_triton_is_not_imported():
    """They are where PyTorch is built for CUDA and its Triton is new enough."""
    entries = yaml.safe_load((ROOT / NATIVE).read_text(encoding="utf-8"))
    ops = [entry["func"].partition("(")[0] for entry in entries]
    found = json.loads(subprocess.check_output([sys.executable, "-c", FOUND, *ops], text=True))
    assert not found["imported"]
    torch, triton = (Version(found["versions"].get(name, "0")) for name in ("torch", "triton"))
    new = torch >= Version("2.10") and triton >= Version("3.6")
    assert found["registered"] == (ops if found["for CUDA"] and new else [])


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_c_functions_find_kernels_that_are_registered_later(grafted, device):
    """Where a device has no kernel of its own, AOTInductor's functions call the dispatcher."""
    graft, _ = grafted
    shims = graft.dir / "generated/aoti"
    ours, cpu = (
        (shims / f"c_shim_{name}.cpp").read_text(encoding="utf-8") for name in (device, "cpu")
    )
    ops = re.findall(r"= at::cpu::(\w+)\(", cpu)
    assert {"attn", "_attn_backward", "attn_output", "_attn_output_jvp"} <= {*ops}
    assert re.findall(r"= at::([\w:]+)\(", ours) == ops
    assert all(f"#include <ATen/ops/{op}.h>\n" in ours for op in ops)


def lines_added(old: str, new: str) -> bool:
    """Returns whether `new` is `old` with lines added, and none changed."""
    rest = iter(new.splitlines())
    return old != new and all(line in rest for line in old.splitlines())


def test_the_wheel_tells_type_checkers_and_torchgen(grafted):
    _, wheel = grafted
    with zipfile.ZipFile(wheel) as z:
        functions = z.read("torch/_C/_VariableFunctions.pyi").decode()
        assert z.read("torch/_VF.pyi").decode().endswith(functions[functions.index("__all__ +=") :])
        types = z.read("torch/return_types.pyi").decode()
        native = z.read("torchgen/packaged/ATen/native/native_functions.yaml").decode()
    assert '__all__ += ["attn"]' in functions
    assert "def attn(q: Tensor, k: Tensor, v: Tensor) -> torch.return_types.attn: ..." in functions
    assert "class attn(tuple[Tensor, Tensor])" in types
    assert native.count("- func: attn(") == 1


@pytest.mark.parametrize("page", ["README.md", "site/install.md"])
def test_a_page_quotes_the_number_of_files_that_a_graft_prints(grafted, page, tmp_path):
    if str(grafted[0].base.upstream.release) != releases.default_release():
        pytest.skip("the pages quote the default release's graft")
    graft = Graft(Stack(ROOT), grafted[0].base)
    graft.stage = tmp_path  # so that the wheel's own stage stays as it is
    quoted = re.findall(
        r"^\+ overlay, commit (.*), on .*: (\d+) files",
        (ROOT / page).read_text(encoding="utf-8"),
        re.M,
    )
    assert quoted == [(graft.commit.folder.name, str(len(graft.resolve())))]


def test_nothing_is_done_twice(grafted, monkeypatch):
    graft, wheel = grafted
    monkeypatch.setattr(Graft, "compile", lambda *a: pytest.fail("compiled again"))
    assert Graft(Stack(ROOT), graft.base).build() == wheel


def test_a_file_changed_while_compiling_makes_the_next_graft_compile_again(grafted, tmp_path):
    graft, _ = grafted
    kernel = "aten/src/ATen/native/Attn.cpp"
    (tmp_path / "Attn.cpp").write_text("int edited;\n", encoding="utf-8")
    running, following = (Graft(Stack(ROOT), graft.base) for _ in range(2))
    before = running.fingerprint
    for each in (running, following):
        each.tree[kernel] = tmp_path / "Attn.cpp"
    assert running.fingerprint == before  # the stamps of the wheel and of the install will have it
    assert following.fingerprint != before
