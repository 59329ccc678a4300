"""``torch.func`` over ``torch.attn``: per-sample gradients, Hessian-vector products, an ensemble.

The model is one layer of attention, ``output = tanh(q kᵀ) v`` with ``q``, ``k``, ``v`` linear in
the sequence ``x``, and a linear readout of the mean over the sequence. Each of the three is also
computed by a loop, compared with it, and timed beside it::

    python functorch/examples/attn/per_sample_gradients.py --batch 64 --length 128
"""

import argparse

import torch
from torch import nn, Tensor
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.utils.benchmark import Timer


class AttnLayer(nn.Module):
    """From sequences (*, length, width) to numbers (*)."""

    def __init__(self, width: int, heads_width: int, **factory) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(width, heads_width, bias=False, **factory) for _ in range(3)
        )
        self.readout = nn.Linear(heads_width, 1, **factory)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = torch.attn(self.query(x), self.key(x), self.value(x))
        return self.readout(output.mean(-2)).squeeze(-1)


Parameters = dict[str, Tensor]


def loss(model: nn.Module, parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
    """The mean squared error of ``model`` with these parameters; a number."""
    return (functional_call(model, parameters, (x,)) - y).square().mean()


def per_sample_gradients(
    model: nn.Module, parameters: Parameters, x: Tensor, y: Tensor
) -> Parameters:
    """The gradient of each sample's loss, as differentially private training clips it.

    Args:
        model: see :class:`AttnLayer`.
        parameters: of ``model``, by name.
        x (Tensor): (batch, length, width).
        y (Tensor): (batch).

    Returns:
        For each parameter (*sizes) its gradients (batch, *sizes).
    """

    def of_one(parameters, x, y):
        return grad(lambda p: loss(model, p, x, y))(parameters)

    return vmap(of_one, in_dims=(None, 0, 0))(parameters, x, y)


def per_sample_gradients_loop(
    model: nn.Module, parameters: Parameters, x: Tensor, y: Tensor
) -> Parameters:
    leaves = {k: p.detach().requires_grad_() for k, p in parameters.items()}
    rows = [
        torch.autograd.grad(loss(model, leaves, *sample), list(leaves.values()))
        for sample in zip(x, y)
    ]
    return dict(zip(leaves, map(torch.stack, zip(*rows))))


def hessian_vector_product(
    model: nn.Module, parameters: Parameters, v: Parameters, x: Tensor, y: Tensor
) -> Parameters:
    """The product of the loss' Hessian with ``v``: forward over reverse, no Hessian is made.

    Args:
        v: a direction, of the names and sizes of ``parameters``.
    """
    gradient = grad(lambda p: loss(model, p, x, y))
    return jvp(gradient, (parameters,), (v,))[1]


def hessian_vector_product_twice(
    model: nn.Module, parameters: Parameters, v: Parameters, x: Tensor, y: Tensor
) -> Parameters:
    """The same by two backwards."""
    leaves = {k: p.detach().requires_grad_() for k, p in parameters.items()}
    values = list(leaves.values())
    first = torch.autograd.grad(loss(model, leaves, x, y), values, create_graph=True)
    along = sum((g * v[k]).sum() for k, g in zip(leaves, first))
    return dict(zip(leaves, torch.autograd.grad(along, values)))


def ensemble(models: list[nn.Module], x: Tensor) -> Tensor:
    """The outputs (models, batch) of models of one architecture, all at once."""
    parameters, buffers = stack_module_state(models)

    def of_one(parameters, buffers, x):
        return functional_call(models[0], (parameters, buffers), (x,))

    return vmap(of_one, in_dims=(0, 0, None))(parameters, buffers, x)


def ensemble_loop(models: list[nn.Module], x: Tensor) -> Tensor:
    return torch.stack([model(x) for model in models])


def largest_difference(found, wanted) -> float:
    """The largest difference over the largest number; of a dict, the largest of all."""
    if isinstance(found, dict):
        return max(largest_difference(found[k], wanted[k]) for k in wanted)
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def times_as_fast(function, other, args) -> float:
    """The median of the rounds' ratios; the two take turns in each."""
    ratios = []
    for _ in range(5):
        seconds = [
            Timer("f(*x)", globals={"f": f, "x": args}).timeit(3).mean
            for f in (function, other)
        ]
        ratios.append(seconds[1] / seconds[0])
    return sorted(ratios)[2]


def main() -> int:
    parser = argparse.ArgumentParser(description="torch.func over torch.attn.")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    factory = {"device": args.device, "dtype": torch.double}
    models = [AttnLayer(args.width, args.width, **factory) for _ in range(args.models)]
    x = torch.randn(args.batch, args.length, args.width, **factory)
    y = torch.randn(args.batch, **factory)
    parameters = {k: p.detach() for k, p in models[0].named_parameters()}
    v = {k: torch.randn_like(p) for k, p in parameters.items()}

    wrong = 0
    for name, function, other, given in (
        (
            "per-sample gradients",
            per_sample_gradients,
            per_sample_gradients_loop,
            (models[0], parameters, x, y),
        ),
        (
            "Hessian-vector product",
            hessian_vector_product,
            hessian_vector_product_twice,
            (models[0], parameters, v, x, y),
        ),
        ("ensemble", ensemble, ensemble_loop, (models, x)),
    ):
        difference = largest_difference(function(*given), other(*given))
        wrong += not difference < 1e-10
        ratio = times_as_fast(function, other, given)
        print(f"{name:24} differs by {difference:.0e}, {ratio:.2f} x as fast")
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
