#pragma once

#include <ATen/native/cpu/AttnBrgemm.h>
#include <ATen/native/cpu/AttnCopy.h>
#include <ATen/native/cpu/AttnPairs.h>

#if defined(CPU_CAPABILITY_AVX512)

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Products of bfloat16 or half, by Pairs or Brgemm, which multiply pairs of
// numbers and sum in float:
//   C (M x N) (+)= A (M x K) B (K x N)
template <typename Micro>
class VnniProducts {
 public:
  using S = typename Micro::Element;
  using T = float;
  using Left = typename Micro::Left;
  using Vec = vec::Vectorized<S>;
  static constexpr int64_t W = Vec::size();
  static constexpr int64_t MC = BRGEMM_ROWS[0]; // rows of A and C
  static constexpr int64_t LD = BRGEMM_LD;      // of the sums of both
  static constexpr bool by_pairs = std::is_same_v<Micro, Pairs>;
  static_assert(W == BRGEMM_COLS);

  // Returns how many terms are summed: the last ones are zeros.
  static int64_t padded(int64_t terms) {
    return at::round_up(terms, Micro::TERMS);
  }

  // A right operand: panels of W columns, in VNNI layout.
  //   at(i, j)[c * 2 + i % 2] = x[i][j + c] for even i, j = 0, W, ...
  struct Right {
    S* data;
    int64_t rows, cols;
    bool narrow = false;

    S* at(int64_t row, int64_t col) const {
      return data + col * padded(rows) + row * W;
    }
    // Writes zeros in the rows below the last pair.
    void clear_after() const {
      const auto begin = at::round_up<int64_t>(rows, 2);
      for (int64_t col = 0; col < cols; col += W) {
        std::fill(at(begin, col), at(padded(rows), col), S(0));
      }
    }
  };

  // Return the sizes of operands, in elements of T.
  static int64_t left_size(int64_t rows, int64_t cols) {
    const auto size = Left::size(rows, cols) / 2;
    return by_pairs ? std::max(size, right_size(cols, rows)) : size;
  }
  static int64_t right_size(int64_t rows, int64_t cols) {
    return padded(rows) * at::round_up(cols, W) / 2;
  }

  // Loads the first `count` of the W elements from x[row][col] on; the rest are
  // zeros.
  static C10_ALWAYS_INLINE Vec
  load_row(const Matrix<const S>& x, int64_t row, int64_t col, int64_t count) {
    const S* p = x.data + row * x.row_stride + col * x.col_stride;
    if (x.col_stride == 1) {
      return count >= W ? Vec::loadu(p) : Vec::loadu(p, count);
    }
    if (x.col_stride == 0 && count >= W) {
      return Vec(*p);
    }
    alignas(64) S gathered[W] = {};
    for (const auto j : c10::irange(std::min(count, W))) {
      gathered[j] = p[j * x.col_stride];
    }
    return Vec::loadu(gathered);
  }

  // Calls fn(i, count) for i = 0, W, ... In all calls but the last, count is
  // the constant W.
  template <typename F>
  static C10_ALWAYS_INLINE void for_vectors(int64_t size, const F& fn) {
    int64_t i = 0;
    for (; i + W <= size; i += W) {
      fn(i, W);
    }
    if (i < size) {
      fn(i, size - i);
    }
  }

  // C = at most MC rows of A, from `row` on, times B. Only by Pairs may the
  // leading dimension of C be another.
  static void multiply(
      const Left& a, int64_t row, const Right& b, T* c, int64_t ldc = LD) {
    if constexpr (by_pairs) {
      const auto rows = std::min(MC, a.rows - row);
      if (b.narrow) {
        Micro::multiply_narrow(a, row, rows, b.data, b.cols, c, ldc);
      } else {
        Micro::multiply(false, a, row, rows, b.data, b.cols, c, ldc);
      }
    } else {
      for (int64_t col = 0; col < b.cols; col += W) {
        Micro::multiply(a, row, b.at(0, col), c + col);
      }
    }
  }

  // out (+)= A B. Brgemm computes the product in `acc` first.
  template <typename O>
  static void add_product(
      bool accumulate, const Left& a, const Right& b, T* acc, O* out) {
    for (int64_t row = 0; row < a.rows; row += MC, out += MC * b.cols) {
      const auto rows = std::min(MC, a.rows - row);
      if constexpr (by_pairs) {
        Micro::multiply(accumulate, a, row, rows, b.data, b.cols, out, b.cols);
      } else {
        for_vectors(b.cols, [&](int64_t col, int64_t count) {
          O* dst = out + col;
          for (int64_t r = 0; accumulate && r < rows; ++r) {
            for (int64_t c = 0; c < count; c += 64 / sizeof(O)) {
              prefetch_line(dst + r * b.cols + c);
            }
          }
          Micro::multiply(a, row, b.at(0, col), acc);
          for (int64_t r = 0; r < rows; ++r, dst += b.cols) {
            const auto x = load<T>(acc + r * LD, count);
            store(dst, accumulate ? load<T>(dst, count) + x : x, count);
          }
        });
      }
    }
  }

