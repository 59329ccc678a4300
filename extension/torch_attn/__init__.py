"""Attention whose scores pass through tanh instead of softmax, with fused kernels for the CPU.

    attn(q, k, v) -> (output, attn)      attn = tanh(q kᵀ),  output = attn v
    attn_output(q, k, v, *, is_causal=False, scale=1.0) -> output

A torch that has both as operators of its own keeps them: then `is_native` is True, and these are
they.
"""

import torch

is_native: bool = hasattr(torch, "attn") and hasattr(torch, "attn_output")

if is_native:
    attn, attn_output = torch.attn, torch.attn_output
elif tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
    raise ImportError(f"torch_attn needs torch 2.10 or newer, and this is {torch.__version__}")
else:
    from torch_attn.fused import attn, attn_output

__all__ = ["attn", "attn_output", "is_native"]
