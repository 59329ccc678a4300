"""Attention whose scores pass through tanh instead of softmax, fused on CPUs and by Triton on GPUs.

    attn(q, k, v) -> (output, attn)      attn = tanh(q kᵀ),  output = attn v
    attn_output(q, k, v, *, is_causal=False, scale=1.0) -> output

A torch that has both as operators of its own keeps them: then `is_native` is True, and these are
they. `backends()` says by what each device computes them; so does `python -m torch_attn`.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

__version__: str = version("torch-attn")
is_native: bool = hasattr(torch, "attn") and hasattr(torch, "attn_output")

if TYPE_CHECKING:
    from torch_attn.fused import attn, attn_output
elif is_native:
    attn, attn_output = torch.attn, torch.attn_output
elif tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
    raise ImportError(f"torch_attn needs torch 2.10 or newer, and this is {torch.__version__}")
else:
    from torch_attn.fused import attn, attn_output


def backends() -> dict[str, str]:
    """Returns for each type of device by what the operators compute there, and why."""
    if is_native:
        native = f"the operators that torch {torch.__version__} has itself"
        return {"cpu": native, "others": native}
    from torch_attn.fused import capability, triton

    found = {"cpu": f"fused kernels, compiled for {capability}"}
    for key, (kernels, why) in triton.items():
        composed = f"composed of PyTorch's operators: {why}"
        found[key.lower()] = f"fused kernels, by {why}" if kernels else composed
    return found | {"others": "composed of PyTorch's operators: no kernel is for them"}


__all__ = ["attn", "attn_output", "backends", "is_native"]
