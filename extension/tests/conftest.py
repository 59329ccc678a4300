"""Lets the tests of the native operators, in test/, test the package's: in this process alone."""

import os
import sys
from functools import partial
from pathlib import Path

import torch
from torch_attn import fused, is_native

sys.path.insert(0, str(Path(__file__).parents[2] / "test"))
os.environ.setdefault("ATTN_FEWER_EXAMPLES", "1")  # The kernels are the same.


class Differentiable:
    """An operator of the library with the derivatives that fused.py gives it, as ATen's have."""

    def __init__(self, name, function):
        self.packet = getattr(torch.ops.torch_attn, name)
        self.function = function

    def __call__(self, *args):
        return self.function(*args)

    def __getattr__(self, name):
        return getattr(self.packet, name)

    def __eq__(self, other):
        return other is self.packet

    def __hash__(self):
        return hash(self.packet)


def triple_backward(grad, q, k, v, u_q, u_k, u_v, w_grad, w_q, w_k, w_v, is_causal, scale, mask):
    at = fused._Gradients(q, k, v, is_causal, scale)
    return at.third(grad, (u_q, u_k, u_v), w_grad, (w_q, w_k, w_v), mask)


if is_native:  # Their own operators are there, and have run these tests.
    collect_ignore = ["test_as_native.py"]
else:
    torch.attn, torch.attn_output = fused.attn, fused.attn_output
    torch.return_types.attn = fused.Result
    for name in ("attn", "_attn_backward", "attn_output", "_attn_output_backward"):
        setattr(torch.ops.aten, name, getattr(torch.ops.torch_attn, name))
    for name, function in (
        ("_attn_output_jvp", partial(fused._call, fused._AttnOutputJvp, True)),
        (
            "_attn_output_double_backward",
            partial(fused._call, fused._AttnOutputDoubleBackward, True),
        ),
        ("_attn_output_triple_backward", triple_backward),
    ):
        setattr(torch.ops.aten, name, Differentiable(name, function))
