"""Tests that names which a release lacks are found before a graft of it is imported."""

import pytest

from fork.overlay import Upstream
from fork.overlay.imports import missing_imports
from fork.tests.conftest import write_files

UTILS = """\
from torch.types import Number as N
import torch.fx.graph

if torch:
    def shard(): ...
class Spec: ...
first, [*rest] = range(3)
for i in rest:
    x: int = i
"""
PYTORCH = {
    "torch/utils.py": UTILS,
    "torch/types.py": "Number = int\n",
    "torch/fx/__init__.py": "from torch.types import *\n",
    "torch/edited.py": "x = 1\n",
    "torch/lazy.py": "def __getattr__(name): ...\n",
}


@pytest.mark.parametrize(
    "imports, missing",
    [
        ("from torch.utils import N, Spec, first, i, rest, shard, torch, x", []),
        ("from torch.utils import Number, gone", ["Number in torch.utils", "gone in torch.utils"]),
        ("def f():\n    from torch.gone import x as y", ["x in torch.gone"]),
        ("from torch import types, gone", ["gone in torch"]),
        ("from torch.fx import whatever", []),
        ("from torch.types import *\nfrom torch.lazy import y", []),
        ("try:\n    from torch.gone import x\nexcept ImportError:\n    pass", []),
        ("from torch._C import x\nfrom torch._C._dynamo import y\nfrom numpy import z", []),
        (
            "from torch.attn_ring import ring\nfrom torch.attn_ring import z",
            ["z in torch.attn_ring"],
        ),
    ],
)
@pytest.mark.parametrize("path", ["torch/attn_ops.py", "test/test_attn.py", "torch/edited.edit.py"])
def test_imports(source, tmp_path, imports, missing, path):
    write_files(source, PYTORCH)
    text = f"# @@ after: x\n{imports}\n" if ".edit." in path else imports
    files = {path: text, "torch/attn_ring.py": "ring = 1\n"}
    overlay = write_files(tmp_path / "overlay", files)
    upstream = Upstream(source)
    found = missing_imports({name: overlay / name for name in files}, upstream)
    assert found == [f"{path}: {upstream} has no {what}" for what in missing]
