# Owner(s): ["module: cpu"]

"""Which way attn's CPU kernel takes for which sizes: ATen/native/cpu/AttnKernels.h. It computes
with no number that it has not written."""

import ctypes
import itertools
import random
import sys
import unittest

from test_attn_products import CAPABILITY, FLAGS, library, NAMES

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    IS_X86,
    parametrize,
    run_tests,
    TEST_WITH_ASAN,
    TestCase,
)


# way() says in words which way the kernel takes. denormals() runs it with scratch memory full
# of denormal numbers, and returns whether the processor has computed with such a number.
SOURCE = """
#include <ATen/native/cpu/AttnKernels.h>

#include <cstdlib>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

using namespace at::native::attn_cpu;

std::vector<size_t> allocated;
int64_t threads = 1;

const Runtime runtime{
    [](double) { return threads; },
    [](int64_t count, void (*task)(void*, int64_t), void* context) {
      for (int64_t i = 0; i < count; ++i) {
        task(context, i);
      }
    },
    [](size_t bytes) {
      allocated.push_back(bytes);
      const auto size = at::round_up<size_t>(bytes + 1, 64);
      auto* memory = std::aligned_alloc(64, size);
      // A denormal double, and two denormal floats.
      std::fill_n(static_cast<uint64_t*>(memory), size / 8, (uint64_t(1) << 40) + (1 << 20));
      return memory;
    },
    std::free};

// A matrix of eighths between -1/4 and 1/4.
template <typename S>
struct Values {
  std::vector<S> data;
  int64_t sizes[2], strides[2];

  Values(int64_t rows, int64_t cols) : sizes{rows, cols}, strides{cols, 1} {
    for (int64_t i = 0; i < rows * cols; ++i) {
      data.push_back(static_cast<S>(static_cast<float>(i * i % 5 - 2) / 8));
    }
    data.resize(data.size() + 1);
  }
  template <typename X>
  operator MatrixBatch<X>() {
    return {data.data(), sizes, strides, 2};
  }
};

template <typename S>
struct Problem {
  Sizes sizes;
  Values<S> q, k, v, output, attn;

  explicit Problem(const Sizes& s)
      : sizes(s), q(s.m, s.d), k(s.n, s.d), v(s.n, s.e), output(s.m, s.e), attn(s.m, s.n) {}
  void run_forward() {
    forward(ForwardArgs<S>{sizes, output, attn, q, k, v}, runtime);
  }
  void run_backward() {
    Values<S> grad_q = q, grad_k = k, grad_v = v, grad_attn = attn;
    backward(
        BackwardArgs<S>{sizes, grad_q, grad_k, grad_v, output, grad_attn, q, k, v, attn},
        runtime);
  }
};

// Where FMA sums the output, by `count` threads with at most 24 rows each.
template <typename S>
std::string sums(const Sizes& sizes, int64_t count) {
  using T = at::opmath_type<S>;
  threads = count;
  allocated.clear();
  Problem<S> problem(sizes);
  const ForwardArgs<S> args{
      sizes, problem.output, problem.attn, problem.q, problem.k, problem.v};
  forward_by<S, ForwardTile<FmaTiles<S>>>(args, runtime);
  threads = 1;
  const auto [batch, m, n, d, e] = sizes;
  const typename ForwardTile<FmaTiles<S>>::Layout layout(24, m, n, d, e);
  const auto direct = count * at::round_up<size_t>(layout.size, 64) * sizeof(T);
  return allocated.at(2) > 0 ? "blocks" : allocated.at(0) > direct ? "own" : "direct";
}

// How a product with x (n x e) reads it, for m rows.
template <typename S>
std::string right(int64_t m, int64_t n, int64_t e, bool transposed) {
  using T = at::opmath_type<S>;
  using Fma = FmaProducts<T>;
  if (FewColumns<T>::fits(e)) {
    return "few columns";
  }
  Values<S> values(n, e);
  Matrix<const S> x{values.data.data(), n, e, e, 1};
  x = transposed ? Matrix<const S>{x.data, n, e, 1, n} : x;
  std::vector<T> a(at::round_up(m, Fma::MR) * n), panels(Fma::packed_size(n, e));
  std::vector<T> acc(Fma::sums_size(e)), c(m * e);
  if (Fma::product_in_place(acc.data(), false, m, {a.data(), n}, x, c.data(), e)) {
    return "converted";
  }
  return Fma::right(panels.data(), x, m).packed ? "packed" : "in place";
}

template <typename S>
std::string way(const std::string& what, int64_t m, int64_t n, int64_t d, int64_t e) {
  if (what == "rows") { // of a micro-kernel
    return std::to_string(FmaProducts<at::opmath_type<S>>::MR);
  }
  if (what == "lanes") { // of a vector
    return std::to_string(FmaProducts<at::opmath_type<S>>::LANES);
  }
  const Sizes sizes{1, m, n, d, e};
  if (what == "tiny") {
    return Tiny<S>::fits(sizes) ? "yes" : "no";
  }
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (!std::is_same_v<S, at::opmath_type<S>>) {
    using Micro = Brgemm<S>;
    if (what == "brgemm") {
      return Micro::fits_forward(sizes) ? "yes" : "no";
    }
    if (what == "brgemm backward") {
      return Micro::fits_backward(sizes) ? "yes" : "no";
    }
    if (what == "pairs") {
      return Pairs::fits_forward(sizes) ? "yes" : "no";
    }
    if (what == "pairs backward") {
      return Pairs::fits_backward(sizes) ? "yes" : "no";
    }
  }
#endif
  if (what == "transposed") {
    return typename ForwardTile<FmaTiles<S>>::Layout(m, m, n, d, e).tiles.transposed ? "yes" : "no";
  }
  if (what == "right" || what == "right transposed") {
    return right<S>(m, n, e, what != "right");
  }
  if (what == "scores") {
    ScratchLayout scratch;
    const char* names[] = {"panels", "dots", "dots swapped", "panels swapped"};
    const typename Scores<S>::Layout layout(scratch, m, m, n, d, false, 0);
    return names[static_cast<int>(layout.way(d))];
  }
  return sums<S>(sizes, std::stoll(what));
}

template <typename F>
bool computes_with_denormals(const F& compute) {
#if defined(__x86_64__)
  constexpr unsigned flags = 0x3f, denormal = 2;
  _mm_setcsr(_mm_getcsr() & ~flags);
  compute();
  return _mm_getcsr() & denormal;
#else
  return false;
#endif
}

template <typename S>
int denormals(const Sizes& sizes) {
  Problem<S> problem(sizes);
  const bool forward = computes_with_denormals([&] { problem.run_forward(); });
  return forward + 2 * computes_with_denormals([&] { problem.run_backward(); });
}

} // namespace

#define WAYS(S)                                                                       \\
  extern "C" const char* way_##S(                                                     \\
      const char* what, int64_t m, int64_t n, int64_t d, int64_t e) {                 \\
    static std::string words;                                                         \\
    words = way<S>(what, m, n, d, e);                                                 \\
    return words.c_str();                                                             \\
  }                                                                                   \\
  extern "C" int denormals_##S(int64_t m, int64_t n, int64_t d, int64_t e) {          \\
    return denormals<S>({1, m, n, d, e});                                             \\
  }
using bfloat16 = at::BFloat16;
using half = at::Half;
WAYS(float)
WAYS(double)
WAYS(bfloat16)
WAYS(half)
extern "C" int64_t step(int64_t tasks, int64_t threads, int64_t size) {
  return tasks_at_once(tasks, threads, size);
}
extern "C" int64_t slots(int64_t size, int64_t threads, int64_t step) {
  return slots_for(size, threads, step);
}
"""
# Where part of a vector is loaded as fast as a whole one.
MASKS = ("AVX2", "AVX512")


