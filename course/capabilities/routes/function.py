"""A Function in today's style: `setup_context`, `jvp`, and a vmap rule derived from both."""

import formulas
from torch.autograd import Function


class Attn(Function):
    generate_vmap_rule = True
    forward = staticmethod(formulas.forward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs, output[1])

    @staticmethod
    def backward(ctx, grad_output, grad_attn):
        return formulas.backward(grad_output, grad_attn, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx, *tangents):
        return formulas.tangents(*tangents, *ctx.saved_tensors)


attn = Attn.apply