  // dst[2 * j] = x[j], dst[2 * j + 1] = y[j]
  static C10_ALWAYS_INLINE void store_vnni(S* dst, const Vec& x, const Vec& y) {
    alignas(64) static constexpr uint16_t order[2 * W] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
        8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
        16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
        24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const Vec lo = _mm512_permutex2var_epi16(x, _mm512_load_si512(order), y);
    const Vec hi =
        _mm512_permutex2var_epi16(x, _mm512_load_si512(order + W), y);
    lo.store(dst);
    hi.store(dst + W);
  }

  // Copies x. No result depends on the columns right of x in its last panel.
  static Right right(S* copy, const Matrix<const S>& x) {
    const Right result{copy, x.rows, x.cols};
    if (x.row_stride == 1 && x.col_stride != 1) {
      constexpr int64_t LANES = W / 2;
      for (int64_t col = 0; col < x.cols; col += LANES) {
        if (col + LANES < x.cols) {
          prefetch_rows(&x.at(0, col), x.col_stride, LANES, x.rows);
        }
        transpose_rows<T>(
            &x.at(0, col),
            x.col_stride,
            x.cols - col,
            x.rows,
            [&](int64_t i, __m512i vnni) C10_ALWAYS_INLINE_ATTRIBUTE {
              S* to = result.at(i, col / W * W) + 2 * (col % W);
              _mm512_storeu_si512(to, vnni);
            });
      }
      result.clear_after();
      return result;
    }
    for (int64_t i = 0; i < x.rows; i += 2) {
      for_vectors(
          x.cols, [&](int64_t col, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
            store_vnni(
                result.at(i, col),
                load_row(x, i, col, count),
                i + 1 < x.rows ? load_row(x, i + 1, col, count) : Vec(0));
          });
    }
    result.clear_after();
    return result;
  }

  // Copies xᵀ as a right operand.
  static Right columns(S* copy, const Matrix<const S>& x) {
    if constexpr (by_pairs) {
      if (x.rows <= Micro::NARROW) {
        S* to = copy;
        for (int64_t i = 0; i < x.cols; i += 4, to += 4 * Micro::NARROW) {
          std::fill_n(to, 4 * Micro::NARROW, S(0));
          for (const auto j : c10::irange(x.rows)) {
            for (const auto t : c10::irange(std::min<int64_t>(4, x.cols - i))) {
              to[4 * j + t] = x.at(j, i + t);
            }
          }
        }
        return {copy, x.cols, x.rows, true};
      }
    }
    return right(copy, x.t());
  }

  // Returns x as the left operand: as a copy or, by Pairs, in place if its rows
  // are dense. No result depends on the rows below.
  static Left left(S* copy, const Matrix<const S>& x) {
    if constexpr (by_pairs) {
      if (x.col_stride == 1) {
        S* data = const_cast<S*>(x.data); // it is only read
        return {data, x.rows, x.cols, x.row_stride};
      }
      right(copy, x.t()); // the same numbers: pairs of columns of x
      return {copy, x.rows, x.cols, 2, 2 * W, W * padded(x.cols)};
    }
    const Left result{copy, x.rows, x.cols};
    const auto terms = padded(x.cols);
    if (x.row_stride != 1 || x.col_stride == 1) {
      for (const auto i : c10::irange(x.rows)) {
        for (int64_t j = 0; j < terms; j += W) {
          const auto count = std::max<int64_t>(x.cols - j, 0);
          load_row(x, i, j, count).store(result.at(i, j));
        }
      }
      return result;
    }
    constexpr int64_t LANES = W / 2;
    for (int64_t j = 0; j < terms; j += LANES) {
      transpose_rows<T>(
          &x.at(0, j),
          x.col_stride,
          x.cols - j,
          x.rows,
          [&](int64_t i, __m512i pairs) C10_ALWAYS_INLINE_ATTRIBUTE {
            const auto store = [&](int64_t row, __m512i lower) {
              auto* to = reinterpret_cast<__m256i*>(result.at(row, j));
              _mm256_storeu_si256(to, _mm512_cvtepi32_epi16(lower));
            };
            store(i, pairs);
            if (i + 1 < x.rows) {
              store(i + 1, _mm512_srli_epi32(pairs, 16));
            }
          });
    }
    return result;
  }
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu

#endif