def function(name, dtype):
    return getattr(library("attn_ways", SOURCE), f"{name}_{NAMES[dtype]}")


def way(dtype, what, *sizes):
    """In words, which way is taken for m, n, d, e."""
    ask = function("way", dtype)
    ask.restype = ctypes.c_char_p
    return ask(what.encode(), *map(ctypes.c_int64, sizes)).decode()


def cases(dtype):
    """What is asked, m, n, d, e and the answer, at both sides of each boundary."""
    mr, lanes = (int(way(dtype, what, 1, 1, 1, 1)) for what in ("rows", "lanes"))
    low = dtype in (torch.bfloat16, torch.half)
    yield from (
        ("tiny", (8, 8, 2, 2), "yes"),
        ("tiny", (8, 8, 2, 3), "no"),
        ("tiny", (1, 65, 1, 1), "no"),
    )
    # The sizes of the scores are m, n, and d terms.
    rows, half = 3 * lanes // 4, lanes // 2
    terms, half_terms = lanes * rows, lanes * half
    swapped = {True: "panels swapped", False: "panels"}
    dots, dots_swapped = "dots", "dots swapped"
    if low and CAPABILITY == "DEFAULT" and IS_X86:  # dot products are not compiled
        dots, dots_swapped = swapped[terms >= 64], swapped[half_terms >= 64]
    yield from (
        ("scores", (rows, 300, terms, 1), dots),
        ("scores", (rows, 300, terms - 1, 1), swapped[terms > 64]),
        ("scores", (rows + 1, 300, 288, 1), "panels swapped"),
        ("scores", (lanes, half, half_terms, 1), dots_swapped),
        ("scores", (lanes, half, half_terms - 1, 1), swapped[half_terms > 64]),
        ("scores", (lanes, half + 1, 288, 1), "panels swapped"),
        ("scores", (rows + 1, 300, 64, 1), "panels swapped"),
        ("scores", (rows + 1, 300, 63, 1), "panels"),
        ("scores", (96, 300, 96, 1), "panels swapped"),
        ("scores", (96, 300, 95, 1), "panels"),
        ("scores", (97, 300, 97, 1), "panels"),
    )
    # The tile is transposed, and so is a product, if there are few columns.
    cols = min(half, mr)
    yield from (
        ("transposed", (cols + 1, cols, 1, 1), "yes"),
        ("transposed", (cols, cols, 1, 1), "no"),
        ("transposed", (cols + 2, cols + 1, 1, 1), "no"),
        ("right", (100, 64, 1, cols), "few columns"),
        ("right", (100, 64, 1, cols + 1), "packed"),
    )
    # The right operand, n x e, for m rows.
    in_place = "packed" if low else "in place"
    converted = "converted" if low and CAPABILITY == "AVX512" else in_place
    yield from (
        ("right", (2 * mr, 64, 1, 304), converted),
        ("right", (2 * mr + 1, 64, 1, 304), in_place),
        ("right", (96, 64, 1, 304), in_place),
        ("right", (97, 64, 1, 304), "packed"),
        ("right", (96, 64, 1, 305), in_place if CAPABILITY in MASKS else "packed"),
        ("right transposed", (2 * mr, 64, 1, 304), "packed"),
        ("right transposed", (96, 64, 1, 304), "packed"),
    )
    # These say where 1 or 4 threads sum the output, of at most 24 rows a task.
    yield from (
        ("1", (24, 288, 8, 16), "direct"),
        ("1", (24, 289, 8, 16), "own" if low else "direct"),
        ("4", (24, 289, 8, 16), "blocks"),
        ("4", (72, 289, 8, 16), "blocks"),
        ("4", (96, 289, 8, 16), "own" if low else "direct"),
    )
    if not (low and CAPABILITY == "AVX512"):
        return
    # These say whether oneDNN or VDPBF16PS multiplies, on a machine that has what it takes.
    yield from (
        ("brgemm", (9, 112, 17, 16), "yes"),
        ("brgemm", (8, 126, 17, 16), "no"),
        ("brgemm", (63, 16, 17, 16), "no"),
        ("brgemm", (9, 111, 17, 16), "no"),
        ("brgemm", (9, 112, 16, 16), "no"),
        ("brgemm", (9, 112, 33, 0), "no"),
        ("brgemm backward", (13, 77, 17, 16), "yes"),
        ("brgemm backward", (12, 84, 17, 16), "no"),
        ("pairs", (5, 5, 1, 1), "yes"),
        ("pairs", (4, 5, 1, 1), "no"),
        ("pairs", (5, 4, 1, 18), "yes"),
        ("pairs", (5, 4, 1, 17), "no"),
        ("pairs", (5, 5, 0, 1), "no"),
        ("pairs backward", (3, 9, 1, 1), "yes"),
        ("pairs backward", (2, 9, 1, 1), "no"),
        ("pairs backward", (3, 8, 27, 64), "yes"),
        ("pairs backward", (3, 8, 26, 64), "no"),
        ("pairs backward", (3, 4, 64, 65), "no"),
    )


