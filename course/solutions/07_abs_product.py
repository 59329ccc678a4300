"""Lesson 7: |u| v. dL = Re(conj(g) v d|u|) + Re(conj(g) |u| dv), and d|u| = Re(conj(sgn u) du)."""

from torch.autograd import Function


def gradients(grad, u, v):
    along = grad * v.conj()
    along = along.real if along.is_complex() else along
    return along * u.sgn(), grad * u.abs()


class AbsTimes(Function):
    @staticmethod
    def forward(ctx, u, v):
        ctx.save_for_backward(u, v)
        return u.abs() * v

    @staticmethod
    def backward(ctx, grad):
        u, v = ctx.saved_tensors
        grad_u, grad_v = gradients(grad, u, v)
        return grad_u.sum_to_size(u.shape), grad_v.sum_to_size(v.shape)


class NoReduction(AbsTimes):
    @staticmethod
    def backward(ctx, grad):
        return gradients(grad, *ctx.saved_tensors)


class AsIfReal(AbsTimes):
    """The real formula, with sgn for sign."""

    @staticmethod
    def backward(ctx, grad):
        u, v = ctx.saved_tensors
        grad_u, grad_v = grad * v * u.sgn(), grad * u.abs()
        return grad_u.sum_to_size(u.shape), grad_v.sum_to_size(v.shape)


class Detaches(AbsTimes):
    """Right once: what is detached has no second derivative."""

    @staticmethod
    def backward(ctx, grad):
        u, v = (t.detach() for t in ctx.saved_tensors)
        grad_u, grad_v = gradients(grad, u, v)
        return grad_u.sum_to_size(u.shape), grad_v.sum_to_size(v.shape)


solution = AbsTimes
MISTAKES = {
    NoReduction: "The gradient of u has the shape",
    AsIfReal: "The gradient of u is wrong.",
    Detaches: "gradgradcheck fails",
}
