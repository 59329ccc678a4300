# Owner(s): ["module: cuda"]

"""attn_output on CUDA: the kernel for compute capability 9.0, and what takes other calls."""

import sys

from test_attn import AttnTestCase, widen
from test_attn_kernel import sized
from test_attn_output import both_ways, composed, Problem

import torch
from torch.profiler import profile, ProfilerActivity
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
    skipCUDAIf,
)
from torch.testing._internal.common_utils import parametrize, run_tests


if not torch.cuda.is_available():
    print("CUDA not available, skipping tests", file=sys.stderr)
    sys.exit(0)


# A build that has no kernel in C++, or another GPU, takes the same calls in other ways.
HAS_SWEEP = "RegisterCUDA" in torch._C._dispatch_dump(
    "aten::attn_output"
) and torch.cuda.get_device_capability() == (9, 0)
RESULTS = ("output", "grad_q", "grad_k", "grad_v")
# Sizes at the edges of its tiles, which have 64, 128 or 192 rows, for both of its widths.
TAKEN = [
    Problem(sized(m, n, d, e, *batch), shared, is_causal, scale)
    for is_causal in (False, True)
    for (m, n, d, e, *batch), shared, scale in (
        ((1, 1, 8, 8), (), 1.0),
        ((128, 128, 64, 64, 2), (), 1.0),
        ((129, 333, 64, 40, 3), (), -0.3),
        ((333, 129, 32, 64, 3), (), 1.0),
        ((211, 337, 128, 128, 2), (), 1.0),
        ((337, 211, 128, 24), (), 0.0),
        ((65, 1000, 24, 128), (), 0.125),
        ((1000, 63, 96, 72, 2), (), 1.0),
        ((255, 257, 64, 64, 2, 3, 4), (2, 3, 1), 1.0),
        ((255, 257, 128, 64, 2, 3, 4), (1, 3, 1), 1.0),
        ((150, 140, 64, 64, 5, 3), (1, 1), 1.0),
        ((300, 9000, 64, 64, 33), (), 0.2),
    )
]
# These it leaves to others: a width that is no multiple of 8, one that is wider, few blocks that
# would each go through many keys.
LEFT = [
    Problem(sized(100, 90, 20, 64)),
    Problem(sized(100, 90, 64, 136)),
    Problem(sized(100, 5000, 64, 64)),
]
by_taken = parametrize("problem", TAKEN, name_fn=lambda problem: problem.name)
by_some = parametrize("problem", TAKEN[4:24:6], name_fn=lambda problem: problem.name)
by_dtype = dtypes(torch.half, torch.bfloat16)


def step(problem, inputs, grad_output):
    return both_ways(torch.attn_output, problem, inputs, grad_output)


