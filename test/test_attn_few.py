# Owner(s): ["module: cpu"]

"""Products of few rows or columns in attn's CPU kernel: ATen/native/cpu/AttnScores.h, AttnDot.h,
AttnFewColumns.h and AttnOneRow.h."""

import ctypes
import random
import sys
import unittest

from test_attn_products import CAPABILITY, FLAGS, library, NAMES, SIZES, strided

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TEST_WITH_ASAN,
    TestCase,
)


# Each function writes c, m x n, or returns 0 if it does not take these sizes. `scores` multiplies
# twice, as for two tiles of the same keys.
SOURCE = """
#include <ATen/native/cpu/AttnFewColumns.h>
#include <ATen/native/cpu/AttnOneRow.h>
#include <ATen/native/cpu/AttnScores.h>

#include <vector>

namespace {

using namespace at::native::attn_cpu;

// a bᵀ
template <typename S, typename T>
int scores(const Matrix<const S>& a, const Matrix<const S>& b, T* c, int64_t n) {
  ScratchLayout scratch;
  const typename Scores<S>::Layout layout(scratch, a.rows, a.rows, n, a.cols, true, 0);
  std::vector<T> memory(scratch.size() + 64), tile(tile_size<T>(a.rows, n));
  Scores<S> products(layout, memory.data());
  const auto ld = tile_ld<T>(n);
  for (const bool next : {false, true}) {
    std::fill(tile.begin(), tile.end(), T(7));
    products.product(next, a, b, tile.data(), ld);
  }
  copy_rows(c, n, Matrix<const T>{tile.data(), a.rows, n, ld, 1});
  return 1;
}

// A copy of a as a tile, which may be transposed.
template <typename S, typename T>
typename FmaProducts<T>::Left tile_of(std::vector<T>& tile, const Matrix<const S>& a, bool t) {
  const auto x = t ? a.t() : a;
  const auto ld = tile_ld<T>(x.cols);
  tile.resize(tile_size<T>(x.rows, x.cols));
  copy_rows(tile.data(), ld, x);
  clear_edges(tile.data(), x.rows, x.cols, ld);
  return {tile.data(), ld, t};
}

// c (+)= a b
template <typename S, typename T>
int few(
    bool add, bool t, const Matrix<const S>& a, const Matrix<const S>& b, T* c) {
  if (!FewColumns<T>::fits(b.cols)) {
    return 0;
  }
  ScratchLayout scratch;
  const typename FewColumns<T>::Layout layout(scratch, std::max(a.rows, a.cols));
  std::vector<T> memory(scratch.size() + 64), tile;
  FewColumns<T>(layout, memory.data()).product(add, a.rows, tile_of(tile, a, t), b, c);
  return 1;
}

template <typename S, typename T>
int row(bool add, bool t, const Matrix<const S>& a, const Matrix<const S>& b, T* c) {
  std::vector<T> panels(b.rows * b.cols), acc(b.cols), tile;
  return a.rows == 1 &&
      product_of_row(panels.data(), acc.data(), add, tile_of(tile, a, t), b, c);
}

} // namespace

#define FEW(S)                                                                          \\
  extern "C" int multiply_##S(                                                          \\
      int way, int add, int t, int64_t m, int64_t n, int64_t k, const S* a,             \\
      int64_t a_row, int64_t a_col, const S* b, int64_t b_row, int64_t b_col, void* to) { \\
    auto* c = static_cast<at::opmath_type<S>*>(to);                                     \\
    const Matrix<const S> left{a, m, k, a_row, a_col}, right{b, k, n, b_row, b_col};    \\
    return way == 0 ? scores<S>(left, right.t(), c, n)                                  \\
        : way == 1  ? few<S>(add, t, left, right, c)                                    \\
                    : row<S>(add, t, left, right, c);                                   \\
  }
using bfloat16 = at::BFloat16;
using half = at::Half;
FEW(float)
FEW(double)
FEW(bfloat16)
FEW(half)
"""
# How many rows or columns there are for each way.
ROWS = {"scores": SIZES, "few_columns": SIZES, "one_row": (1,)}
COLUMNS = {"scores": SIZES, "few_columns": range(1, 9), "one_row": (63, 64, 65, 200)}
TERMS = (1, 2, 3, 8, 31, 32, 33, 65, 288, 300)


@unittest.skipIf(CAPABILITY not in FLAGS, "another architecture's")
@unittest.skipIf(sys.platform == "win32", "the compiler's options are GCC's")
@unittest.skipIf(TEST_WITH_ASAN, "the library has no sanitizer in it")
class TestAttnFew(TestCase):
    def taken(self, dtype, way, add, transposed_tile, m, n, k, transposed, rng):
        """Whether the way takes these sizes. Then the product, whose sums are exact, is right."""
        a, b = (torch.randint(-4, 5, size).to(dtype) for size in ((m, k), (k, n)))
        a, b = (strided(x, t, rng) for x, t in zip((a, b), transposed))
        wide = torch.double if dtype == torch.double else torch.float
        found = torch.full((m, n), 7.0, dtype=wide)
        operands = (
            y
            for x in (a, b)
            for y in (ctypes.c_void_p(x.data_ptr()), *map(ctypes.c_int64, x.stride()))
        )
        taken = getattr(library("attn_few", SOURCE), f"multiply_{NAMES[dtype]}")(
            *map(ctypes.c_int, (tuple(ROWS).index(way), add, transposed_tile)),
            *map(ctypes.c_int64, (m, n, k)),
            *operands,
            ctypes.c_void_p(found.data_ptr()),
        )
        if taken:
            product = a.double() @ b.double()
            expected = product + 7 if add and way != "scores" else product
            self.assertEqual(found, expected.to(wide), rtol=0, atol=0)
        return taken

    @parametrize("way", tuple(ROWS))
    @parametrize("dtype", tuple(NAMES))
    def test_product(self, dtype, way):
        seed = random.SystemRandom().randrange(10**6)
        rng = random.Random(seed)
        taken = 0
        for _ in range(1000):
            m, n, k = (rng.choice(x) for x in (ROWS[way], COLUMNS[way], TERMS))
            add, tile, *transposed = (rng.random() < 0.5 for _ in range(4))
            with self.subTest(seed=seed, m=m, n=n, k=k, add=add, transposed=transposed):
                taken += self.taken(dtype, way, add, tile, m, n, k, transposed, rng)
        # A row of lower precision is read in place, by the micro-kernel.
        low = dtype in (torch.bfloat16, torch.half)
        self.assertEqual(taken > 0, not (way == "one_row" and low))


instantiate_parametrized_tests(TestAttnFew)

if __name__ == "__main__":
    run_tests()
