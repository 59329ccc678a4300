"""Routes with planted faults; run as a script, it prints what the probes say of them, as JSON."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "capabilities")]

import formulas  # noqa: E402
import probes  # noqa: E402
import run  # noqa: E402
import torch  # noqa: E402


class WrongDerivatives(torch.autograd.Function):
    """A backward that is wrong, a jvp that is zero, and a vmap rule that returns ones."""

    @staticmethod
    def forward(q, k, v):
        return formulas.forward(q, k, v)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *grads):
        return tuple(grads[0].sum() * x * x for x in ctx.saved_tensors)

    @staticmethod
    def jvp(ctx, *tangents):
        return tuple(
            torch.zeros(shape, dtype=torch.double) for shape in ((2, 4), (2, 5))
        )

    @staticmethod
    def vmap(info, in_dims, *inputs):
        batch = info.batch_size
        return (torch.ones(batch, 2, 4).double(), torch.ones(batch, 2, 5).double()), (
            0,
            0,
        )


def twice(q, k, v):
    output, attn = formulas.forward(q, k, v)
    return 2 * output, attn


def raises(q, k, v):
    raise ValueError("at 0x7f3a in /some/where/file.py\nsecond line")


DERIVATIVES = ("gradient", "double_backward", "forward_ad", "forward_over_reverse")
COMPILERS = (
    "compile",
    "compile_gradient",
    "compile_jvp",
    "dynamic_shapes",
    "export",
    "save",
)
# The route, and the probes that look at it.
PLANTED = {
    "wrong derivatives": (WrongDerivatives.apply, (*DERIVATIVES, "vmap", "jacrev")),
    "twice": (twice, (*COMPILERS, "aot_inductor", "autocast", "dtensor")),
    "raises": (raises, ("gradient", "vmap", "autocast", "flop_counter")),
    "no products": (lambda q, k, v: (q, k), ("flop_counter",)),
    "parts": (formulas.forward, ("torch_function",)),
}

if __name__ == "__main__":
    run.prepare()
    found = {}
    for name, (attn, chosen) in PLANTED.items():
        route = SimpleNamespace(attn=attn, operator=None, library=None)
        found[name] = {
            probe: run.in_a_process(
                lambda p=probe, r=route: run.outcome(vars(probes)[p], r)
            )
            for probe in chosen
        }
    print(json.dumps(found))
