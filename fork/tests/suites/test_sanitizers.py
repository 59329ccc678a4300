"""Tests of what the sanitizers run with."""

import pytest

from fork.errors import ForkError
from fork.suites import sanitizers
from fork.tests.conftest import write_files

SITE = {
    "torch/__init__.py": "",
    "torch/lib/libtorch.so": "installed",
    "torch/lib/libc10.so": "c10",
    "numpy/__init__.py": "",
}


def script(tmp_path, text):
    file = tmp_path / "tool"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def test_the_library_replaces_the_installed_one(tmp_path):
    site = write_files(tmp_path / "site", SITE)
    (tmp_path / "ours.so").write_text("ours")
    for _ in range(2):
        sanitizers.link_site(site, tmp_path / "ours.so", tmp_path / "links")
    links = tmp_path / "links"
    found = {p: (links / p).read_text() for p in SITE}
    assert found == SITE | {"torch/lib/libtorch.so": "ours"}
    assert {p: (site / p).read_text() for p in SITE} == SITE
    # The loader looks beside the library that it loads, so these are folders, not links.
    assert not any((links / place).is_symlink() for place in ("torch", "torch/lib"))


def test_environment(tmp_path):
    env = sanitizers.environment(tmp_path / "libasan.so.8", tmp_path)
    assert env["LD_PRELOAD"] == f"{tmp_path}/libasan.so.8 libstdc++.so.6"
    assert env["PYTHONPATH"] == str(tmp_path)
    assert "detect_leaks=0" in env["ASAN_OPTIONS"] and "halt_on_error=1" in env["UBSAN_OPTIONS"]


@pytest.mark.parametrize(
    ("best", "found"),
    [
        ("AVX512", ("default", "avx2", "avx512")),
        ("AVX2", ("default", "avx2")),
        ("NO AVX", ("default",)),
        ("SVE256", ("default",)),
    ],
)
def test_capabilities(best, found, tmp_path):
    python = script(tmp_path, f"echo /x/libtorch.so; echo {best}")
    library, log = tmp_path / "libtorch.so", tmp_path / "log"
    with pytest.raises(ForkError, match=f"torch runs with /x/libtorch.so, not with {library}"):
        sanitizers.capabilities(python, library, log)
    python = script(tmp_path, f"echo {library}; echo {best}")
    assert sanitizers.capabilities(python, library, log) == found


def test_a_compiler_without_sanitizers(tmp_path, monkeypatch):
    # GCC prints the bare name of a file that it does not have.
    monkeypatch.setenv("CXX", f"{script(tmp_path, 'echo libubsan.so')} -m64")
    with pytest.raises(ForkError, match="has no libubsan.so: install"):
        sanitizers.runtime()


def test_a_new_test_file_is_run():
    names = ["attn_function.py", "test_attn.py", "test_attn_compile.py", "test_attn_new.py"]
    assert list(sanitizers.chosen(names)) == ["test_attn.py", "test_attn_new.py"]
