"""Lesson 13: right once, wrong twice."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))
from attn_function import Attn  # noqa: E402


class Frozen(Attn):
    """The slope of tanh is computed without a graph, the rest with one."""

    @staticmethod
    def backward(ctx, grad_output, grad_attn):
        q, k, v, attn = ctx.saved_tensors
        with torch.no_grad():
            slope = 1 - attn * attn
        grad = torch.zeros_like(attn) if grad_attn is None else grad_attn
        grad = grad if grad_output is None else grad + grad_output @ v.T
        grad_v = None if grad_output is None else attn.T @ grad_output
        return (grad * slope) @ k, (grad * slope).T @ q, grad_v


class NothingBroken(Attn):
    pass


class TooMuchBroken(Frozen):
    """Twice the gradient of q."""

    @staticmethod
    def backward(ctx, grad_output, grad_attn):
        grad_q, *others = Frozen.backward(ctx, grad_output, grad_attn)
        return 2 * grad_q, *others


class AlreadyTheValues(Frozen):
    @staticmethod
    def forward(q, k, v):
        return tuple(2 * y for y in Attn.forward(q, k, v))


solution = Frozen
MISTAKES = {
    NothingBroken: "gradgradcheck is content",
    TooMuchBroken: "gradcheck of the first result fails, which is too easy",
    AlreadyTheValues: "Its values are wrong",
}
