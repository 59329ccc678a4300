"""Lesson 9: y = x s + t, with batch dimensions, and only the gradients that are wanted."""

from torch.autograd import Function


class Scale(Function):
    @staticmethod
    def forward(ctx, input, scale, shift):
        ctx.save_for_backward(input, scale)
        return input * scale if shift is None else input * scale + shift

    @staticmethod
    def backward(ctx, grad):
        input, scale = ctx.saved_tensors
        wants_input, wants_scale, wants_shift = ctx.needs_input_grad
        return (
            grad * scale if wants_input else None,
            (grad * input).sum_to_size(scale.shape) if wants_scale else None,
            grad.sum_to_size(scale.shape) if wants_shift else None,
        )


class FirstDimensionOnly(Scale):
    """Right for a matrix, as in every example."""

    @staticmethod
    def backward(ctx, grad):
        input, scale = ctx.saved_tensors
        if grad.dim() == 1:
            return grad * scale, grad * input, grad
        return grad * scale, (grad * input).sum(0), grad.sum(0)


class Everything(Scale):
    """Also what nobody wants."""

    @staticmethod
    def backward(ctx, grad):
        input, scale = ctx.saved_tensors
        to = scale.shape
        return grad * scale, (grad * input).sum_to_size(to), grad.sum_to_size(to)


class SavesTheShift(Scale):
    """What is saved may be None; what is asked of it then is not there."""

    @staticmethod
    def forward(ctx, input, scale, shift):
        ctx.save_for_backward(input, scale, shift)
        return input * scale if shift is None else input * scale + shift

    @staticmethod
    def backward(ctx, grad):
        input, scale, shift = ctx.saved_tensors
        total = sum(grad.reshape(-1, *scale.shape), 0 * shift)
        return grad * scale, (grad * input).sum_to_size(scale.shape), total


solution = Scale
MISTAKES = {
    FirstDimensionOnly: "The gradient of scale has the shape",
    Everything: "The gradient of shift, which is no tensor, has to be None.",
    SavesTheShift: "no shift: backward: TypeError: unsupported operand",
}
