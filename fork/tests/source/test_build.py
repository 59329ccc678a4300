"""Tests of the source build; a script replaces PyTorch's setup.py."""

import re
import sys
from pathlib import Path

import pytest

from fork.console import console
from fork.errors import ForkError
from fork.graft.base import Base
from fork.graft.build import CPU_KERNELS, Graft, cuda
from fork.overlay import Edit, Stack, is_source, target_of
from fork.paths import ROOT
from fork.source.build import Figures, build_whole, configure, left_out, table
from fork.source.place import Place, checkout
from fork.suites import from_source
from fork.tests.conftest import write_files

# A line has: start and end in milliseconds, the output's time, the output, the command's hash.
LOG = """\
# ninja log v6
0\t9000\t1\tb.cpp.o\ta
0\t500\t1\tops/a.h\tb
0\t500\t1\tops/b.h\tb
500\t1500\t2\tb.cpp.o\tc
1500\t4500\t2\tlib/libtorch.so\td
4500\t47"""
SETUP = f"""#!{sys.executable}
LOG = {LOG!r}
import os, pathlib, sys
assert sys.argv[1] == "setup.py" and os.environ["USE_CUDA"] == "0"
wish = pathlib.Path(__file__).with_name("wish").read_text().split()
if "--cmake-only" in sys.argv:
    if "unconfigured" in wish:
        sys.exit("-- found\\nCMake Error at x.cmake:1 (message):\\n  pocketfft not found")
    pathlib.Path("build").mkdir(exist_ok=True)
    steps = [f"build x/{{w}}.o: CXX_COMPILER__torch_cpu_Release /t/{{w}} || x\\n" for w in wish]
    pathlib.Path("build/build.ninja").write_text("".join(steps))
    pathlib.Path("build/CMakeCache.txt").write_text("USE_CUDA:BOOL=0\\n")
    pathlib.Path("build/.ninja_log").write_text(LOG)
else:
    assert sys.argv[2] == "develop"
    print("[1/3] Building CXX object a/b.cpp.o", flush=True)
    if "broken" in wish:
        sys.exit("FAILED: b.cpp.o\\nAttn.cpp:7: error: no such thing\\nninja: build stopped")
    print("[2/3] Building CXX object a/c.cpp.o\\n[3/3] Linking lib/libtorch.so", flush=True)
"""
SOURCE = "aten/src/ATen/native/Attn.cpp"


@pytest.fixture
def place(tmp_path, source):
    python = tmp_path / "python"
    python.write_text(SETUP, encoding="utf-8")
    python.chmod(0o755)
    return Place(source, python, tmp_path / "logs", {"USE_CUDA": "0"})


def wish(place, words):
    place.python.with_name("wish").write_text(words, encoding="utf-8")


def build(place, repo):
    configure(place, Stack(repo), "attn")
    return build_whole(place)


def test_build(repo, place):
    wish(place, SOURCE)
    first = build(place, repo)
    assert (first.steps, first.whole_steps, first.whole_seconds) == (3, 3, 4.5)
    assert first.disk >= 4096 and first.largest_process > 0
    assert (place.tree / SOURCE).is_file()
    assert build(place, repo).steps == 3


@pytest.mark.parametrize(
    "words, message",
    [
        ("unconfigured", r"PyTorch cannot be configured: CMake Error at x.cmake:1 .* pocketfft"),
        ("other.cpp", f"{SOURCE}: PyTorch's build does not compile it"),
        (
            f"{SOURCE} broken",
            r"PyTorch's build stopped: Attn.cpp:7: error: no such thing .*/build",
        ),
    ],
)
def test_a_build_that_fails_goes_on_later(repo, place, words, message):
    wish(place, words)
    with pytest.raises(ForkError, match=message):
        build(place, repo)
    wish(place, SOURCE)
    assert build(place, repo).steps == 3