@unittest.skipIf(CAPABILITY not in FLAGS, "another architecture's")
@unittest.skipIf(sys.platform == "win32", "the compiler's options are GCC's")
@unittest.skipIf(TEST_WITH_ASAN, "the library has no sanitizer in it")
class TestAttnWays(TestCase):
    @parametrize("dtype", tuple(NAMES))
    def test_ways(self, dtype):
        for what, sizes, expected in cases(dtype):
            with self.subTest(what=what, sizes=sizes):
                self.assertEqual(way(dtype, what, *sizes), expected)

    def test_slots(self):
        """There is one for each task that threads have taken, and one more that a thread may take
        while others are at work. So no thread sleeps until another is done."""
        ways = library("attn_ways", SOURCE)
        for name in ("step", "slots"):
            getattr(ways, name).restype = ctypes.c_int64
        powers = [2**i for i in range(21)]
        for tasks, threads, size in itertools.product(powers, powers[:8], powers):
            with self.subTest(tasks=tasks, threads=threads, size=size):
                step = ways.step(*map(ctypes.c_int64, (tasks, threads, size)))
                slots = ways.slots(*map(ctypes.c_int64, (size, threads, step)))
                self.assertGreaterEqual(slots, threads * (2 * step if step > 1 else 1))
                self.assertLessEqual(slots * size, threads * max(size, 2**16))

    # Computing with what earlier work has left in memory changes no result, but if these are
    # denormal numbers, it takes several times as long.
    @unittest.skipUnless(IS_X86, "the flag is x86's")
    @parametrize("dtype", tuple(NAMES))
    def test_no_denormals(self, dtype):
        seed = random.SystemRandom().randrange(10**6)
        rng = random.Random(seed)
        some = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 65, 97, 200, 300)
        for _ in range(200):
            sizes = [rng.choice(some) for _ in "mnde"]
            with self.subTest(seed=seed, sizes=sizes):
                found = function("denormals", dtype)(*map(ctypes.c_int64, sizes))
                self.assertEqual(found, 0)


instantiate_parametrized_tests(TestAttnWays)

if __name__ == "__main__":
    run_tests()
