# Owner(s): ["module: cpu"]

"""attn_output by the CPU's kernel: its bits, and its memory."""

import json
import math
import os
import struct
import sys
import tempfile
import unittest
from functools import partial
from itertools import product

from test_attn import AttnTestCase, BATCH_LAYOUTS, LAYOUTS
from test_attn_brgemm import call, compiled, DENSE
from test_attn_kernel import compact, growth, in_process, printed_by
from test_attn_output import both_ways, Problem, sized, SIZES
from test_attn_products import CAPABILITY, FLAGS

import torch
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_utils import (
    parametrize,
    run_tests,
    slowTest,
    TEST_WITH_ASAN,
)


THREADED = (
    Problem(sized(1000, 1100, 20, 30)),
    Problem(sized(1000, 1100, 20, 30), is_causal=True),
    Problem(sized(20, 9000, 20, 30), is_causal=True),
    Problem(sized(5, 9000, 20, 30)),
    Problem(sized(9000, 5, 20, 30)),
    Problem(sized(300, 301, 20, 30, 2, 5), (2, 1), True),
    Problem(sized(300, 301, 20, 30, 4, 3), (1, 3)),
    Problem(sized(30, 31, 20, 30, 40, 3), (40, 1), True),
)
# The backward by products of pairs, for which PLAIN of test_attn_brgemm.py stands in.
BACKWARD = """
extern "C" void backward(
    int64_t m, int64_t n, int64_t d, int64_t e, int64_t is_causal, void** x) {
  const Sizes sizes{1, m, n, d, e};
  const Dense<const S> q(x[0], m, d), k(x[1], n, d), v(x[2], n, e), grad_output(x[3], m, e);
  const Dense<S> grad_q(x[4], m, d), grad_k(x[5], n, d), grad_v(x[6], n, e);
  const BackwardArgs<S> args{
      sizes, grad_q, grad_k, grad_v, grad_output, {}, q, k, v, {}, form_of(is_causal, 0.5), 1};
  backward_by<S, BackwardTile<VnniTiles<Brgemm<S>>>>(args, aten_runtime());
}
"""
# Prints the bits that the kernel's scale has in float.
SCALE = """
#include <ATen/native/cpu/AttnMatrix.h>

#include <cstdio>
#include <cstring>

int main() {
  double given = 0;
  for (uint64_t bits = 0; std::scanf("%lx", &bits) == 1;) {
    std::memcpy(&given, &bits, sizeof(given));
    const auto scale = static_cast<float>(at::native::attn_cpu::form_of(false, given).scale);
    uint32_t found = 0;
    std::memcpy(&found, &scale, sizeof(found));
    std::printf("%x\\n", found);
  }
}
"""
LENGTHS = (4096, 8192, 16384)
MASKS = (False, True)
MEMORY_DTYPES = (torch.float, torch.bfloat16)


def growths(lengths=LENGTHS):
    """For a process of its own: a line of JSON with, for each length, mask and dtype, by how much
    a training step lets memory grow, without its results.
    """
    torch.set_num_threads(2)
    found = []
    for n, is_causal, dtype in product(lengths, MASKS, MEMORY_DTYPES):
        problem = Problem(sized(n, n, 64, 64), is_causal=is_causal)
        # problem.make would make a gradient of attn, too.
        *inputs, grad_output = (torch.randn(n, 64, dtype=dtype) / 3 for _ in range(4))
        run = partial(both_ways, torch.attn_output, problem)
        run([x[:256] for x in inputs], grad_output[:256])  # starts the threads
        found.append((n, growth(lambda: run(inputs, grad_output))))
    print(json.dumps(found))


def growths_of_long_sequences():
    growths((65536,))


