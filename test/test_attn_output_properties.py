# Owner(s): ["module: cpu"]

"""What holds of attn_output on a CPU for all sizes and values: see the names of the tests."""

import json
import math
import unittest
from itertools import product

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import run_tests, TEST_WITH_ASAN


# Without hypothesis, this ends the process.
from test_attn_properties import ALL, ALL_LAYOUTS, cases, for_all, SEEDS  # isort: skip
from test_attn import widen
from test_attn_kernel import by_dtype, compact, KernelTestCase, report_on, sized
from test_attn_output import both_ways, composed, Problem

from hypothesis import strategies as st


ARGUMENTS = ("q", "k", "v", "grad_output")
RESULTS = ("output", "grad_q", "grad_k", "grad_v")
BATCHES = st.sampled_from(((), (1,), (3,), (2, 3)))


def reached(name, i, j, is_causal):
    """The elements of results that the element (i, j) of an argument reaches, or the row i where j
    is ALL: with the attn and the S̄ of the note, which is masked,

        output = attn v, grad_q = S̄ k, grad_k = S̄ᵀ q, grad_v = attnᵀ grad_output
    """
    # The rows of q that see row i of k and v, and those of k and v that row i of q sees.
    later = slice(i, None) if is_causal else ALL
    earlier = slice(0, i + 1) if is_causal else ALL
    return {
        "q": {
            "output": (i, ALL),
            "grad_q": (i, ALL),
            "grad_k": (earlier, ALL),
            "grad_v": (earlier, ALL),
        },
        "k": {
            "output": (later, ALL),
            "grad_q": (later, ALL),
            "grad_k": (i, ALL),
            "grad_v": (i, ALL),
        },
        "v": {"output": (later, j), "grad_q": (later, ALL), "grad_k": (i, ALL)},
        "grad_output": {
            "grad_q": (i, ALL),
            "grad_k": (earlier, ALL),
            "grad_v": (earlier, j),
        },
    }[name]


def problems(batches=BATCHES, **limits):
    """Problems of any size, mask and scale, in which samples share k and v or not."""

    def make(case, shares, is_causal, scale):
        shared = tuple(1 if x else size for x, size in zip(shares, case.batch))
        return Problem(case, shared, is_causal, scale)

    return st.builds(
        make,
        cases(batches=batches, **limits),
        st.tuples(st.booleans(), st.booleans()),
        st.booleans(),
        st.sampled_from((1.0, 0.125, -3.0)),
    )


def make(problem, dtype, seed):
    """A tensor for each of ARGUMENTS."""
    torch.manual_seed(seed)
    inputs, grad_output = problem.make("cpu", dtype)
    return [*inputs, grad_output]


def run(problem, tensors):
    """A tensor for each of RESULTS."""
    *inputs, grad_output = tensors
    return both_ways(torch.attn_output, problem, inputs, grad_output)


