# Owner(s): ["module: cpu"]

"""attn_output's second derivatives by the CPU's kernel: their bits, and their memory."""

import json
import math
import os
import sys
import tempfile
import unittest
from itertools import product

from test_attn_brgemm import call, compiled, DENSE, multiplies_bfloat16
from test_attn_kernel import (
    by_dtype,
    compact,
    growth,
    in_process,
    KernelTestCase,
    report_on,
)
from test_attn_output import Problem, sized
from test_attn_output_kernel import THREADED
from test_attn_output_second_order import (
    by_given,
    double_backward,
    GIVEN,
    tangent,
    tangents_of,
)
from test_attn_products import CAPABILITY, FLAGS

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import (
    parametrize,
    run_tests,
    TEST_WITH_ASAN,
)


# Without hypothesis, this ends the process.
from test_attn_properties import ALL_LAYOUTS, cases, for_all, SEEDS  # isort: skip
from test_attn_output_properties import problems  # isort: skip

from hypothesis import strategies as st


MASKED = (False, True)
# This computes the second derivatives by oneDNN's products, also where the operator itself
# multiplies otherwise.
BY_BRGEMM = """
#include <ATen/native/cpu/AttnSecondOrderTile.h>

extern "C" void by_brgemm(
    int64_t m, int64_t n, int64_t d, int64_t e, int64_t is_causal, void** x) {
  const Sizes sizes{1, m, n, d, e};
  const Dense<const S> q(x[0], m, d), k(x[1], n, d), v(x[2], n, e), q_tangent(x[3], m, d),
      k_tangent(x[4], n, d), v_tangent(x[5], n, e), grad_output(x[6], m, e);
  const Dense<S> output_tangent(x[7], m, e), grad_q(x[8], m, d), grad_k(x[9], n, d),
      grad_v(x[10], n, e);
  const SecondOrderArgs<S> args{
      {sizes, grad_q, grad_k, grad_v, grad_output, {}, q, k, v, {}, form_of(is_causal, 1.), 1},
      output_tangent, q_tangent, k_tangent, v_tangent};
  backward_by<S, SecondOrderTile<VnniTiles<Brgemm<S>>>>(args, aten_runtime());
}
"""


def growths():
    """For a process of its own: a line of JSON with, for each length, mask and operator, by how
    much it lets memory grow, without its results.
    """
    torch.set_num_threads(2)
    found = []
    for n, is_causal in product((4096, 16384), MASKED):
        problem = Problem(sized(n, n, 64, 64), is_causal=is_causal)
        *inputs, a, b, c, grad_output = (torch.randn(n, 64) / 3 for _ in range(7))
        few = [x[:256] for x in (*inputs, a, b, c, grad_output)]
        SecondOrder.results(problem, few)  # starts the threads
        args = problem, inputs, (a, b, c)
        found.append((n, growth(lambda args=args: tangent(*args))))
        args = *args, grad_output
        found.append((n, growth(lambda args=args: double_backward(*args))))
    print(json.dumps(found))


def with_tests_of(*classes):
    """A decorator of a class that gets the tests of these: those that it inherits would not be
    instantiated for a device.
    """

    def add(cls):
        for of in classes:
            for name, test in vars(of).items():
                if name.startswith("test_"):
                    setattr(cls, name, test)
        return cls

    return add


class SecondOrder:
    """What is computed, and of its tensors which have a row for each query, and for each key."""

    GIVEN = GIVEN
    COUNT = 7  # tensors
    OF_QUERIES, OF_KEYS = (0, 3, 6), (1, 2, 4, 5)

    @staticmethod
    def draw(problem, dtype, seed, given):
        """Inputs, tangents and a gradient of the output."""
        torch.manual_seed(seed)
        inputs, grad_output = problem.make("cpu", dtype)
        return [*inputs, *tangents_of(inputs, given), grad_output]

    @staticmethod
    def results(problem, tensors):
        q, k, v, *tangents, grad_output = tensors
        return double_backward(problem, (q, k, v), tangents, grad_output)


class OneProblem:
    @parametrize("problem", THREADED, name_fn=lambda problem: problem.name)
    @by_dtype
    def test_any_number_of_threads_makes_the_same_bits(self, device, dtype, problem):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        tensors = self.draw(problem, dtype, 0, max(self.GIVEN, key=len))
        torch.set_num_threads(1)
        expected = self.results(problem, tensors)
        for count in (2, 3, 7):
            torch.set_num_threads(count)
            self.assert_bitwise(self.results(problem, tensors), expected)


