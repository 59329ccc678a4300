# Owner(s): ["module: cpu"]

"""What holds of the CPU's kernels for all sizes and values: see the names of the tests."""

import json
import math
import os
import sys
import unittest
from contextlib import nullcontext

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import run_tests, TEST_WITH_ASAN


try:
    from hypothesis import example, given, HealthCheck, settings, strategies as st
except ImportError:
    print("hypothesis not available, skipping tests", file=sys.stderr)
    sys.exit(0)

from test_attn import BATCH_LAYOUTS, LAYOUTS, RESULTS
from test_attn_kernel import (
    around,
    both_ways,
    by_dtype,
    compact,
    FEWER_EXAMPLES,
    GIVEN,
    KernelTestCase,
    report_on,
    SHARED,
    sized,
    VARIED,
)


ARGUMENTS = *GIVEN, "attn"
# A size is that of some whole blocks and a rest: for each instruction set, one or two vectors,
# or a micro-kernel's rows or columns, or one element more or less.
BLOCKS = (0, 96, 192, 288, 384, 576, 1024, 2048)
LEFT = (1, 0, -1, *range(2, 10), *around(12, 16, 24, 32, 48, 64))
SIZES = sorted({block + left for block in BLOCKS for left in LEFT} - {0, -1})
MAX_WIDTH = 1024  # the largest d and e: attn is composed beyond
ALL_LAYOUTS = {
    **LAYOUTS,
    **BATCH_LAYOUTS,
    "expanded": lambda x: x[..., :1, :1].expand_as(x),
    "negative": torch._neg_view,  # it is resolved before the kernel is called
}
# The element (i, j) of an argument, or the row i where j is ALL, reaches these elements of
# the results, and no other:
#   attn = tanh(q kᵀ), output = attn v
# and with S̄ = (grad_output vᵀ + grad_attn) (1 - attn²), for an attn that is given,
#   grad_q = S̄ k, grad_k = S̄ᵀ q, grad_v = attnᵀ grad_output
ALL = slice(None)
REACHED = {
    "q": lambda i, j: {"output": (i, ALL), "attn": (i, ALL), "grad_k": (ALL, j)},
    "k": lambda i, j: {"output": (ALL, ALL), "attn": (ALL, i), "grad_q": (ALL, j)},
    "v": lambda i, j: {"output": (ALL, j), "grad_q": (ALL, ALL), "grad_k": (i, ALL)},
    "grad_output": lambda i, j: {
        "grad_q": (i, ALL),
        "grad_k": (ALL, ALL),
        "grad_v": (ALL, j),
    },
    "grad_attn": lambda i, j: {"grad_q": (i, ALL), "grad_k": (j, ALL)},
    "attn": lambda i, j: {
        "grad_q": (i, ALL),
        "grad_k": (j, ALL),
        "grad_v": (j, ALL),
    },
}
SEEDS = st.integers(0, 2**32 - 1)


def cases(most=2**20 if TEST_WITH_ASAN else 2**25, batches=st.just(())):
    """Cases of at most `most` multiplications."""

    def work(case):
        return math.prod((*case.batch, case.m, case.n, case.d + case.e + 8))

    size = st.sampled_from(SIZES)
    width = st.sampled_from([size for size in SIZES if size <= MAX_WIDTH])
    made = st.builds(
        lambda sizes, batch: sized(*sizes, *batch),
        st.tuples(size, size, width, width),
        batches,
    )
    return made.filter(lambda case: work(case) < most)


def for_all(prop, examples, count, derandomize=False, **strategies):
    """Runs ``prop`` with the examples, then with ``count`` that are drawn. The report of a
    failure has all arguments, and how to draw them again.

    Each run draws others where results must be exact. A property with a bound, which chance may
    exceed, is derandomized: each run draws the same ones.
    """
    test = given(**strategies)(prop)
    for arguments in examples:
        test = example(**arguments)(test)
    settings(
        max_examples=count // 5 if FEWER_EXAMPLES in os.environ else count,
        deadline=None,
        derandomize=derandomize,
        print_blob=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )(test)()


def make(case, dtype, seed):
    """A tensor for each of ARGUMENTS."""
    torch.manual_seed(seed)
    inputs, grads = case.make("cpu", dtype)
    return [*inputs, *grads, torch.attn(*inputs).attn]


