"""A linear layer with kernels of its own: a functional, a Module, and the operators below them."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

LIBRARY = next(Path(__file__).parent.glob("_C*.so"))
torch.ops.load_library(LIBRARY)

from linear_extension import autograd as _  # noqa: E402, F401  # of the operators just loaded

ops = torch.ops.linear_extension


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias, by the extension's operator.

    Args:
        input (Tensor): (*, in_features), float or double.
        weight (Tensor): (out_features, in_features), of the dtype of `input`.
        bias (Tensor, optional): (out_features), of the dtype of `input`.

    Returns:
        Tensor: (*, out_features).

    Raises:
        RuntimeError: if sizes, dtypes or devices do not fit.
    """
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    return ops.linear(rows, weight, bias).reshape(*input.shape[:-1], weight.shape[0])


def linear_cpp_function(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The same for a matrix `input`, differentiated by a Function in C++."""
    return ops.linear_cpp_function(input, weight, bias)


class Linear(nn.Module):
    """:func:`linear` with a weight (out_features, in_features) and a bias (out_features).

    Both are drawn evenly from ±1 / sqrt(in_features), as those of :class:`torch.nn.Linear` are.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **about):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **about))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, **about))
        else:
            self.register_parameter("bias", None)
        bound = 1 / math.sqrt(in_features) if in_features else 0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"
