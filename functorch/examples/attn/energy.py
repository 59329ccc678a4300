"""Training an energy by its gradient, for sets of any number of points.

Denoising score matching: points ``x`` are moved by noise, to ``z = x + s e``, and a network learns
an energy ``E(z)`` of the set whose gradient points back, ``s dE/dz = e``. So each step of training
differentiates a gradient: a double backward, as it does where forces, penalties or flows are
learnt. Here the points lie on a circle whose centre is another in each set: to know it, a point
has to look at the others, by ``torch.attn_output``. Its double backward, composed, would have a
dozen matrices of points x points. So a set of 16,384 points takes less than 1 GiB here, where the
composed one (``--composed``) does not fit in 4 GiB::

    python functorch/examples/attn/energy.py --sets 16 --points 256 --steps 300
    python functorch/examples/attn/energy.py --sets 1 --points 16384 --steps 30
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn, Tensor


NOISE = 0.3


def composed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What ``torch.attn_output`` computes, with the matrix of points x points."""
    return torch.tanh(q @ k.mT) @ v


class Energy(nn.Module):
    """The energy of sets of points.

    Args:
        width: of the layers.
        attend: ``torch.attn_output``, or the same composed.
    """

    def __init__(
        self, width: int = 64, attend: Callable[..., Tensor] = torch.attn_output
    ) -> None:
        super().__init__()
        self.attend = attend
        self.embed = nn.Sequential(nn.Linear(2, width), nn.SiLU())
        self.query, self.key, self.value = (
            nn.Linear(width, width, bias=False) for _ in range(3)
        )
        self.readout = nn.Sequential(
            nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, z: Tensor) -> Tensor:
        """Returns the energies (sets) of z (sets, points, 2)."""
        h = self.embed(z)
        seen = self.attend(self.query(h), self.key(h), self.value(h)) / z.shape[-2]
        return self.readout(torch.cat([h, seen], -1)).sum((-1, -2))


def circles(sets: int, points: int) -> Tensor:
    """Points (sets, points, 2) on circles of radius 1, each about a centre of its own."""
    angle = 2 * torch.pi * torch.rand(sets, points)
    centre = 2 * torch.rand(sets, 1, 2) - 1
    return centre + torch.stack([angle.cos(), angle.sin()], -1)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    """How far the gradient is from the noise, for points x (sets, points, 2); 1 for none."""
    e = torch.randn_like(x)
    z = (x + NOISE * e).requires_grad_()
    (gradient,) = torch.autograd.grad(model(z).sum(), z, create_graph=True)
    return (NOISE * gradient - e).square().mean()


def train(model: nn.Module, sets: int, points: int, steps: int) -> list[float]:
    """Trains the model; returns the loss of each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        found = loss(model, circles(sets, points))
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=16)
    parser.add_argument("--points", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--composed", action="store_true", help="without attn_output")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = Energy(attend=composed if options.composed else torch.attn_output)
    start = time.perf_counter()
    losses = train(model, options.sets, options.points, options.steps)
    each = (time.perf_counter() - start) / options.steps
    tenth = max(1, len(losses) // 10)
    first, last = (sum(x) / tenth for x in (losses[:tenth], losses[-tenth:]))
    print(f"{options.points} points: loss {first:.3f}, at the end {last:.3f}")
    print(f"{each:.3f} s for each of {options.steps} steps")


if __name__ == "__main__":
    main()
