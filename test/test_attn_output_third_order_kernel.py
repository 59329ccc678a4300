# Owner(s): ["module: cpu"]

"""attn_output's third order by the CPU's kernel: its bits, and its memory."""

import json
import os
import unittest
from itertools import product

from test_attn_kernel import growth, in_process, KernelTestCase, report_on
from test_attn_output import Problem, sized
from test_attn_output_second_order_kernel import (
    MASKED,
    OneProblem,
    Properties,
    with_tests_of,
)
from test_attn_output_triple_backward import GIVEN, make, NAMES, triple_backward

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import run_tests, TEST_WITH_ASAN


class ThirdOrder:
    """What is computed, and of its tensors which have a row for each query, and for each key."""

    GIVEN = GIVEN
    COUNT = len(NAMES)
    OF_KEYS = tuple(i for i, name in enumerate(NAMES) if name[-1] in "kv")
    OF_QUERIES = tuple(i for i, name in enumerate(NAMES) if name[-1] not in "kv")

    @staticmethod
    def draw(problem, dtype, seed, given):
        torch.manual_seed(seed)
        return make(problem, "cpu", dtype, given)

    results = staticmethod(triple_backward)


def growths():
    """For a process of its own: a line of JSON with, for each length and mask, by how much the
    operator lets memory grow, without its results.
    """
    torch.set_num_threads(2)
    found = []
    for n, is_causal in product((4096, 16384), MASKED):
        problem = Problem(sized(n, n, 64, 64), is_causal=is_causal)
        tensors = [torch.randn(n, 64) / 3 for _ in NAMES]
        triple_backward(problem, [x[:256] for x in tensors])  # starts the threads
        found.append((n, growth(lambda x=tensors: triple_backward(problem, x))))
    print(json.dumps(found))


@with_tests_of(OneProblem)
class TestAttnOutputThirdOrderKernel(ThirdOrder, KernelTestCase):
    @unittest.skipUnless(os.access("/proc/self/clear_refs", os.W_OK), "needs Linux")
    @unittest.skipIf(TEST_WITH_ASAN, "ASan has memory of its own")
    def test_memory(self, device):
        """Memory grows with m + n, not with m n."""
        found, _ = in_process(growths, MALLOC_MMAP_THRESHOLD_=str(2**16))
        for n, size in found:
            # Scratch memory of two threads; a matrix would take 64 MiB and 1 GiB.
            with self.subTest(n=n):
                self.assertLess(size, 2 * 14 * 2**20 + 4 * 4 * 64 * n)


@with_tests_of(Properties)
class TestAttnOutputThirdOrderProperties(ThirdOrder, KernelTestCase):
    pass


def run_properties():
    """For a process of its own: the tests above, then a line of JSON on them."""
    print(json.dumps(report_on(__name__, "TestAttnOutputThirdOrderPropertiesCPU")))


class TestAttnOutputThirdOrderOfInstructionSets(KernelTestCase):
    @unittest.skipIf(TEST_WITH_ASAN, "run for each of them by itself")
    def test_instruction_sets(self, device):
        for report in self.reports_by_capability(run_properties):
            self.assertGreater(report["tests"], 0)


instantiate_device_type_tests(TestAttnOutputThirdOrderKernel, globals(), only_for="cpu")
instantiate_device_type_tests(
    TestAttnOutputThirdOrderProperties, globals(), only_for="cpu"
)
instantiate_device_type_tests(
    TestAttnOutputThirdOrderOfInstructionSets, globals(), only_for="cpu"
)

if __name__ == "__main__":
    run_tests()
