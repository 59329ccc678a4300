# Owner(s): ["module: intel"]

"""attn in bfloat16 and half by oneDNN's products: what it asks of them, and how many it keeps."""

import json
import os
import random
import sys
import tempfile
import unittest
from functools import partial

from test_attn_kernel import (
    both_ways,
    by_edge,
    EDGES,
    in_process,
    KernelTestCase,
    printed_by,
    run_edges,
    sized,
)

import torch
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_utils import IS_LINUX, run_tests, TEST_WITH_ASAN


aten = torch.ops.aten
# How many kernels cpublas keeps for each thread and dtype.
MAX_KERNELS = 20
# What sizes of products the kernel asks brgemm for: how many, and a line for each product
# of which a part is missing, twice there, or cut otherwise than with other rows.
SIZES = """
#include <ATen/native/cpu/AttnBrgemm.h>

#include <cstdio>
#include <set>
#include <tuple>
#include <vector>

int main() {
  std::set<std::tuple<int64_t, int64_t, int64_t, bool>> kernels;
  for (int64_t terms = 1; terms <= 1100; ++terms) {
    std::vector<int64_t> cuts; // of one row
    for (int64_t rows = 1; rows <= at::native::attn_cpu::BRGEMM_ROWS[0]; ++rows) {
      std::vector<std::vector<int64_t>> of_row(rows);
      std::vector<int64_t> end(rows, 0);
      bool in_order = true;
      at::native::attn_cpu::for_brgemm_parts(
          rows,
          terms,
          [&](const at::native::attn_cpu::BrgemmSizes& sizes, int64_t row, int64_t term) {
            kernels.emplace(sizes.rows, sizes.cols, sizes.terms, term > 0);
            for (int64_t r = row; r < std::min(rows, row + sizes.rows); ++r) {
              in_order = in_order && end[r] == term;
              end[r] += sizes.terms;
              of_row[r].push_back(term);
            }
          });
      if (rows == 1) {
        cuts = of_row[0];
      }
      for (int64_t r = 0; r < rows; ++r) {
        if (!in_order || end[r] < terms || of_row[r] != cuts) {
          std::printf("%d x %d\\n", int(rows), int(terms));
          break;
        }
      }
    }
  }
  std::printf("%d\\n", int(kernels.size()));
}
"""
# Which products the kernel takes for one with a right operand in VNNI layout.
PRODUCTS = """
#include <ATen/native/cpu/AttnBrgemm.h>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdio>
#include <stdexcept>

// sums (+)= a x for x(p, j)
template <typename S, typename F>
static void multiply(
    at::native::attn_cpu::BrgemmSizes sizes, bool add, const S* a, float* sums, const F& x) {
  for (int64_t i = 0; i < sizes.rows; ++i) {
    for (int64_t j = 0; j < sizes.cols; ++j) {
      float& sum = sums[i * at::native::attn_cpu::BRGEMM_LD + j];
      sum = add ? sum : 0;
      for (int64_t p = 0; p < sizes.terms; ++p) {
        sum += float(a[i * at::native::attn_cpu::BRGEMM_LD + p]) * float(x(p, j));
      }
    }
  }
}

template <typename S>
static void print() {
  using Sizes = at::native::attn_cpu::BrgemmSizes;
  const auto vnni = [](Sizes n, bool add, const S* a, const S* x, float* y) {
    multiply(n, add, a, y, [&](int64_t p, int64_t j) {
      return x[p / 2 * 2 * n.cols + 2 * j + p % 2];
    });
  };
  const auto plain = [](Sizes n, bool add, const S* a, const S* x, float* y) {
    multiply(n, add, a, y, [&](int64_t p, int64_t j) { return x[p * n.cols + j]; });
  };
  const auto sets = [&](Sizes n, bool, const S* a, const S* x, float* y) {
    vnni(n, false, a, x, y);
  };
  const auto adds = [&](Sizes n, bool, const S* a, const S* x, float* y) {
    vnni(n, true, a, x, y);
  };
  const auto nothing = [](Sizes, bool, const S*, const S*, float*) {};
  const auto zeros = [](Sizes n, bool, const S*, const S*, float* y) {
    std::fill_n(y, n.rows * at::native::attn_cpu::BRGEMM_LD, 0.0f);
  };
  const auto fails = [](Sizes, bool, const S*, const S*, float*) {
    throw std::runtime_error("no such instruction");
  };
  using at::native::attn_cpu::multiplies_vnni;
  std::printf(
      "%d %d %d %d %d %d %d\\n",
      multiplies_vnni<S>(vnni),
      multiplies_vnni<S>(plain),
      multiplies_vnni<S>(sets),
      multiplies_vnni<S>(adds),
      multiplies_vnni<S>(nothing),
      multiplies_vnni<S>(zeros),
      multiplies_vnni<S>(fails));
}

int main() {
  print<at::BFloat16>();
  print<at::Half>();
}
"""