class TestAttnOutputKernel(AttnTestCase):
    @parametrize("case", SIZES, name_fn=lambda case: case.name)
    @dtypes(torch.float, torch.double)
    def test_same_bits_as_attn(self, device, dtype, case):
        """The backward makes the same attn again that attn's forward keeps."""
        problem = Problem(case, case.batch)
        inputs, grad_output = problem.make(device, dtype)
        actual = both_ways(torch.attn_output, problem, inputs, grad_output)

        def attn(*inputs, **options):
            return torch.attn(*inputs).output

        self.assert_bitwise(actual, both_ways(attn, problem, inputs, grad_output))

    @parametrize("problem", THREADED, name_fn=lambda problem: problem.name)
    @dtypes(torch.float, torch.double, torch.bfloat16, torch.half)
    def test_any_number_of_threads_makes_the_same_bits(self, device, dtype, problem):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        inputs, grad_output = problem.make(device, dtype)
        torch.set_num_threads(1)
        expected = both_ways(torch.attn_output, problem, inputs, grad_output)
        for count in (2, 3, 7):
            torch.set_num_threads(count)
            actual = both_ways(torch.attn_output, problem, inputs, grad_output)
            self.assert_bitwise(actual, expected)

    @dtypes(torch.float, torch.bfloat16)
    def test_memory_is_used_again(self, device, dtype):
        """What is in memory from before is not in the results, masked blocks or not."""
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        for shape, threads in product(((600, 700), (400, 193), (97, 5)), (1, 2)):
            problem = Problem(sized(*shape, 9, 20), is_causal=True)
            inputs, grad_output = problem.make(device, dtype)
            torch.set_num_threads(threads)
            run = partial(both_ways, torch.attn_output, problem)
            expected = run(inputs, grad_output)
            nan = [torch.full_like(x, math.nan) for x in (*inputs, grad_output)]
            for _ in range(3):  # so that malloc keeps its memory
                run(nan[:3], nan[3])
            self.assert_bitwise(run(inputs, grad_output), expected)
            for x in expected:
                self.assertTrue(x.isfinite().all())

    @parametrize("layout", (*LAYOUTS, *BATCH_LAYOUTS))
    @dtypes(torch.float, torch.bfloat16)
    def test_any_layout_makes_the_same_bits(self, device, dtype, layout):
        change = (LAYOUTS | BATCH_LAYOUTS)[layout]
        for shape in ((27, 301, 35, 37), (3, 4, 5, 6), (300, 4, 9, 8)):
            problem = Problem(sized(*shape, 3), (3,), True, 0.5)
            inputs, grad_output = problem.make(device, dtype)
            given = [change(x) for x in (*inputs, grad_output)]
            *inputs, grad_output = given
            actual = both_ways(torch.attn_output, problem, inputs, grad_output)
            *inputs, grad_output = map(compact, given)
            expected = both_ways(torch.attn_output, problem, inputs, grad_output)
            self.assert_bitwise(actual, expected)

    @dtypes(torch.float, torch.bfloat16)
    def test_a_group_is_alone_what_it_is_in_a_batch(self, device, dtype):
        for m, n in ((3, 4), (130, 97), (300, 600)):
            problem = Problem(sized(m, n, 9, 8, 20, 3), (20, 1), True)
            inputs, grad_output = problem.make(device, dtype)
            every = both_ways(torch.attn_output, problem, inputs, grad_output)
            for few in (slice(7, 8), slice(5, 9)):
                one = both_ways(
                    torch.attn_output,
                    problem,
                    [x[few] for x in inputs],
                    grad_output[few],
                )
                self.assert_bitwise(one, [x[few] for x in every])

    @dtypes(torch.float, torch.double, torch.bfloat16, torch.half)
    def test_a_scale_that_is_nan(self, device, dtype):
        """NaN of any bits makes NaN, though rounding adds to the bits."""
        for bits in (0x7FF8 << 48, 0x7FFF_FFFF_FFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF):
            (scale,) = struct.unpack("d", struct.pack("Q", bits))
            for rows in (2, 5, 40):
                problem = Problem(sized(rows, rows, 8, 8), scale=scale)
                inputs, grad_output = problem.make(device, dtype)
                for x in both_ways(torch.attn_output, problem, inputs, grad_output):
                    self.assertTrue(x.isnan().all())

    @unittest.skipIf(sys.platform == "win32", "the compiler's options are GCC's")
    def test_bits_of_the_scale(self, device):
        given = "3fe0000000000000 7fffffffffffffff ffffffffffffffff"
        found = printed_by("scale", SCALE, given)
        self.assertEqual(found.split(), ["3f000000", "7fc00000", "7fc00000"])

    @dtypes(torch.float)
    def test_expanded_heads_have_the_same_bits(self, device, dtype):
        problem = Problem(sized(50, 60, 9, 8, 2, 3), (2, 1))
        (q, k, v), _ = problem.make(device, dtype)
        expanded = k.expand(2, 3, 60, 9), v.expand(2, 3, 60, 8)
        self.assert_bitwise(
            [torch.attn_output(q, k, v)], [torch.attn_output(q, *expanded)]
        )

    @unittest.skipIf(CAPABILITY not in FLAGS, "another architecture's")
    @unittest.skipIf(sys.platform == "win32", "the compiler's options are GCC's")
    @unittest.skipIf(TEST_WITH_ASAN, "the library has no sanitizer in it")
    def test_backward_by_pairs(self, device):
        """Its error is at most one and a half times that of the operator's."""
        with tempfile.TemporaryDirectory() as folder:
            library = compiled(folder, DENSE + BACKWARD, plain=True)
            # The operator cuts keys off that are masked for all queries: n is at most m.
            for sizes in ((130, 97, 9, 8), (300, 289, 20, 33)):
                for is_causal in MASKS:
                    problem = Problem(sized(*sizes), (), is_causal, 0.5)
                    inputs, grad_output = problem.make(device, torch.bfloat16)
                    found = [torch.empty_like(x) for x in inputs]
                    given = *inputs, grad_output, *found
                    call(library.backward, (*sizes, is_causal), given)
                    wide = [x.double() for x in (*inputs, grad_output)]
                    run = partial(both_ways, torch.attn_output, problem)
                    _, *operators = run(inputs, grad_output)
                    _, *exact = run(wide[:3], wide[3])
                    for x, y, z in zip(found, operators, exact):
                        with self.subTest(sizes=sizes, is_causal=is_causal):
                            allowed = 1.5 * (y - z).norm()
                            self.assertLessEqual((x - z).norm(), allowed)
                    if not is_causal:
                        continue
                    # A NaN that is masked reaches nothing, as in the operator.
                    for i in range(4):
                        changed = [x.clone() for x in (*inputs, grad_output)]
                        changed[i][sizes[1] // 2] = math.nan
                        again = [torch.empty_like(x) for x in inputs]
                        call(library.backward, (*sizes, True), (*changed, *again))
                        _, *operators = run(changed[:3], changed[3])
                        for x, y, before in zip(again, operators, found):
                            with self.subTest(sizes=sizes, argument=i):
                                kept = ~y.isnan()
                                self.assertEqual(x.isnan(), y.isnan())
                                self.assert_bitwise([x[kept]], [before[kept]])

    def assert_memory_is_bounded(self, measure):
        found, _ = in_process(measure, MALLOC_MMAP_THRESHOLD_=str(2**16))
        for n, size in found:
            # Scratch memory of two threads, and sums in float of the gradients. The matrix would
            # take 32 MiB and more, and for the longest 512.
            with self.subTest(n=n):
                self.assertLess(size, 2 * 12 * 2**20 + 3 * 4 * 64 * n)

    @unittest.skipUnless(os.access("/proc/self/clear_refs", os.W_OK), "needs Linux")
    @unittest.skipIf(TEST_WITH_ASAN, "ASan has memory of its own")
    def test_memory(self, device):
        """A step's memory grows with m + n, not with m n."""
        self.assert_memory_is_bounded(growths)

    @slowTest
    @unittest.skipUnless(os.access("/proc/self/clear_refs", os.W_OK), "needs Linux")
    @unittest.skipIf(TEST_WITH_ASAN, "ASan has memory of its own")
    def test_memory_of_long_sequences(self, device):
        self.assert_memory_is_bounded(growths_of_long_sequences)


instantiate_device_type_tests(TestAttnOutputKernel, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