class TestAttnOutputProperties(KernelTestCase):
    @by_dtype
    def test_values(self, device, dtype):
        """The error is at most twice that of the definition."""

        def prop(problem, seed):
            tensors = make(problem, dtype, seed)
            *inputs, grad_output = widen(tensors)
            expected = both_ways(composed, problem, inputs, grad_output)
            *inputs, grad_output = tensors
            plain = both_ways(composed, problem, inputs, grad_output)
            for results in zip(run(problem, tensors), plain, expected):
                self.assert_within_rule(*results, problem.case)

        # If there are few numbers, the definition may by luck round all of them well.
        def has_many(problem):
            m, d, n, e = problem.case[1:5]
            return min(m, n) * min(n, d, e) >= 64

        # The last key that is seen is the first of a block of columns.
        edge = Problem(sized(289, 290, 9, 8), is_causal=True)
        for_all(
            prop,
            [{"problem": edge, "seed": 0}],
            20,
            derandomize=True,
            problem=problems(most=2**20).filter(has_many),
            seed=SEEDS,
        )

    @by_dtype
    def test_an_element_reaches_what_the_formulas_say(self, device, dtype):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())

        def prop(problem, name, place, value, threads, seed):
            tensors = make(problem, dtype, seed)
            torch.set_num_threads(1)
            expected = run(problem, tensors)
            torch.set_num_threads(threads)
            changed = tensors[ARGUMENTS.index(name)]
            place = [x if x == ALL else x % y for x, y in zip(place, changed.shape)]
            changed[tuple(place)] = value
            actual = run(problem, tensors)
            # No query sees a key after the last of a causal problem.
            is_seen = not problem.is_causal or place[0] < problem.case.m
            for result, index in reached(name, *place, problem.is_causal).items():
                x, y = (xs[RESULTS.index(result)] for xs in (actual, expected))
                if math.isnan(value) and is_seen:
                    self.assertTrue(x[index].isnan().all(), msg=result)
                x[index] = y[index]
            self.assert_bitwise(actual, expected)

        examples = [
            {
                "problem": Problem(sized(*sizes), is_causal=True),
                "name": name,
                "place": (sizes[0] // 2, ALL),
                "value": value,
                "threads": 2,
                "seed": 0,
            }
            for sizes, name, value in product(
                ((5, 5, 3, 4), (40, 3, 9, 8), (100, 100, 16, 3), (600, 600, 16, 16)),
                ARGUMENTS,
                (math.nan, -math.inf),
            )
        ]
        index = st.one_of(st.sampled_from((0, -1, -2)), st.integers(0, 3000))
        for_all(
            prop,
            examples,
            60,
            problem=problems(st.just(())),
            name=st.sampled_from(ARGUMENTS),
            place=st.tuples(index, st.one_of(st.just(ALL), index)),
            value=st.sampled_from((math.nan, math.inf, 3.0)),
            threads=st.integers(1, 3),
            seed=SEEDS,
        )

    @by_dtype
    def test_any_number_of_threads_makes_the_same_bits(self, device, dtype):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())

        def prop(problem, threads, seed):
            tensors = make(problem, dtype, seed)
            torch.set_num_threads(1)
            expected = run(problem, tensors)
            for count in threads:
                torch.set_num_threads(count)
                self.assert_bitwise(run(problem, tensors), expected)

        threads = st.lists(st.integers(2, 7), min_size=1, max_size=3)
        for_all(prop, (), 30, problem=problems(), threads=threads, seed=SEEDS)

    @by_dtype
    def test_any_layout_makes_the_same_bits(self, device, dtype):
        def prop(problem, layouts, seed):
            tensors = make(problem, dtype, seed)
            given = [ALL_LAYOUTS[name](x) for name, x in zip(layouts, tensors)]
            self.assert_bitwise(run(problem, given), run(problem, map(compact, given)))

        layout = st.sampled_from(sorted(ALL_LAYOUTS))
        for_all(
            prop,
            (),
            40,
            problem=problems(st.sampled_from(((1,), (2,), (3, 2)))),
            layouts=st.tuples(*(layout for _ in ARGUMENTS)),
            seed=SEEDS,
        )

    @by_dtype
    def test_a_group_is_alone_what_it_is_in_a_batch(self, device, dtype):
        """A group shares k and v; it has the same bits at any place of any batch."""

        def prop(case, group, is_causal, number, seed):
            case = sized(case.m, case.n, case.d, case.e, *case.batch, group)
            (groups,) = case.batch[:1]
            problem = Problem(case, (groups, 1), is_causal)
            tensors = make(problem, dtype, seed)
            alone = [x[number % groups] for x in tensors]
            expected = [x[number % groups] for x in run(problem, tensors)]
            self.assert_bitwise(run(problem, alone), expected)

        for_all(
            prop,
            (),
            30,
            case=cases(batches=st.tuples(st.sampled_from((1, 2, 3, 6, 13)))),
            group=st.integers(1, 4),
            is_causal=st.booleans(),
            number=st.integers(0, 15),
            seed=SEEDS,
        )

    @by_dtype
    def test_the_masked_part_is_cut_off(self, device, dtype):
        """Of more keys than queries, those after the last query might as well not be there."""

        def prop(case, more, seed):
            problem = Problem(case._replace(n=case.m + more), is_causal=True)
            q, k, v, grad_output = make(problem, dtype, seed)
            output, grad_q, *others = run(problem, (q, k, v, grad_output))
            seen = (q, k[: case.m], v[: case.m], grad_output)
            expected = run(problem, seen)
            for x in others:
                self.assertEqual(x[case.m :], torch.zeros_like(x[case.m :]))
            self.assertEqual([output, grad_q], expected[:2])
            self.assertEqual([x[: case.m] for x in others], expected[2:])

        for_all(
            prop,
            (),
            20,
            derandomize=True,
            case=cases(),
            more=st.integers(0, 400),
            seed=SEEDS,
        )


def run_properties():
    """For a process of its own: the tests above, then a line of JSON on them."""
    print(json.dumps(report_on(__name__, "TestAttnOutputPropertiesCPU")))


class TestAttnOutputPropertiesOfInstructionSets(KernelTestCase):
    @unittest.skipIf(TEST_WITH_ASAN, "run for each of them by itself")
    def test_instruction_sets(self, device):
        for report in self.reports_by_capability(run_properties):
            self.assertGreater(report["tests"], 0)


instantiate_device_type_tests(TestAttnOutputProperties, globals(), only_for="cpu")
instantiate_device_type_tests(
    TestAttnOutputPropertiesOfInstructionSets, globals(), only_for="cpu"
)

if __name__ == "__main__":
    run_tests()
