"""Lets the tests of the native operators, in test/, test the package's: in this process alone."""

import sys
from pathlib import Path

import torch
from torch_attn import fused

sys.path.insert(0, str(Path(__file__).parents[2] / "test"))
torch.attn, torch.attn_output = fused.attn, fused.attn_output
torch.return_types.attn = fused.Result
for name in ("attn", "_attn_backward", "attn_output", "_attn_output_backward"):
    setattr(torch.ops.aten, name, getattr(torch.ops.torch_attn, name))
