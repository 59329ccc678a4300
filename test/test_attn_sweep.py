# Owner(s): ["module: cuda"]

"""attn and attn_output by AttnSweep.cu, the kernel for compute capability 9.0.

Without a GPU it runs on the CPU: attn_hopper/ has functions in place of the instructions of
AttnPtx.cuh, which do what these do. Which thread runs next, and when a copy or a product is done,
is drawn, so a tile that is overwritten too early or read too soon gives wrong numbers.
"""

import sys
import tempfile
import unittest
from pathlib import Path

from test_attn import attn_composed, AttnTestCase, widen
from test_attn_kernel import sized
from test_attn_output import both_ways, composed, Problem

import torch
from torch.profiler import profile, ProfilerActivity
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
    onlyCUDA,
)
from torch.testing._internal.common_utils import parametrize, run_tests, TEST_WITH_ASAN
from torch.utils.cpp_extension import load


HERE = Path(__file__).resolve().parent
HAS_GPU = torch.cuda.is_available()
# ASan does not know of fibers.
if not HAS_GPU and (sys.platform != "linux" or TEST_WITH_ASAN):
    print("a GPU and fibers are not available, skipping tests", file=sys.stderr)
    sys.exit(0)

# A build without the kernel in C++, or another GPU, takes the same calls in other ways.
HAS_SWEEP = not HAS_GPU or (
    "RegisterCUDA" in torch._C._dispatch_dump("aten::attn_output")
    and torch.cuda.get_device_capability() == (9, 0)
)
# The last folder is the repository's: the kernel's source is in no package.
INCLUDES = (
    HERE / "attn_hopper",
    Path(torch.__file__).parent / "include",
    HERE.parent / "aten/src",
)
OPERATORS = ("attn", "_attn_backward", "attn_output", "_attn_output_backward")
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
        ((129, 140, 64, 64, 2, 3, 2), (2, 3, 1), 1.0),
        ((65, 257, 128, 64, 2, 3, 2), (1, 3, 1), 1.0),
        ((150, 70, 64, 64, 2, 3), (1, 1), 1.0),
    )
]
# So many keys that a forward of this width takes more than two warpgroups.
LONG = [Problem(sized(300, 9000, 64, 64, 33), (), x, 0.2) for x in (False, True)]
# The kernel leaves these to others: a width that is no multiple of 8, one that is too wide, few
# blocks that would each go through many keys.
LEFT = [
    Problem(sized(100, 90, 20, 64)),
    Problem(sized(100, 90, 64, 136)),
    Problem(sized(100, 5000, 64, 64)),
]
# Sizes of attn, n of them multiples of 8.
SIZES_OF_ATTN = [
    sized(m, n, d, e, *batch)
    for m, n, d, e, *batch in (
        (1, 8, 8, 8),
        (128, 128, 64, 64, 2),
        (129, 336, 64, 40, 3),
        (333, 72, 32, 64, 3),
        (211, 336, 128, 128, 2),
        (337, 208, 128, 24),
        (65, 1000, 24, 128),
        (255, 264, 64, 64, 2, 3),
    )
]
by_size = parametrize("case", SIZES_OF_ATTN, name_fn=lambda case: case.name)
by_size_of_some = parametrize(
    "case", SIZES_OF_ATTN[2:5:2], name_fn=lambda case: case.name
)
by_taken = parametrize(
    "problem", TAKEN + LONG * HAS_GPU, name_fn=lambda problem: problem.name
)
by_some = parametrize("problem", TAKEN[4:22:6], name_fn=lambda problem: problem.name)
by_dtype = dtypes(torch.half, torch.bfloat16)


def step(problem, inputs, grad_output):
    return both_ways(torch.attn_output, problem, inputs, grad_output)


def step_of_attn(op, inputs, grads):
    """Its results, and the gradients of q, k and v. A result may have no gradient."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    used = [i for i in range(2) if grads[i] is not None]
    results = op(*inputs)
    found = torch.autograd.grad(
        [results[i] for i in used],
        inputs,
        [grads[i] for i in used],
        allow_unused=True,
    )
    return *(x.detach() for x in results), *found


def launches(run):
    """How many times the kernel is launched."""
    if not HAS_GPU:
        before = torch.ops.attn_hopper.launches()
        run()
        return torch.ops.attn_hopper.launches() - before
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
    return sum("attn_sweep" in event.name for event in found.events())


class SweepTestCase(AttnTestCase):
    @classmethod
    def setUpClass(cls):
        """Without a GPU: makes AttnSweep.cu's operators those of the CPU, for this class."""
        super().setUpClass()
        if HAS_GPU:
            return
        if not hasattr(torch.ops.attn_hopper, "attn"):
            with tempfile.TemporaryDirectory() as folder:
                load(
                    "attn_hopper",
                    [str(HERE / "attn_hopper" / "operators.cpp")],
                    extra_cflags=["-std=c++20", "-O1", "-w"],
                    extra_include_paths=[*map(str, INCLUDES)],
                    build_directory=folder,
                    is_python_module=False,
                )
        cls.library = torch.library.Library("aten", "IMPL")
        for name in OPERATORS:
            kernel = getattr(torch.ops.attn_hopper, name)
            cls.library.impl(name, kernel, "CPU")

    @classmethod
    def tearDownClass(cls):
        if not HAS_GPU:
            cls.library._destroy()
        super().tearDownClass()

    def setUp(self):
        super().setUp()
        if not HAS_GPU:
            torch.ops.attn_hopper.seed(0)


