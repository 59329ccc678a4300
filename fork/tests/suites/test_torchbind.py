"""Tests of the library that upstream's TestFX loads, with a source tree and a base of few lines."""

import ctypes
import subprocess

from fork.graft.base import Base
from fork.suites import torchbind
from fork.tests.conftest import write_files

FILES = {
    "base/torch/version.py": "__version__ = '2.6.0'\n",
    "base/torch/share/cmake/Torch/TorchConfig.cmake": "-D_GLIBCXX_USE_CXX11_ABI=0",
    "base/torch/share/cmake/Caffe2/public/utils.cmake": "CXX_STANDARD 17",
    "base/torch/include/torch/custom_class.h": "constexpr int where = 1;",
    # The tree's headers must not be used: the wheel's libraries were compiled with the wheel's.
    "tree/torch/custom_class.h": "constexpr int where = 2;",
    f"tree/{torchbind.SOURCE}.h": "#include <torch/custom_class.h>",
    f"tree/{torchbind.SOURCE}.cpp": f"""
#include <{torchbind.SOURCE}.h>
#include <version>
extern "C" int header() {{ return where; }}
extern "C" int abi() {{ return _GLIBCXX_USE_CXX11_ABI; }}
extern "C" long standard() {{ return __cplusplus; }}
""",
}


def test_it_is_compiled_once_as_the_base_was(tmp_path, monkeypatch):
    write_files(tmp_path, FILES)
    libraries = tmp_path / "base/torch/lib"
    libraries.mkdir()
    for name in ("torch", "torch_cpu", "c10"):
        library = libraries / f"lib{name}.so"
        subprocess.run(["g++", "-shared", "-xc++", "/dev/null", "-o", library], check=True)
    folders = [tmp_path / v / "lib/python3.11/site-packages/torch/lib" for v in ("a", "b")]
    for venv, folder in zip("ab", folders, strict=True):
        folder.mkdir(parents=True)
        place = Base(tmp_path / "base"), tmp_path / "tree", tmp_path / venv, tmp_path / "made"
        torchbind.install(*place)
        found = ctypes.CDLL(folder / torchbind.NAME)
        found.standard.restype = ctypes.c_long
        assert (found.header(), found.abi(), found.standard()) == (1, 0, 201703)
        monkeypatch.setattr(torchbind, "run", None)  # a second compilation would fail
