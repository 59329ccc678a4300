"""Lesson 8: sin and cos, and gradients that may be None."""

from torch.autograd import Function


class SinCos(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, grad_sin, grad_cos):
        (x,) = ctx.saved_tensors
        parts = []
        if grad_sin is not None:
            parts.append(grad_sin * x.cos())
        if grad_cos is not None:
            parts.append(-grad_cos * x.sin())
        return sum(parts[1:], parts[0]) if parts else None


class Materialized(SinCos):
    """The default: zeros are made, and multiplied by."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x.cos()


class TakesTensors(SinCos):
    """None is no tensor."""

    @staticmethod
    def backward(ctx, grad_sin, grad_cos):
        (x,) = ctx.saved_tensors
        return grad_sin * x.cos() - grad_cos * x.sin()


class EitherOr(SinCos):
    """One of the two, where both came."""

    @staticmethod
    def backward(ctx, grad_sin, grad_cos):
        (x,) = ctx.saved_tensors
        if grad_sin is not None:
            return grad_sin * x.cos()
        return None if grad_cos is None else -grad_cos * x.sin()


solution = SinCos
MISTAKES = {
    Materialized: "only sin is used: Zeros were made for the other.",
    TakesTensors: "only sin is used: TypeError: unsupported operand",
    EitherOr: "both are used: The gradient of x is wrong.",
}
