# Owner(s): ["module: cpu"]

"""The products of attn's CPU kernel by themselves: ATen/native/cpu/AttnFma.h."""

import ctypes
import functools
import os
import random
import sys
import tempfile
import unittest

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TEST_WITH_ASAN,
    TestCase,
)
from torch.utils.cpp_extension import load


# Functions that multiply as the kernel does: by its blocks, with A as it is or transposed in
# memory, or by micro-panels of A. What they read beyond A's rows is NaN: no result may depend on it.
SOURCE = """
#include <ATen/native/cpu/AttnFma.h>

#include <limits>
#include <vector>

namespace {

using namespace at::native::attn_cpu;

struct Strides {
  int64_t row, col;
};

template <typename S>
void multiply(
    int way, bool add, int64_t m, int64_t n, int64_t k, const S* a, Strides a_,
    const S* b, Strides b_, at::opmath_type<S>* c, int64_t ldc) {
  using T = at::opmath_type<S>;
  using Fma = FmaProducts<T>;
  const Matrix<const S> left{a, m, k, a_.row, a_.col}, right{b, k, n, b_.row, b_.col};
  const auto rows = at::round_up(m, Fma::MR);
  const auto nan = std::numeric_limits<T>::quiet_NaN();
  std::vector<T> copy(rows * (k + Fma::MR), nan), panels(Fma::packed_size(k, n), nan);
  if (way == 2) {
    const auto packed = Fma::pack(panels.data(), right);
    Fma::product_by_a_panels(add, left, packed, n, copy.data(), c, ldc);
    return;
  }
  const bool transposed = way == 1;
  const auto lda = transposed ? rows : k;
  copy_rows(copy.data(), lda, transposed ? left.t() : left);
  const typename Fma::Left operand{copy.data(), lda, transposed};
  std::vector<T> acc(Fma::sums_size(n), nan);
  if (Fma::product_in_place(acc.data(), add, m, operand, right, c, ldc)) {
    return;
  }
  const auto b_right = Fma::right(panels.data(), right, m);
  Fma::product_by(acc.data(), add, m, n, operand, b_right, c, ldc);
}

} // namespace

#define PRODUCT(S)                                                                    \\
  extern "C" void product_##S(                                                        \\
      int way, int add, int64_t m, int64_t n, int64_t k, const void* a, int64_t a_row, \\
      int64_t a_col, const void* b, int64_t b_row, int64_t b_col, void* c,            \\
      int64_t ldc) {                                                                  \\
    multiply<S>(                                                                      \\
        way, add, m, n, k, static_cast<const S*>(a), {a_row, a_col},                  \\
        static_cast<const S*>(b), {b_row, b_col},                                     \\
        static_cast<at::opmath_type<S>*>(c), ldc);                                    \\
  }
using bfloat16 = at::BFloat16;
PRODUCT(float)
PRODUCT(double)
PRODUCT(bfloat16)
using half = at::Half;
PRODUCT(half)
"""
FLAGS = {
    "DEFAULT": [],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"],
    "SVE256": ["-march=armv8-a+sve", "-msve-vector-bits=256", "-DCPU_CAPABILITY_SVE"],
}
CAPABILITY = torch.backends.cpu.get_cpu_capability().replace("NO AVX", "DEFAULT")
# Sizes at which a vector, a micro-panel of A or B, or a part of the sum ends, and some that
# are far from it.
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 49, 95, 96, 97, 200)
NAMES = {
    torch.float: "float",
    torch.double: "double",
    torch.bfloat16: "bfloat16",
    torch.half: "half",
}
WAYS = ("blocks", "transposed", "a_panels")


def strided(x, transposed, rng):
    """A copy of x whose rows, or columns, are some way apart."""
    x = x.mT if transposed else x
    room = torch.full((x.shape[0], x.shape[1] + rng.randrange(4)), float("nan"))
    copy = room.to(x.dtype)[:, : x.shape[1]].copy_(x)
    return copy.mT if transposed else copy


@functools.cache
def library(name, text):
    """C++, compiled for the instruction set that the kernel uses."""
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, f"{name}.cpp")
        with open(source, "w") as file:
            file.write(text)
        capability = [
            f"-DCPU_CAPABILITY={CAPABILITY}",
            f"-DCPU_CAPABILITY_{CAPABILITY}",
        ]
        load(
            name,
            [source],
            extra_cflags=["-O1", "-w", *capability, *FLAGS[CAPABILITY]],
            build_directory=folder,
            is_python_module=False,
        )
        return ctypes.CDLL(os.path.join(folder, f"{name}.so"))


@unittest.skipIf(CAPABILITY not in FLAGS, "another architecture's")
@unittest.skipIf(sys.platform == "win32", "the compiler's options are GCC's")
@unittest.skipIf(TEST_WITH_ASAN, "the library has no sanitizer in it")
class TestAttnProducts(TestCase):
    def assert_product(self, dtype, way, add, m, n, k, transposed, rng):
        """All sums are exact; what is not C stays as it is."""
        a, b = (torch.randint(-4, 5, size).to(dtype) for size in ((m, k), (k, n)))
        a, b = (strided(x, t, rng) for x, t in zip((a, b), transposed))
        wide = torch.double if dtype == torch.double else torch.float
        room = torch.full((m, n + rng.randrange(20)), 7.0, dtype=wide)
        expected = room.clone()
        product = a.double() @ b.double()
        expected[:, :n] = product + 7 if add else product
        arguments = (
            *(ctypes.c_int(x) for x in (WAYS.index(way), add)),
            *(ctypes.c_int64(x) for x in (m, n, k)),
            *(
                y
                for x in (a, b)
                for y in (
                    ctypes.c_void_p(x.data_ptr()),
                    *map(ctypes.c_int64, x.stride()),
                )
            ),
            ctypes.c_void_p(room.data_ptr()),
            ctypes.c_int64(room.stride(0)),
        )
        products = library("attn_products", SOURCE)
        getattr(products, f"product_{NAMES[dtype]}")(*arguments)
        self.assertEqual(room, expected, rtol=0, atol=0)

    @parametrize("way", WAYS)
    @parametrize("dtype", tuple(NAMES))
    def test_product(self, dtype, way):
        seed = random.SystemRandom().randrange(10**6)
        rng = random.Random(seed)
        for _ in range(1500):
            m, n = (rng.choice(SIZES) for _ in range(2))
            k = rng.choice((1, 2, 3, 8, 31, 32, 33, 65, 288))
            add, *transposed = (rng.random() < 0.5 for _ in range(3))
            with self.subTest(seed=seed, m=m, n=n, k=k, add=add, transposed=transposed):
                self.assert_product(dtype, way, add, m, n, k, transposed, rng)


instantiate_parametrized_tests(TestAttnProducts)

if __name__ == "__main__":
    run_tests()
