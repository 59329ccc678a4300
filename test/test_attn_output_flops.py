# Owner(s): ["module: flop counter"]

"""The FLOPs of attn_output and of its derivatives."""

from functools import partial

from attn_function import INPUTS
from test_attn import AttnTestCase
from test_attn_output import both_ways, Problem, sized
from test_attn_output_second_order import (
    by_given,
    double_backward,
    tangent,
    tangents_of,
)
from test_attn_output_triple_backward import make, OPTIONAL, triple_backward

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import parametrize, run_tests
from torch.utils.flop_counter import FlopCounterMode


aten = torch.ops.aten


class TestAttnOutputFlops(AttnTestCase):
    @parametrize("is_causal", (False, True))
    def test_forward_and_backward(self, device, is_causal):
        problem = Problem(sized(5, 3, 2, 4, 6), (1,), is_causal)
        inputs, grad_output = problem.make(device, torch.float)
        kept = 1 + 2 + 3 * 3 if is_causal else 5 * 3
        with FlopCounterMode(display=False) as mode:
            both_ways(torch.attn_output, problem, inputs, grad_output)
        flops = mode.get_flop_counts()["Global"]
        self.assertEqual(flops[aten.attn_output], 2 * 6 * kept * (2 + 4))
        self.assertEqual(
            flops[aten._attn_output_backward], 2 * 6 * kept * (3 * 2 + 2 * 4)
        )

    @by_given
    @parametrize("is_causal", (False, True))
    def test_second_order(self, device, given, is_causal):
        d, e, batch = 2, 4, 6
        problem = Problem(sized(5, 3, d, e, batch), (1,), is_causal)
        inputs, grad_output = problem.make(device, torch.float)
        tangents = tangents_of(inputs, given)
        kept = 1 + 2 + 3 * 3 if is_causal else 5 * 3
        q, k, v = (name in given for name in INPUTS)
        with FlopCounterMode(display=False) as mode:
            tangent(problem, inputs, tangents)
        # q kᵀ; q' kᵀ and attn' v, or ...
        columns = d * (1 + q + k) + e * ((q or k) + v)
        self.assertEqual(mode.get_total_flops(), 2 * batch * kept * columns)
        with FlopCounterMode(display=False) as mode:
            double_backward(problem, inputs, tangents, grad_output)
        # besides, grad_output vᵀ and its tangent; grad_q, grad_k and grad_v
        columns += d * (2 + q + k) + e * ((q or k) + v) + e * (q or k)
        self.assertEqual(mode.get_total_flops(), 2 * batch * kept * columns)

    @parametrize(
        "given, products",
        (
            # with d and e columns; in the order of the formulas
            (OPTIONAL, (7 + 3 + 3, 5 + 3 + 2)),
            (("grad_output", "u_q", "w_q"), (3 + 1 + 3, 1 + 1 + 1)),
            (("u_q", "w_k"), (4, 1)),
            (("u_q",), (0, 0)),
        ),
        name_fn=lambda given, products: "_".join(given),
    )
    @parametrize("is_causal", (False, True))
    def test_third_order(self, device, given, products, is_causal):
        d, e, batch = 2, 4, 6
        problem = Problem(sized(5, 3, d, e, batch), (1,), is_causal)
        kept = 1 + 2 + 3 * 3 if is_causal else 5 * 3
        with FlopCounterMode(display=False) as mode:
            triple_backward(problem, make(problem, device, torch.float, given))
        columns = products[0] * d + products[1] * e
        self.assertEqual(mode.get_total_flops(), 2 * batch * kept * columns)

    def test_all_flops(self, device):
        """With all tangents, the forward has 2 products, its tangent 5, the backward 5 too, and
        its backward 12.
        """
        problem = Problem(sized(5, 3, 2, 2))
        inputs, grad_output = problem.make(device, torch.float)
        tangents = tangents_of(inputs)
        one = 2 * 5 * 3 * 2
        backward = partial(aten._attn_output_backward, output_mask=[True] * 3)
        for products, run in (
            (2, lambda: torch.attn_output(*inputs)),
            (5, lambda: tangent(problem, inputs, tangents)),
            (5, lambda: backward(grad_output, *inputs, False, 1.0)),
            (12, lambda: double_backward(problem, inputs, tangents, grad_output)),
        ):
            with FlopCounterMode(display=False) as mode:
                run()
            self.assertEqual(mode.get_total_flops(), products * one)


instantiate_device_type_tests(TestAttnOutputFlops, globals())

if __name__ == "__main__":
    run_tests()
