"""An operator by define and impl, without a derivative; a Function outside calls it.

The Function has no `jvp`, with which Dynamo would not compile it.
"""

import formulas
import torch
from torch.autograd import Function

torch.library.define(
    "capabilities::attn", "(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)"
)
operator = torch.ops.capabilities.attn.default
torch.library.impl("capabilities::attn", "CPU", formulas.forward)
torch.library.register_fake("capabilities::attn", formulas.shapes)
torch.library.register_vmap("capabilities::attn", formulas.vmap_rule(operator))


class Attn(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v):
        return operator(q, k, v)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx, grad_output, grad_attn):
        return formulas.backward(grad_output, grad_attn, *ctx.saved_tensors)


attn = Attn.apply
