"""Makes small PyTorches and small stacks, on which the tests try the machinery."""

import contextlib
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from wheel.wheelfile import WheelFile

with contextlib.suppress(ImportError):  # a borrowed environment may lack setuptools
    # torch imports setuptools, which fails once the standard library's distutils is imported.
    import setuptools  # noqa: F401

PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
TAG = f"{PYTHON}-{PYTHON}"
PLATFORM = f"manylinux_2_28_{platform.machine()}"
REVIEWER = ("-c", "user.name=Reviewer", "-c", "user.email=reviewer@example.invalid")

YAML = """\
- func: add(Tensor self) -> Tensor

- func: baddbmm(Tensor self) -> Tensor

- func: bmm(Tensor self) -> Tensor
"""

WHEEL_FILES = {
    "torch/version.py": "__version__ = '2.13.0+cpu'\n",
    "torch/overrides.py": "table = {\n    torch.abs: 1,\n    torch.bmm: 2,\n}\n",
    "torchgen/packaged/ATen/native/native_functions.yaml": YAML,
    "torch/_C.so": "\x7fELF",
    "torch-2.13.0+cpu.dist-info/METADATA": (
        "Metadata-Version: 2.4\nName: torch\nVersion: 2.13.0+cpu\n"
        "Requires-Python: >=3.10\n\nTensors — fast\n"
    ),
    "torch-2.13.0+cpu.dist-info/WHEEL": (
        "Wheel-Version: 1.0\nGenerator: setuptools\nRoot-Is-Purelib: false\n"
        f"Tag: {TAG}-{PLATFORM}\n"
    ),
}


def write_files(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def source(tmp_path):
    """Makes a source tree of PyTorch 2.6.0 with the few files that these tests read."""
    files = {
        "version.txt": "2.6.0a0\n",
        "aten/src/ATen/native/native_functions.yaml": YAML,
        "torch/version.py": "__version__ = '2.6.0'\n",
        "torch/overrides.py": WHEEL_FILES["torch/overrides.py"],
        "test/test_ops.py": "pass\n",
    }
    return write_files(tmp_path / "pytorch", files)


def git(tree, *args):
    command = ["git", "-C", str(tree), *REVIEWER, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(source):
    """Makes the source tree a checkout: a branch with one commit."""
    git(source, "init", "--quiet", "--initial-branch=main")
    git(source, "add", "--all")
    git(source, "commit", "--quiet", "--message=upstream")
    return source


@pytest.fixture
def wheel(tmp_path):
    """Makes a wheel of torch 2.13.0+cpu with the few files that these tests read."""
    path = tmp_path / f"torch-2.13.0+cpu-{TAG}-{PLATFORM}.whl"
    with WheelFile(path, "w") as out:
        for name, text in WHEEL_FILES.items():
            out.writestr(name, text)
    return path


def record(*paths: str) -> dict[str, str]:
    return {"torch-2.13.0+cpu.dist-info/RECORD": "".join(f"{path},,\n" for path in paths)}


@pytest.fixture
def unpacked(tmp_path):
    return write_files(tmp_path / "unpacked", {**WHEEL_FILES, **record(*WHEEL_FILES)})


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs the same wheel on the path, beside other packages, as pip would leave it."""
    added = ("torch/__pycache__/version.cpython-311.pyc", "torch-2.13.0+cpu.dist-info/INSTALLER")
    lists = record(*WHEEL_FILES, *added, "../bin/torchrun", "torch/removed.py")
    other = {"numpy/x.py": "", "torch_geometric-2.6.dist-info/METADATA": "Name: torch_geometric"}
    files = {**WHEEL_FILES, **dict.fromkeys(added, ""), **lists, **other, "../bin/torchrun": ""}
    site = write_files(tmp_path / "site-packages", files)
    (site / "torch/_C.so").chmod(0o700)
    monkeypatch.setattr("sys.path", [str(tmp_path / "nothing"), str(site)])
    return site


def message(
    files: list[str],
    removes: list[str] = (),
    title: str = "Do a thing",
    plan: str = "",
) -> str:
    listed = "".join(f"  - {f}\n" for f in files)
    gone = "".join(f"  - {f}\n" for f in removes)
    front = (f"files:\n{listed}" if files else "") + (f"removes:\n{gone}" if gone else "")
    block = f"\n```\n{plan}\n```\n" if plan else ""
    text = f"## Why\n\nbecause\n\n## Review order\n\nfirst\n\n## Test plan\n\nrun it\n{block}"
    return f"---\n{front}---\n\n# {title}\n\n{text}"


@pytest.fixture
def repo(tmp_path):
    """Makes a repository with a stack of two commits; the second changes a file of the first."""
    edit = "# @@ before: - func: baddbmm(\n- func: attn{} -> Tensor\n"
    native = "aten/src/ATen/native/native_functions.edit.yaml"
    files = {
        f"stack/01-implicit/{native}": edit.format("(Tensor q)"),
        "stack/01-implicit/commit.md": message(["aten/src/ATen/native/Attn.cpp", native]),
        "stack/02-explicit/commit.md": message([native, "torch/overrides.edit.py"]),
        native: edit.format("(Tensor q, Tensor k)"),
        "aten/src/ATen/native/Attn.cpp": "int attn;\n",
        "torch/overrides.edit.py": "# @@ after: torch.abs:\n    torch.attn: 3,\n",
    }
    return write_files(tmp_path / "repo", files)
