"""An operator by torch.library.custom_op, with all four that can be registered with it."""

import formulas
import torch
from torch import Tensor


@torch.library.custom_op("capabilities::attn", mutates_args=())
def attn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return formulas.forward(q, k, v)


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])


def backward(ctx, grad_output, grad_attn):
    return formulas.backward(grad_output, grad_attn, *ctx.saved_tensors)


attn.register_fake(formulas.shapes)
attn.register_autograd(backward, setup_context=setup_context)
attn.register_vmap(formulas.vmap_rule(attn))

operator = torch.ops.capabilities.attn.default
