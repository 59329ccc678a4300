# Owner(s): ["module: pt2-dispatcher"]

"""FLOPs that PyTorch's counter counts for attn: in eager mode, traced and compiled."""

from functools import partial
from itertools import product

from attn_function import double_backward, gradients, INPUTS
from test_attn import attn_composed, by_case, Case, USED, WANTED
from test_attn_autograd import pullback, pushforward, subsets
from test_attn_compile import CompileTestCase, fake_mode, to_fake, use
from test_attn_vmap import along

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.func import jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import parametrize, run_tests
from torch.utils.flop_counter import FlopCounterMode


# With these sizes a FLOP count tells how many products have d terms and how many have e.
WIDE = Case("wide", 2, 3, 4, 1000)


def products(flops):
    """How many products of d and of e terms take so many FLOPs, for the sizes of WIDE."""
    of_e, rest = divmod(flops // (2 * WIDE.m * WIDE.n), WIDE.e)
    return rest // WIDE.d, of_e


def count_flops(compute, *args):
    with FlopCounterMode(display=False) as mode:
        compute(*args)
    return int(mode.get_total_flops())


def flops_of_fake(symbolic, compute, *args):
    mode = fake_mode(symbolic)
    with use(mode):
        return count_flops(compute, *to_fake(mode, args))


def flops_of_compiled(compute, *args):
    flops = []

    def compiler(graph, inputs):
        flops.append(count_flops(graph, *inputs))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler)
    torch.compile(compute, backend=backend, fullgraph=True)(*args)
    return sum(flops)


# Ways to run a function. Each counts its FLOPs.
FLOPS = {
    "eager": count_flops,
    "fake": partial(flops_of_fake, False),
    "symbolic": partial(flops_of_fake, True),
    "make_fx": lambda f, *x: count_flops(make_fx(f, tracing_mode="symbolic")(*x), *x),
    "compiled": flops_of_compiled,
}


class TestAttnFlops(CompileTestCase):
    @by_case
    def test_flops(self, device, case):
        """attn has as many FLOPs as the composed maths, forward and backward."""
        inputs, grads = case.make("meta", torch.float)

        def count(op, wanted, used):
            with FlopCounterMode(display=False) as mode:
                gradients(op, inputs, grads, wanted, used)
            return mode.get_total_flops()

        for wanted, used in product(WANTED, USED):
            with self.subTest(wanted=wanted, used=used):
                self.assertEqual(
                    count(torch.attn, wanted, used), count(attn_composed, wanted, used)
                )

    def test_flops_of_derivatives(self, device):
        """The products are those that docs/source/notes/attn.md counts under "Cost"."""
        x, g = WIDE.make(device, torch.float)
        u, h = WIDE.make(device, torch.float)
        forward = count_flops(torch.attn, *x)
        backward = count_flops(pullback(torch.attn), *x, *g) - forward
        tangents = count_flops(pushforward(torch.attn), *x, *u) - forward

        def tangents_of_backward():
            jvp(pullback(torch.attn), (*x, *g), (*u, *h))

        for name, compute, before, expected in (
            ("forward", lambda: torch.attn(*x), 0, (1, 1)),
            ("backward", lambda: pullback(torch.attn)(*x, *g), forward, (2, 2)),
            ("tangents", lambda: pushforward(torch.attn)(*x, *u), forward, (2, 2)),
            (
                "tangents of the backward",
                tangents_of_backward,
                forward + backward + tangents,
                (4, 5),
            ),
            (
                "double backward",
                lambda: double_backward(torch.attn, x, g, u),
                forward + backward,
                (6, 5),
            ),
        ):
            with self.subTest(name):
                self.assertEqual(products(count_flops(compute) - before), expected)

    @parametrize("names", subsets(INPUTS), name_fn="".join)
    @parametrize("run", FLOPS)
    @parametrize("samples", (None, 3), name_fn=lambda n: "vmap" if n else "one")
    def test_flops_of_tangents(self, device, names, run, samples):
        """An argument without a tangent takes no product."""
        inputs, grads = WIDE.make(device, torch.float)
        u = [x + 1 for name, x in zip(INPUTS, inputs) if name in names]
        n = (
            samples or 1
        )  # how often what depends on the tangents is made; the rest is made once
        of_qk, of_v = len({*names} - {"v"}), len({*names} & {"v"})
        by_attn = int(of_qk > 0)
        forward, backward = (1, 1), (2, 2)
        of_scores, of_output = (n * of_qk, 0), (0, n * (by_attn + of_v))
        again = (0, by_attn)  # G
        # The tangents of G and of grad_v, and of grad_q and grad_k, which have two terms each.
        of_grads = (n * (2 + of_qk), n * (of_v + by_attn))
        through = (forward, backward, of_scores, again, of_grads)
        if run != "compiled":  # a compiled graph leaves out what nobody reads
            through += (of_output,)

        def make(function):
            def tangents(*args):
                derivative = along(names, lambda op: lambda *x: jvp(op, x, args[5:]))
                return derivative(function)(*args[:5])

            return vmap(tangents, (None,) * 5 + (0,) * len(u)) if samples else tangents

        args = (*inputs, *grads, *(torch.stack([x] * n) if samples else x for x in u))
        for name, function, terms in (
            (
                "forward",
                lambda *x: torch.attn(*x[:3]),
                (forward, of_scores, of_output),
            ),
            ("backward", pullback(torch.attn), through),
        ):
            with self.subTest(name):
                expected = tuple(map(sum, zip(*terms)))
                flops = FLOPS[run](make(function), *args)
                self.assertEqual(products(flops), expected)


instantiate_device_type_tests(TestAttnFlops, globals())

if __name__ == "__main__":
    run_tests()