class TestAttnOutputCuda(AttnTestCase):
    @by_taken
    @by_dtype
    def test_values_and_gradients(self, device, dtype, problem):
        inputs, grad_output = problem.make(device, dtype)
        *wide, wide_grad = widen((*inputs, grad_output))
        actual = step(problem, inputs, grad_output)
        plain = both_ways(composed, problem, inputs, grad_output)
        expected = both_ways(composed, problem, wide, wide_grad)
        for name, *results in zip(RESULTS, actual, plain, expected):
            with self.subTest(result=name):
                self.assert_within_rule(*results, problem.case)

    @skipCUDAIf(not HAS_SWEEP, "no kernel for this GPU")
    @parametrize("problem", TAKEN[:12] + LEFT, name_fn=lambda problem: problem.name)
    @by_dtype
    def test_which_kernel(self, device, dtype, problem):
        given = problem.make(device, dtype)
        step(problem, *given)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            step(problem, *given)
        sweeps = sum("attn_sweep" in event.name for event in found.events())
        self.assertEqual(sweeps, 0 if problem in LEFT else 3)

    @by_some
    @by_dtype
    def test_repeats(self, device, dtype, problem):
        """The same call gives the same bits."""
        given = problem.make(device, dtype)
        expected = step(problem, *given)
        for _ in range(5):
            self.assert_bitwise(step(problem, *given), expected)

    @by_some
    @by_dtype
    def test_layouts(self, device, dtype, problem):
        """Bits don't depend on where in memory the elements are."""
        inputs, grad_output = problem.make(device, dtype)
        expected = step(problem, inputs, grad_output)

        def with_wide_rows(x):
            return torch.nn.functional.pad(x, (8, 16))[..., 8:-16]

        def with_rows_outside(x):
            return x.movedim(-2, 0).contiguous().movedim(0, -2)

        def by_columns(x):
            return x.mT.contiguous().mT

        def at_an_odd_place(x):
            return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

        for fn in (with_wide_rows, with_rows_outside, by_columns, at_an_odd_place):
            with self.subTest(layout=fn.__name__):
                given = [fn(x) for x in inputs]
                self.assert_bitwise(step(problem, given, fn(grad_output)), expected)

    @by_dtype
    def test_expanded(self, device, dtype):
        """Samples that are expanded, and a gradient that is one number."""
        problem = Problem(sized(200, 300, 64, 64, 3, 4))
        (q, k, v), _ = problem.make(device, dtype)
        inputs = q, *(x[:, :1].expand(-1, 4, -1, -1) for x in (k, v))
        grad_output = q.new_ones(()).expand(3, 4, 200, 64)
        plain = [x.contiguous() for x in inputs], grad_output.contiguous()
        self.assert_bitwise(step(problem, inputs, grad_output), step(problem, *plain))

    @by_some
    @by_dtype
    def test_choice_of_gradients(self, device, dtype, problem):
        (q, k, v), grad_output = problem.make(device, dtype)
        backward = torch.ops.aten._attn_output_backward
        given = grad_output, q, k, v, problem.is_causal, problem.scale
        expected = backward(*given, [True] * 3)
        for mask in ([True, False, False], [False, True, False], [False, False, True]):
            actual = backward(*given, mask)
            self.assertEqual([x is not None for x in actual], mask)
            place = mask.index(True)
            self.assert_bitwise(actual[place], expected[place])

    @by_dtype
    @parametrize("width", (64, 128))
    @parametrize("value", (torch.inf, torch.nan))
    def test_what_a_number_reaches(self, device, dtype, width, value):
        """A row of q that is not finite stays in its row, in the gradient of q too."""
        problem = Problem(sized(300, 200, width, width, 2))
        (q, k, v), grad_output = problem.make(device, dtype)
        expected = step(problem, (q, k, v), grad_output)
        q = q.clone()
        q[1, 70] = value
        actual = step(problem, (q, k, v), grad_output)
        others = torch.arange(300, device=device) != 70
        for x, y in zip(actual[:2], expected[:2]):
            self.assert_bitwise(x[0], y[0])
            self.assert_bitwise(x[1, others], y[1, others])

    @by_dtype
    @parametrize("width", (64, 128))
    def test_keys_after_the_last_query(self, device, dtype, width):
        """If causal they may hold anything, as the unused end of a cache does."""
        problem = Problem(sized(150, 500, width, width, 2), is_causal=True)
        (q, k, v), grad_output = problem.make(device, dtype)
        expected = step(problem, (q, k, v), grad_output)
        k, v = k.clone(), v.clone()
        k[:, 150:] = torch.nan
        v[:, 150:] = torch.inf
        actual = step(problem, (q, k, v), grad_output)
        self.assert_bitwise(actual, expected)
        self.assertFalse(any(x[:, 150:].any() for x in actual[2:]))

    @by_some
    @by_dtype
    def test_graph(self, device, dtype, problem):
        """A captured step reads what the inputs then hold."""
        given, others = (problem.make(device, dtype) for _ in range(2))
        step(problem, *given)  # what is done once can't be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = step(problem, *given)
        (inputs, grad_output), (other_inputs, other_grad) = given, others
        for x, y in zip((*inputs, grad_output), (*other_inputs, other_grad)):
            x.copy_(y)
        graph.replay()
        self.assert_bitwise(actual, step(problem, *others))


instantiate_device_type_tests(TestAttnOutputCuda, globals(), only_for="cuda")


if __name__ == "__main__":
    run_tests()