@pytest.mark.parametrize(
    "says, message",
    [
        ("print('TREE/torch/__init__.py'); print('2.6.0 <built-in attn>')", None),
        ("print('/usr/lib/torch/__init__.py'); print(2)", "imports /usr/lib/torch/__init__.py, "),
        (
            "sys.exit('ImportError: libc10.so: cannot open')",
            "aten.attn, torch.ops.aten.attn_output: ImportError: lib",
        ),
    ],
)
def test_the_import_is_of_that_tree(place, says, message):
    says = says.replace("TREE", str(place.tree))
    place.python.write_text(f"#!{sys.executable}\nimport os, sys\n{says}\n", encoding="utf-8")
    if message is None:
        from_source.check(place, place.variables)
        return
    with pytest.raises(ForkError, match=message):
        from_source.check(place, place.variables)


def test_a_tree_that_the_stack_does_not_fit_is_not_built(repo, place):
    (place.tree / "torch/overrides.py").write_text("", encoding="utf-8")
    with pytest.raises(ForkError, match="starts 0 lines"):
        configure(place, Stack(repo), "attn")
    assert not place.logs.exists() and not (place.tree / ".git").exists()


# CMake writes such lines for a build without CUDA. Even that mentions a .cu, which it generates.
NINJA = """\
build cmake_object_order_depends_target_torch_cpu: phony || aten/src/ATen/UfuncCUDA_add.cu
build c.dir/__/aten/A.cpp.o: CXX_COMPILER__torch_cpu_unscanned_Release /t/aten/A.cpp || x
  DEP_FILE = c.dir/__/aten/A.cpp.o.d
build c.dir/K.cpp.AVX2.cpp.o: CXX_COMPILER__torch_cpu_Release /t/build/aten/cpu/K.cpp.AVX2.cpp || x
build lib/libtorch_cpu.so: CXX_SHARED_LIBRARY_LINKER__torch_cpu_Release c.dir/__/aten/A.cpp.o
build c.dir/UfuncCUDA_add.cu: CUSTOM_COMMAND /t/torchgen/gen.py aten/L.cpp || functorch/M.cpp
build c.dir/__/functorch/M.cpp.o: CXX_COMPILER__functorch_Release /t/functorch/M.cpp
"""
CUDA = "build c.dir/A.cu.o: CUDA_COMPILER__torch_cuda_Release /t/aten/A.cu | y || x\n"


class Series:
    def __init__(self, *paths):
        self.paths = paths

    def tree(self):
        return dict.fromkeys(self.paths)


@pytest.mark.parametrize("path", ["aten/L.cpp", "torch/M.cpp"])
def test_a_source_that_is_mentioned_is_not_compiled(tmp_path, path):
    """The first is in a step that compiles nothing, the second ends another file's path."""
    write_files(tmp_path, {"build/build.ninja": NINJA, "build/CMakeCache.txt": ""})
    assert left_out(Series("aten/A.cpp", path, "aten/cpu/K.cpp"), tmp_path) == [path]


@pytest.mark.parametrize("value", ["0", "OFF", "FALSE", "N", "CUDA-NOTFOUND", ""])
def test_a_build_without_cuda_compiles_no_kernel_for_it(tmp_path, value):
    cache = f"TP_USE_CUDA:BOOL=ON\n//Use CUDA\nUSE_CUDA:BOOL={value}\nUSE_CUDNN:BOOL=ON\n"
    write_files(tmp_path, {"build/build.ninja": NINJA, "build/CMakeCache.txt": cache})
    assert left_out(Series("aten/A.cpp", "aten/A.cu"), tmp_path) == []


@pytest.mark.parametrize("value", ["ON", "1", "TRUE", "Yes", "y"])
def test_a_build_for_cuda_compiles_every_kernel_for_it(tmp_path, value):
    series = Series("aten/A.cpp", "aten/A.cu")
    cache = f"//Use CUDA\nUSE_CUDA:BOOL={value}\n\nUSE_CUDNN:BOOL=0\n"
    write_files(tmp_path, {"build/build.ninja": NINJA, "build/CMakeCache.txt": cache})
    assert left_out(series, tmp_path) == ["aten/A.cu"]
    write_files(tmp_path, {"build/build.ninja": NINJA + CUDA})
    assert left_out(series, tmp_path) == []