class TestAttnProperties(KernelTestCase):
    def subTest(self, *args, **kwargs):
        # A real subTest would hide a failure from hypothesis.
        return nullcontext()

    def assert_equal_bits(self, actual, expected):
        for name, x, y in zip(RESULTS, actual, expected):
            message = f"in {name}"
            self.assertEqual(
                x, y, rtol=0, atol=0, msg=lambda said: f"{message}: {said}"
            )

    @by_dtype
    def test_values(self, device, dtype):
        """The error is at most twice that of the composed maths."""

        def prop(case, seed):
            torch.manual_seed(seed)
            self.assert_results(dtype, case)

        # If there are few numbers, the composed maths may by luck round all of them well.
        def has_many(case):
            rows, cols = min(case.m, case.n), min(case.n, case.d, case.e)
            return rows * cols >= 64

        # In double the reference is computed in a longer type, which is slow.
        most = 2**20 if dtype == torch.double or TEST_WITH_ASAN else 2**25
        batches = st.sampled_from(((), (1,), (2,), (3,)))
        wanted = cases(most, batches).filter(has_many)
        for_all(prop, (), 30, derandomize=True, case=wanted, seed=SEEDS)

    @by_dtype
    def test_an_element_reaches_what_the_formulas_say(self, device, dtype):
        def prop(case, name, place, value, seed):
            tensors = make(case, dtype, seed)
            expected = both_ways(*tensors)
            changed = tensors[ARGUMENTS.index(name)]
            place = [x if x == ALL else x % y for x, y in zip(place, changed.shape)]
            changed[tuple(place)] = value
            actual = both_ways(*tensors)
            for result, index in REACHED[name](*place).items():
                x, y = (xs[RESULTS.index(result)] for xs in (actual, expected))
                if math.isnan(value):
                    self.assertTrue(x[index].isnan().all(), msg=result)
                x[index] = y[index]
            self.assert_equal_bits(actual, expected)

        examples = (
            # The last tile has a single column, and its sums are made in two parts.
            (sized(100, 289, 300, 3), "q", (5, 299), math.nan),
            (sized(1200, 577, 4, 300), "grad_output", (5, 298), math.inf),
        )
        index = st.one_of(st.sampled_from((0, -1, -2)), st.integers(0, 3000))
        column = st.one_of(st.just(ALL), index)
        for_all(
            prop,
            [
                {"case": case, "name": name, "place": place, "value": value, "seed": 0}
                for case, name, place, value in examples
            ],
            50,
            case=cases(),
            name=st.sampled_from(ARGUMENTS),
            place=st.tuples(index, column),
            value=st.sampled_from((math.nan, math.inf, 3.0)),
            seed=SEEDS,
        )

    @by_dtype
    def test_a_sample_is_alone_what_it_is_in_a_batch(self, device, dtype):
        """A sample has the same bits at any place of any batch."""

        def prop(case, samples, seed):
            tensors = make(case, dtype, seed)
            (batch,) = case.batch
            if isinstance(samples, int):
                index = samples % batch
            else:
                index = [i % batch for i in samples]
            expected = [x[index] for x in both_ways(*tensors)]
            self.assert_equal_bits(both_ways(*(x[index] for x in tensors)), expected)

        # Each sample has several tiles here, which threads may share.
        few = [sized(100, 300, 20, 30, 13), sized(129, 193, 8, 3, 2)]
        number = st.integers(0, 15)
        for_all(
            prop,
            [{"case": case, "samples": 2, "seed": 0} for case in few],
            30,
            case=cases(batches=st.tuples(st.sampled_from((1, 2, 3, 4, 6, 12, 13)))),
            samples=st.one_of(number, st.lists(number, min_size=1, max_size=16)),
            seed=SEEDS,
        )

    @by_dtype
    def test_any_number_of_threads_makes_the_same_bits(self, device, dtype):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())

        def prop(case, threads, seed):
            tensors = make(case, dtype, seed)
            torch.set_num_threads(1)
            expected = both_ways(*tensors)
            for count in threads:
                torch.set_num_threads(count)
                self.assert_equal_bits(both_ways(*tensors), expected)

        every = list(range(2, 8))
        for_all(
            prop,
            [{"case": case, "threads": [*every, 7, 16], "seed": 0} for case in SHARED],
            20,
            case=cases(batches=st.sampled_from(((), (2,), (5,), (2, 3)))),
            threads=st.lists(st.sampled_from(every), min_size=1, max_size=3),
            seed=SEEDS,
        )

    @by_dtype
    def test_any_layout_makes_the_same_bits(self, device, dtype):
        def prop(case, layouts, seed):
            tensors = make(case, dtype, seed)
            given = [ALL_LAYOUTS[name](x) for name, x in zip(layouts, tensors)]
            self.assert_equal_bits(both_ways(*given), both_ways(*map(compact, given)))

        for_all(
            prop,
            [
                {"case": case, "layouts": (name,) * len(ARGUMENTS), "seed": 0}
                for case in VARIED
                for name in ALL_LAYOUTS
            ],
            40,
            case=cases(batches=st.sampled_from(((1,), (2,), (3, 2)))),
            layouts=st.tuples(
                *(st.sampled_from(sorted(ALL_LAYOUTS)) for _ in ARGUMENTS)
            ),
            seed=SEEDS,
        )


def run_properties():
    """For a process of its own: the tests above, then a line of JSON on them."""
    print(json.dumps(report_on(__name__, "TestAttnPropertiesCPU")))


class TestAttnPropertiesOfInstructionSets(KernelTestCase):
    @unittest.skipIf(TEST_WITH_ASAN, "run for each of them by itself")
    def test_instruction_sets(self, device):
        for report in self.reports_by_capability(run_properties):
            self.assertGreater(report["tests"], 0)


instantiate_device_type_tests(TestAttnProperties, globals(), only_for="cpu")
instantiate_device_type_tests(
    TestAttnPropertiesOfInstructionSets, globals(), only_for="cpu"
)

if __name__ == "__main__":
    run_tests()
