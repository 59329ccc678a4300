"""A kernel on the stable ABI, which has no autograd: the rest is registered in Python."""

import formulas
import torch
from compiling import built

library = built("stable_abi.cpp", "-DTORCH_TARGET_VERSION=0x020a000000000000")
torch.ops.load_library(library)


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])


def backward(ctx, grad_output, grad_attn):
    return formulas.backward(grad_output, grad_attn, *ctx.saved_tensors)


attn = operator = torch.ops.capabilities.attn.default
torch.library.register_fake("capabilities::attn", formulas.shapes)
torch.library.register_autograd(
    "capabilities::attn", backward, setup_context=setup_context
)
torch.library.register_vmap("capabilities::attn", formulas.vmap_rule(attn))
