"""Solving Poisson's equation by a neural field, which is trained on its second derivatives.

``-Δu = f`` in the square (0, 1)², and ``u = 0`` at its border. The field is ``u(x) = b(x) N(x)``,
where ``b`` is 0 at the border and ``N(x) = tanh([x 1] W1ᵀ) W2`` a layer of tanh. That is
``torch.attn_output([x 1], W1, W2)``, which never has the activations of all points in memory,
nor have its first three derivatives: a step of training takes the third. Adam first, then
L-BFGS::

    python functorch/examples/attn/field.py
    python functorch/examples/attn/field.py --composed   # the same without attn_output
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import nn, Tensor
from torch.func import grad, jvp


def composed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What ``torch.attn_output`` computes, with the activations in memory."""
    return torch.tanh(q @ k.mT) @ v


class Field(nn.Module):
    """A function of points in the square that is 0 at its border.

    Args:
        hidden: how many tanh there are.
        layer: ``torch.attn_output``, or the same composed.
    """

    def __init__(
        self, hidden: int = 64, layer: Callable[..., Tensor] = torch.attn_output
    ) -> None:
        super().__init__()
        self.layer = layer
        factory = {"dtype": torch.double}
        # The last column is a bias, for the 1 that each point gets.
        self.first = nn.Parameter(3 * torch.randn(hidden, 3, **factory))
        self.second = nn.Parameter(torch.randn(hidden, 1, **factory) / hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Returns u (points) at x (points, 2)."""
        ones = torch.ones_like(x[:, :1])
        network = self.layer(torch.cat([x, ones], -1), self.first, self.second)
        return 16 * (x * (1 - x)).prod(-1) * network[:, 0]


def laplacian(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The sum of u's second derivatives by each coordinate, at x (points, coordinates)."""
    gradient = grad(lambda x: u(x).sum())
    directions = torch.eye(x.shape[-1], dtype=x.dtype)
    return sum(
        jvp(gradient, (x,), (direction.expand_as(x),))[1][:, i]
        for i, direction in enumerate(directions)
    )


def solution(x: Tensor) -> Tensor:
    """The u that is to be found."""
    return torch.sin(math.pi * x[:, 0]) * torch.sin(2 * math.pi * x[:, 1])


def source(x: Tensor) -> Tensor:
    """f = -Δu of it"""
    return 5 * math.pi**2 * solution(x)


def loss(field: nn.Module, x: Tensor) -> Tensor:
    """The mean square of Δu + f at x; 1 for u = 0."""
    f = source(x)
    return (laplacian(field, x) + f).square().mean() / f.square().mean()


def train(field: nn.Module, points: int, steps: int, iterations: int) -> list[float]:
    """Trains the field; returns the loss of each step of Adam, and of each evaluation after it."""
    losses = []
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        found = loss(field, x)
        found.backward()
        losses.append(found.item())
        return found

    for _ in range(steps):
        x = torch.rand(points, 2, dtype=torch.double)
        optimizer.step(closure)
    optimizer = torch.optim.LBFGS(
        field.parameters(),
        max_iter=iterations,
        history_size=50,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(closure)
    return losses


def error(field: nn.Module) -> float:
    """The largest difference to the solution, which is at most 1, on a grid."""
    side = torch.linspace(0, 1, 65, dtype=torch.double)
    x = torch.cartesian_prod(side, side)
    with torch.no_grad():
        return (field(x) - solution(x)).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=500, help="of Adam")
    parser.add_argument("--iterations", type=int, default=500, help="of L-BFGS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--composed", action="store_true", help="without attn_output")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    layer = composed if options.composed else torch.attn_output
    field = Field(options.hidden, layer)
    start = time.perf_counter()
    losses = train(field, options.points, options.steps, options.iterations)
    each = (time.perf_counter() - start) / len(losses)
    print(
        f"loss {losses[0]:.2g}, at the end {losses[-1]:.2g}; error {error(field):.2g}"
    )
    print(f"{1000 * each:.1f} ms for each of {len(losses)} gradients")


if __name__ == "__main__":
    main()