class TestAttnOutputSweep(SweepTestCase):
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

    @unittest.skipIf(not HAS_SWEEP, "no kernel for this GPU")
    @parametrize("problem", TAKEN[:11:2] + LEFT, name_fn=lambda problem: problem.name)
    @by_dtype
    def test_which_kernel(self, device, dtype, problem):
        given = problem.make(device, dtype)
        found = launches(lambda: step(problem, *given))
        self.assertEqual(found, 0 if problem in LEFT else 3)

    @by_some
    @by_dtype
    def test_repeats(self, device, dtype, problem):
        """The same call gives the same bits."""
        given = problem.make(device, dtype)
        expected = step(problem, *given)
        for _ in range(5 if HAS_GPU else 1):
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
        problem = Problem(sized(100, 150, 64, 64, 2, 3))
        (q, k, v), _ = problem.make(device, dtype)
        inputs = q, *(x[:, :1].expand(-1, 3, -1, -1) for x in (k, v))
        grad_output = q.new_ones(()).expand(2, 3, 100, 64)
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
            self.assert_bitwise([actual[place]], [expected[place]])

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

    @onlyCUDA
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


class TestAttnSweep(SweepTestCase):
    @by_size
    @parametrize("grads_given", ("output", "attn", "both"))
    @by_dtype
    def test_values_and_gradients(self, device, dtype, case, grads_given):
        inputs, grads = case.make(device, dtype)
        if grads_given != "both":
            grads[("attn", "output").index(grads_given)] = None
        wide_grads = [x if x is None else widen([x])[0] for x in grads]
        self.assert_all_within_rule(
            step_of_attn(torch.attn, inputs, grads),
            step_of_attn(attn_composed, inputs, grads),
            step_of_attn(attn_composed, widen(inputs), wide_grads),
            case,
        )

    @unittest.skipIf(not HAS_SWEEP, "no kernel for this GPU")
    @by_dtype
    def test_which_kernel(self, device, dtype):
        """Not where n is no multiple of 8, nor backward where output has no gradient."""
        for n, wanted, expected in ((64, (0, 1), 3), (64, (1,), 1), (60, (0, 1), 0)):
            inputs, grads = sized(100, n, 64, 64).make(device, dtype)
            grads = [x if i in wanted else None for i, x in enumerate(grads)]
            found = launches(lambda: step_of_attn(torch.attn, inputs, grads))
            self.assertEqual(found, expected)

    @by_size_of_some
    @by_dtype
    def test_layouts(self, device, dtype, case):
        """Bits don't depend on where in memory the elements are, nor change by the call."""
        inputs, grads = case.make(device, dtype)
        expected = step_of_attn(torch.attn, inputs, grads)
        self.assert_bitwise(step_of_attn(torch.attn, inputs, grads), expected)

        def with_wide_rows(x):
            return torch.nn.functional.pad(x, (8, 16))[..., 8:-16]

        def with_rows_outside(x):
            return x.movedim(-2, 0).contiguous().movedim(0, -2)

        for fn in (with_wide_rows, with_rows_outside):
            with self.subTest(layout=fn.__name__):
                given = [*map(fn, inputs)], [*map(fn, grads)]
                self.assert_bitwise(step_of_attn(torch.attn, *given), expected)

    @by_size_of_some
    @by_dtype
    def test_choice_of_gradients(self, device, dtype, case):
        inputs, grads = case.make(device, dtype)
        given = *grads, *inputs, torch.attn(*inputs)[1]
        backward = torch.ops.aten._attn_backward
        expected = backward(*given, [True] * 3)
        for place in range(3):
            mask = [i == place for i in range(3)]
            actual = backward(*given, mask)
            self.assertEqual([x is not None for x in actual], mask)
            self.assert_bitwise([actual[place]], [expected[place]])

    @by_dtype
    @parametrize("width", (64, 128))
    @parametrize("value", (torch.inf, torch.nan))
    def test_what_a_number_reaches(self, device, dtype, width, value):
        """A row of q that is not finite stays in its row of the results and of q's gradient."""
        case = sized(300, 200, width, width, 2)
        (q, k, v), grads = case.make(device, dtype)
        expected = step_of_attn(torch.attn, (q, k, v), grads)
        q = q.clone()
        q[1, 70] = value
        actual = step_of_attn(torch.attn, (q, k, v), grads)
        others = torch.arange(300, device=device) != 70
        for x, y in zip(actual[:3], expected[:3]):
            self.assert_bitwise(x[0], y[0])
            self.assert_bitwise(x[1, others], y[1, others])


DEVICE = "cuda" if HAS_GPU else "cpu"
instantiate_device_type_tests(TestAttnOutputSweep, globals(), only_for=DEVICE)
instantiate_device_type_tests(TestAttnSweep, globals(), only_for=DEVICE)


if __name__ == "__main__":
    run_tests()