@pytest.mark.parametrize("lacks", ["build.ninja", "CMakeCache.txt"])
def test_a_tree_that_is_not_configured(tmp_path, lacks):
    write_files(tmp_path, {"build/build.ninja": NINJA, "build/CMakeCache.txt": ""})
    (tmp_path / "build" / lacks).unlink()
    with pytest.raises(ForkError, match=f"has no build/{lacks}: CMake has not configured it"):
        left_out(Series(), tmp_path)


def test_table():
    with console.capture() as captured:
        console.print(table(Figures(70, 400, 500, 2**31, 1380, 8575, 2**33)))
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert "this run 70 400 8 2.0 GiB" in lines
    assert "whole, by Ninja's log 1380 8575 8.0 GiB" in lines


def test_no_such_python(tmp_path):
    with pytest.raises(ForkError, match="python9: no such Python to build"):
        checkout(tmp_path, "python9")


def test_a_python_of_the_working_folder(tmp_path, monkeypatch):
    """Its path is made absolute, as the build runs in another folder, the tree."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)  # a virtual environment's is a link, not to be resolved
    monkeypatch.chdir(tmp_path)
    place = checkout(Path("pytorch"), "bin/python")
    assert place.python == python


# PyTorch's CMake compiles all C++ in these folders. `make source` looks for each in build.ninja.
CUDA_KERNELS = "aten/src/ATen/native/cuda/"
GLOBBED = ("aten/src/ATen/functorch/", "aten/src/ATen/native/", CPU_KERNELS, CUDA_KERNELS)


def sources(number=None):
    """Yields each C++ file of the overlay that both builds compile, and whether it is whole."""
    for path, file in Stack(ROOT).tree(number).items():
        if is_source(path):
            edit = Edit.parse(path, file.read_text(encoding="utf-8")) if target_of(path) else None
            if edit is None or not any(only.kind == "source" for only in edit.only):
                yield path, edit is None


def test_upstreams_build_compiles_every_source_of_each_commit():
    """Bazel and Buck build from lists, but take all of functorch's folder and of CUDA's."""
    stack = Stack(ROOT)
    for commit in stack.commits:
        file = stack.tree(commit.number).get("build_variables.edit.bzl")
        blocks = Edit.parse("", file.read_text(encoding="utf-8")).blocks if file else ()
        lines = [line for block in blocks for line in block.lines]
        listed = {entry for line in lines for entry in re.findall(r'"([^"]+)"', line)}
        # Upstream compiles a file that an edit changes anyway.
        whole = {path for path, is_whole in sources(commit.number) if is_whole}
        assert all(f"{path.rpartition('/')[0]}/" in GLOBBED for path in whole), commit
        assert listed == {p for p in whole if not p.startswith((GLOBBED[0], CUDA_KERNELS))}, commit
    assert len(listed) >= 2


def test_the_graft_compiles_every_source(tmp_path, unpacked):
    extra = {"torch/share/cmake/Torch/TorchConfig.cmake": "_GLIBCXX_USE_CXX11_ABI=1"}
    extra["torch/share/cmake/Caffe2/public/utils.cmake"] = "CXX_STANDARD 20"
    extra["torch/lib/libtorch.so"] = "\0libtorch.so\0$ORIGIN/../../nvidia/cu13/lib:$ORIGIN\0"
    write_files(unpacked, extra)
    graft = Graft(Stack(ROOT), Base(unpacked))
    graft.nvcc = cuda.Nvcc("/cuda/bin/nvcc", "13.0")
    config = graft.configuration()
    for path, _ in sources():
        assert f"{ROOT / path}" in config, path
    assert 'set(GRAFT_RPATH "$ORIGIN/../../nvidia/cu13/lib" "$ORIGIN")' in config
