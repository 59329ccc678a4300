#pragma once

#include <ATen/ceil_div.h>
#include <ATen/native/cpu/AttnMatrix.h>
#include <ATen/native/cpu/AttnSchedule.h>
#include <ATen/native/cpu/AttnVec.h>

// cpublas is called with AVX-512 below.
#if defined(CPU_CAPABILITY_AVX512)
#include <ATen/native/CPUBlas.h>
#endif

#include <exception>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// The leading dimension of operands and sums. It is no power of two, so that
// rows don't share cache sets.
constexpr int64_t BRGEMM_LD = KC + 16;
static_assert(NC <= KC, "a tile is one operand");

struct BrgemmSizes {
  int64_t rows, cols, terms;
};

// cpublas keeps a kernel for each set of sizes as long as the thread lives. So
// there are only 20 sets: 2 x 5 sizes that set sums, 2 x 5 that add to them. A
// change of the set takes AMX about as long as a product, so there is one for
// all rows of most tiles of the backward, 192, and one for all columns.
constexpr int64_t BRGEMM_COLS = 32;
constexpr int64_t BRGEMM_ROWS[] = {64, 16};
constexpr int64_t BRGEMM_TERMS[] = {KC, 192, 128, 64, 32};

// Calls fn(sizes, row, term) for each part of a product of at most 64 rows. The
// terms are filled up with zeros to a multiple of the least size. How they are
// divided, and so how sums are rounded, depends on their number only.
template <typename F>
void for_brgemm_parts(int64_t rows, int64_t terms, const F& fn) {
  const auto [most, few] = BRGEMM_ROWS;
  const auto step = rows > most - few ? most : few;
  const auto end = at::round_up(terms, BRGEMM_TERMS[4]);
  for (int64_t p = 0, count = 0; p < end; p += count) {
    const auto fits = [&](int64_t size) { return size <= end - p; };
    count =
        *std::find_if(std::begin(BRGEMM_TERMS), std::end(BRGEMM_TERMS), fits);
    for (int64_t row = 0; row < rows; row += step) {
      fn(BrgemmSizes{step, BRGEMM_COLS, count}, row, p);
    }
  }
}

#if defined(CPU_CAPABILITY_AVX512)

// Releases what brgemm holds for a thread, such as AMX's tiles. Failure is
// harmless: the next product configures the tiles again.
struct BrgemmContext {
  ~BrgemmContext() {
    try {
      cpublas::brgemm_release();
    } catch (const std::exception&) {
    }
  }
};

// Products by oneDNN's brgemm, which multiplies bfloat16 or half by AMX. Both
// operands are copies, whose leading dimensions are fixed.
template <typename S>
class Brgemm {
 public:
  using Element = S;
  using Context = BrgemmContext;
  static constexpr int64_t TERMS = BRGEMM_TERMS[4]; // terms are a multiple

  // A left operand, as matrices of KC columns each.
  //   at(i, j)[0] = x[i][j]
  struct Left {
    S* data;
    int64_t rows, cols;
    static constexpr int64_t row_stride = BRGEMM_LD;

    S* at(int64_t row, int64_t col) const {
      const auto first = col / KC * at::round_up(rows, BRGEMM_ROWS[0]);
      return data + (first + row) * BRGEMM_LD + col % KC;
    }
    static int64_t size(int64_t rows, int64_t cols) {
      return at::ceil_div(cols, KC) * at::round_up(rows, BRGEMM_ROWS[0]) *
             BRGEMM_LD;
    }
  };

  // Return whether brgemm is worth the copies and the padding (Intel Xeon with
  // AMX). The gradients of k and v are sums of m terms.
  static bool fits_forward(const Sizes& sizes) {
    const auto [batch, m, n, d, e] = sizes;
    return m > 8 && n > 16 && m * n > 1000 && d + e > 32 && std::min(d, e) > 0;
  }
  static bool fits_backward(const Sizes& sizes) {
    return sizes.m > 12 && fits_forward(sizes);
  }

  // Returns whether oneDNN is switched on and multiplies by AMX. Then, as in
  // ATen's own use, it takes the right operand in VNNI layout.
  static bool available() {
    return cpublas::could_pack(c10::CppTypeToScalarType<S>::value);
  }

  static C10_ALWAYS_INLINE vec::Vectorized<S> round(const Pair<float>& x) {
    return round_pair<S>(x);
  }

  // acc = at most 64 rows of A, from `row` on, times a panel of B. This is the
  // only call of brgemm: there are no `sizes` but BRGEMM_ROWS and so on.
  static void multiply(const Left& a, int64_t row, const S* b, float* acc) {
    const auto multiply_part = [&](const BrgemmSizes& sizes,
                                   int64_t r,
                                   int64_t p) {
      const auto [rows, cols, terms] = sizes;
      const S* left = a.at(row + r, p);
      const S* right = b + p * cols;
      float* c = acc + r * BRGEMM_LD;
      constexpr auto ld = BRGEMM_LD;
      cpublas::brgemm(rows, cols, terms, ld, cols, ld, p > 0, left, right, c);
    };
    for_brgemm_parts(
        std::min(BRGEMM_ROWS[0], a.rows - row), a.cols, multiply_part);
  }
};

#endif

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