class Properties:
    @by_dtype
    def test_any_number_of_threads_makes_the_same_bits(self, device, dtype):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())

        def prop(problem, threads, given, seed):
            tensors = self.draw(problem, dtype, seed, given)
            torch.set_num_threads(1)
            expected = self.results(problem, tensors)
            torch.set_num_threads(threads)
            self.assert_bitwise(self.results(problem, tensors), expected)

        for_all(
            prop,
            (),
            30,
            problem=problems(),
            threads=st.integers(2, 7),
            given=st.sampled_from(self.GIVEN),
            seed=SEEDS,
        )

    @by_dtype
    def test_any_layout_makes_the_same_bits(self, device, dtype):
        def prop(problem, layouts, given, seed):
            tensors = self.draw(problem, dtype, seed, given)
            laid = [
                x if x is None else ALL_LAYOUTS[name](x)
                for name, x in zip(layouts, tensors)
            ]
            dense = [x if x is None else compact(x) for x in laid]
            self.assert_bitwise(
                self.results(problem, laid), self.results(problem, dense)
            )

        for_all(
            prop,
            (),
            30,
            problem=problems(st.sampled_from(((1,), (2,), (3, 2)))),
            layouts=st.tuples(
                *(st.sampled_from(sorted(ALL_LAYOUTS)) for _ in range(self.COUNT))
            ),
            given=st.sampled_from(self.GIVEN),
            seed=SEEDS,
        )

    @by_dtype
    def test_a_group_is_alone_what_it_is_in_a_batch(self, device, dtype):
        """A group shares k and v; it has the same bits at any place of any batch."""

        def prop(case, group, is_causal, number, given, seed):
            case = sized(case.m, case.n, case.d, case.e, *case.batch, group)
            (groups,) = case.batch[:1]
            problem = Problem(case, (groups, 1), is_causal)
            tensors = self.draw(problem, dtype, seed, given)
            at = number % groups
            alone = [x if x is None else x[at] for x in tensors]
            expected = [
                x if x is None else x[at] for x in self.results(problem, tensors)
            ]
            self.assert_bitwise(self.results(problem, alone), expected)

        for_all(
            prop,
            (),
            30,
            case=cases(batches=st.tuples(st.sampled_from((1, 2, 3, 6, 13)))),
            group=st.integers(1, 4),
            is_causal=st.booleans(),
            number=st.integers(0, 15),
            given=st.sampled_from(self.GIVEN),
            seed=SEEDS,
        )

    @by_dtype
    def test_a_query_sees_no_later_key(self, device, dtype):
        """If it is causal, what comes after a row reaches no result of rows before it."""
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())

        def prop(case, place, of_keys, value, threads, given, seed):
            problem = Problem(case, is_causal=True)
            tensors = self.draw(problem, dtype, seed, given)
            torch.set_num_threads(1)
            expected = self.results(problem, tensors)
            torch.set_num_threads(threads)
            at = place % (case.n + 1)
            # What belongs to keys reaches rows from `at` on of output_tangent and grad_q; what
            # belongs to queries reaches rows before it of grad_k and grad_v.
            arguments, results = (
                (self.OF_KEYS, (0, 1)) if of_keys else (self.OF_QUERIES, (2, 3))
            )
            changed, others = slice(at, None), slice(0, at)
            if not of_keys:
                changed, others = others, changed
            for i in arguments:
                if tensors[i] is not None:
                    tensors[i][changed] = value
            actual = self.results(problem, tensors)
            for i in results:
                if expected[i] is not None:
                    self.assert_bitwise([actual[i][others]], [expected[i][others]])
            for x in actual[2:]:
                self.assertFalse(x is not None and x[case.m :].any())

        for_all(
            prop,
            (),
            60,
            case=cases(batches=st.just(())),
            place=st.integers(0, 3000),
            of_keys=st.booleans(),
            value=st.sampled_from((math.nan, math.inf, 3.0)),
            threads=st.integers(1, 3),
            given=st.sampled_from(self.GIVEN),
            seed=SEEDS,
        )


