"""Lesson 4: log(sigmoid(x)), whose derivative is sigmoid(-x)."""

import torch
from torch.autograd import Function


class LogSigmoid(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(max=0) - torch.log1p(torch.exp(-x.abs()))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(-x)


class Overflows(LogSigmoid):
    """The definition as it stands."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return -torch.log(1 + torch.exp(-x))


class Cancels(LogSigmoid):
    """1 - sigmoid(x): nothing is left of it where x is large."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 - torch.sigmoid(x))


class OverflowsInBackward(LogSigmoid):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.exp(-x) / (1 + torch.exp(-x))


solution = LogSigmoid
MISTAKES = {
    Overflows: "Not finite at [-1000.0]",
    Cancels: "The gradient of x is wrong.",
    OverflowsInBackward: "The gradient is not finite at [-1000.0]",
}
