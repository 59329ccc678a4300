"""An operator whose kernel for the dispatch key Autograd is a Function that calls it."""

import formulas
import torch
from torch.autograd import Function

defined = torch.library.Library("capabilities", "DEF")
defined.define("attn(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
operator = torch.ops.capabilities.attn.default


class Attn(Function):
    @staticmethod
    def forward(ctx, q, k, v):
        with torch._C._AutoDispatchBelowAutograd():
            output, attn = operator(q, k, v)
        ctx.save_for_backward(q, k, v, attn)
        return output, attn

    @staticmethod
    def backward(ctx, grad_output, grad_attn):
        return formulas.backward(grad_output, grad_attn, *ctx.saved_tensors)


defined.impl("attn", formulas.forward, "CPU")
defined.impl("attn", Attn.apply, "Autograd")
torch.library.register_fake("capabilities::attn", formulas.shapes)
torch.library.register_vmap("capabilities::attn", formulas.vmap_rule(operator))

attn = operator