@with_tests_of(OneProblem)
class TestAttnOutputSecondOrderKernel(SecondOrder, KernelTestCase):
    @unittest.skipUnless(os.access("/proc/self/clear_refs", os.W_OK), "needs Linux")
    @unittest.skipIf(TEST_WITH_ASAN, "ASan has memory of its own")
    def test_memory(self, device):
        """Memory grows with m + n, not with m n."""
        found, _ = in_process(growths, MALLOC_MMAP_THRESHOLD_=str(2**16))
        for n, size in found:
            # Scratch memory of two threads; tangents beside q and k. A matrix would take 64 MiB
            # and, for the longest, 1 GiB.
            with self.subTest(n=n):
                self.assertLess(size, 2 * 12 * 2**20 + 4 * 4 * 64 * n)

    @by_given
    @by_dtype
    def test_nan_of_a_tangent_reaches_all_rows_that_it_should(
        self, device, dtype, given
    ):
        problem = Problem(sized(130, 97, 9, 8))
        tensors = self.draw(problem, dtype, 0, given)
        for i in range(3, 6):
            if tensors[i] is None:
                continue
            changed = list(tensors)
            changed[i] = tensors[i].clone()
            changed[i][5, 3] = math.nan
            output_tangent, *grads = self.results(problem, changed)
            # A row of q's tangent has a row of output_tangent; a key's has all.
            rows = output_tangent.isnan().any(-1)
            self.assertEqual(rows.sum(), 1 if i == 3 else 130)
            self.assertTrue(grads[1].isnan().any())


@with_tests_of(Properties)
class TestAttnOutputSecondOrderProperties(SecondOrder, KernelTestCase):
    pass


class TestAttnOutputSecondOrderByBrgemm(KernelTestCase):
    @parametrize("plain", (False, True))
    @unittest.skipIf(CAPABILITY not in FLAGS, "another architecture's")
    @unittest.skipIf(sys.platform == "win32", "the compiler's options are GCC's")
    @unittest.skipIf(TEST_WITH_ASAN, "the library has no sanitizer in it")
    def test_values(self, device, plain):
        """Their error is at most one and a half times that of the operator's."""
        if not (plain or multiplies_bfloat16()):
            self.skipTest("oneDNN has no such products here")
        with tempfile.TemporaryDirectory() as folder:
            library = compiled(folder, DENSE + BY_BRGEMM, plain)
            # The operator cuts keys off that are masked for all queries: n is at most m.
            for sizes in ((130, 97, 9, 8), (300, 300, 64, 64), (400, 193, 33, 260)):
                for is_causal in MASKED:
                    problem = Problem(sized(*sizes), (), is_causal)
                    tensors = SecondOrder.draw(problem, torch.bfloat16, 0, GIVEN[-1])
                    found = [
                        torch.empty_like(tensors[i])
                        for i in (6, 0, 1, 2)  # of the output's, q's, k's and v's sizes
                    ]
                    call(library.by_brgemm, (*sizes, is_causal), (*tensors, *found))
                    operators = SecondOrder.results(problem, tensors)
                    exact = SecondOrder.results(problem, [x.double() for x in tensors])
                    for x, y, z in zip(found, operators, exact):
                        with self.subTest(sizes=sizes, is_causal=is_causal):
                            allowed = 1.5 * (y - z).norm()
                            self.assertLessEqual((x - z).norm(), allowed)


def run_properties():
    """For a process of its own: the tests above, then a line of JSON on them."""
    print(json.dumps(report_on(__name__, "TestAttnOutputSecondOrderPropertiesCPU")))


class TestAttnOutputSecondOrderOfInstructionSets(KernelTestCase):
    @unittest.skipIf(TEST_WITH_ASAN, "run for each of them by itself")
    def test_instruction_sets(self, device):
        for report in self.reports_by_capability(run_properties):
            self.assertGreater(report["tests"], 0)


instantiate_device_type_tests(
    TestAttnOutputSecondOrderKernel, globals(), only_for="cpu"
)
instantiate_device_type_tests(
    TestAttnOutputSecondOrderProperties, globals(), only_for="cpu"
)
instantiate_device_type_tests(
    TestAttnOutputSecondOrderByBrgemm, globals(), only_for="cpu"
)
instantiate_device_type_tests(
    TestAttnOutputSecondOrderOfInstructionSets, globals(), only_for="cpu"
)

if __name__ == "__main__":
    run_tests()
