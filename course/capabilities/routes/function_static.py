"""A Function in the old style: `forward` gets the ctx, and saves what `backward` needs."""

import formulas
from torch.autograd import Function


class Attn(Function):
    @staticmethod
    def forward(ctx, q, k, v):
        output, attn = formulas.forward(q, k, v)
        ctx.save_for_backward(q, k, v, attn)
        return output, attn

    @staticmethod
    def backward(ctx, grad_output, grad_attn):
        return formulas.backward(grad_output, grad_attn, *ctx.saved_tensors)


attn = Attn.apply
