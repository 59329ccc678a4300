"""Which Triton a graft takes, where PyTorch itself has no place for kernels in Triton yet."""

import importlib.util
import sys

import pytest
import torch

from fork import paths

FILE = paths.ROOT / "fork/graft/torch/_graft_triton.py"
INSTALLED = {
    "of a build for CUDA": ("triton", "3.6.0", True),
    "of a build for ROCm": ("triton_rocm", "3.7.0+git1", True),
    "of an earlier build for ROCm": ("pytorch_triton_rocm", "3.6.0", True),
    "too old": ("triton", "3.5.1", False),
    "of something else": ("triton_viz", "3.6.0", False),
}


@pytest.fixture
def graft_triton(monkeypatch):
    """The module, of which nothing has been registered."""
    monkeypatch.setenv("TORCH_DISABLE_NATIVE_JIT", "1")
    spec = importlib.util.spec_from_file_location("_graft_triton", FILE)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert not module.is_available()
    monkeypatch.delenv("TORCH_DISABLE_NATIVE_JIT")
    return module


@pytest.mark.parametrize("what", INSTALLED)
def test_which_triton_is_taken(graft_triton, tmp_path, monkeypatch, what):
    name, version, taken = INSTALLED[what]
    folder = tmp_path / f"{name}-{version}.dist-info"
    folder.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert graft_triton.is_available() == taken
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert not graft_triton.is_available()
