"""Lesson 1: arctan by NumPy, as a Function that can be differentiated twice."""

import numpy as np
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Arctan(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.arctan(x.numpy()))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (1 + x * x)


class NumpyInBackward(Arctan):
    """Right once, and without a graph for the second time."""

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.from_numpy(1 / (1 + x.numpy() ** 2))


class ForgetsTheChain(Arctan):
    """The derivative alone, not times the gradient that comes in."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 1 / (1 + x * x)


class Detached:
    """No Function at all."""

    @staticmethod
    def apply(x):
        return torch.from_numpy(np.arctan(x.detach().numpy()))


solution = Arctan
MISTAKES = {
    NumpyInBackward: "The gradient has no graph",
    ForgetsTheChain: "The gradient of x is wrong",
    Detached: "The result does not require grad",
}