def kernels(seed=0):
    """For a process of its own: prints how many kernels oneDNN makes for many shapes."""
    torch.set_num_threads(1)  # each has kernels of its own
    sizes = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # where oneDNN writes them to
        for _ in range(200):
            m, n = sizes.randrange(16, 700), sizes.randrange(32, 700)
            d, e = (sizes.choice((64, sizes.randrange(16, 1025))) for _ in "de")
            q, k, v = (
                torch.zeros(*size, dtype=torch.bfloat16)
                for size in ((m, d), (n, d), (n, e))
            )
            both_ways(q, k, v, *torch.attn(q, k, v), torch.attn(q, k, v).attn)
        made = sum(file.startswith("dnnl_dump") for file in os.listdir(folder))
        os.chdir("/")
    print(json.dumps(made))


class TestAttnBrgemm(KernelTestCase):
    # What oneDNN multiplies in these dtypes, where it can, the kernel can as well.
    @by_edge
    @dtypes(torch.bfloat16, torch.half)
    def test_without_onednn(self, device, dtype, case):
        with torch.backends.mkldnn.flags(enabled=False):
            self.assert_results(dtype, case)
            self.assert_exact(dtype, case)

    @dtypes(torch.bfloat16, torch.half)
    def test_sums_without_terms(self, device, dtype):
        for m, n, d, e in ((20, 30, 0, 5), (20, 30, 5, 0), (40, 300, 0, 64)):
            with self.subTest(m=m, n=n, d=d, e=e):
                self.assert_results(
                    dtype, sized(m, n, 64, 64)
                )  # memory is not zero then
                self.assert_results(dtype, sized(m, n, d, e))

    @dtypes(torch.bfloat16, torch.half)
    def test_every_number(self, device, dtype):
        """Each of the 2**16, NaNs with any payload among them, is itself after rounding."""
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)[:, None]
        finfo = torch.finfo(dtype)
        # By FMA and, where it can, by oneDNN. All columns but the first are zeros.
        for n, width in ((1, 1), (32, 32)):
            with self.subTest(n=n):
                padded = partial(torch.nn.functional.pad, pad=(0, width - 1))
                q, attn = padded(numbers), numbers.new_zeros(2**16, n)
                k = padded(torch.full((n, 1), 1 / n, dtype=dtype))
                gradients = numbers.expand(-1, n)
                grad_q, _, _ = aten._attn_backward(
                    None, gradients, q, k, k, attn, (True, False, False)
                )
                # Where oneDNN multiplies, subnormal products are zero.
                atol = n * finfo.smallest_normal if n > 1 else 0
                self.assertEqual(grad_q[:, :1], numbers, rtol=0, atol=atol)
                _, attn = torch.attn(q, padded(torch.ones_like(k[:, :1])), k)
                self.assertEqual(attn.isnan(), gradients.isnan())

    @unittest.skipIf(TEST_WITH_ASAN, "too slow with ASan")
    def test_cpu_without_bfloat16(self, device):
        """oneDNN has AVX-512 then, but no kernel for bfloat16."""
        report, log = in_process(run_edges, ONEDNN_MAX_CPU_ISA="AVX512_CORE")
        self.assertGreater(report["tests"], 5 * len(EDGES))
        self.assertTrue(report["passed"], msg=log)

    # Which right operand oneDNN takes depends on the machine, of which there may be none
    # here. On one with instructions for half, but not those of AMX, it is not in VNNI layout.
    @unittest.skipIf(sys.platform == "win32", "the linker's options are those of ELF")
    def test_which_products_are_in_vnni(self, device):
        printed = printed_by("products", PRODUCTS)
        self.assertEqual(printed, 2 * "1 0 0 0 0 0 0\n")

    @unittest.skipIf(sys.platform == "win32", "the linker's options are those of ELF")
    def test_few_sizes(self, device):
        self.assertLessEqual(int(printed_by("sizes", SIZES)), MAX_KERNELS)

    # cpublas keeps a kernel for each set of sizes and strides as long as the thread lives.
    @unittest.skipUnless(IS_LINUX, "/proc")
    def test_few_kernels(self, device):
        made, _ = in_process(kernels, ONEDNN_JIT_DUMP="1")
        self.assertLessEqual(made, MAX_KERNELS)
        with open("/proc/cpuinfo") as file:
            said = file.read()
        pays = "amx_bf16" in said or "sse4a" in said
        if (
            "avx512_bf16" in said
            and pays
            and torch.backends.mkldnn.is_available()
            and torch.backends.cpu.get_cpu_capability() == "AVX512"
        ):
            self.assertGreater(made, 0)


instantiate_device_type_tests(TestAttnBrgemm, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
