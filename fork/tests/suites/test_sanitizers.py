"""Tests of what the sanitizers run with."""

import subprocess
from pathlib import Path

import pytest

from fork.errors import ForkError
from fork.suites import sanitizers
from fork.suites.files import without


def script(tmp_path, text):
    file = tmp_path / "tool"
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
    return file


def test_the_library_replaces_the_installed_one(tmp_path):
    """The loader takes it for what a library beside the installed one needs."""
    installed, ours = tmp_path / "torch" / "lib", tmp_path / "sanitized"
    make = ["g++", "-x", "c++", "-", "-o"]
    for folder, status in ((installed, 3), (ours, 4)):
        folder.mkdir(parents=True)
        library = [folder / "libtorch.so", "-shared", "-fPIC", "-Wl,-soname,libtorch.so"]
        source = f"int answer() {{ return {status}; }}"
        subprocess.run([*make, *library], input=source, text=True, check=True)
    program = installed / "program"
    needs = [program, f"-L{installed}", "-ltorch", "-Wl,--enable-new-dtags,-rpath,$ORIGIN"]
    source = "int answer(); int main() { return answer(); }"
    subprocess.run([*make, *needs], input=source, text=True, check=True)
    assert subprocess.run(program).returncode == 3
    env = sanitizers.environment(Path("libasan.so.8"), ours / "libtorch.so", installed)
    assert env["LD_PRELOAD"] == "libasan.so.8 libstdc++.so.6"
    assert "detect_leaks=0" in env["ASAN_OPTIONS"] and "halt_on_error=1" in env["UBSAN_OPTIONS"]
    del env["LD_PRELOAD"]  # this program is not compiled with the sanitizer
    assert subprocess.run(program, env=env).returncode == 4


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
    kept = without(names, sanitizers.LEFT_OUT)
    assert list(kept) == ["test_attn.py", "test_attn_new.py"]
