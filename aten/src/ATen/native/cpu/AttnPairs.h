#pragma once

#include <ATen/ceil_div.h>
#include <ATen/native/cpu/AttnCopy.h>
#include <ATen/native/cpu/AttnVec.h>

#include <cstring>

#if defined(CPU_CAPABILITY_AVX512)

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Products of bfloat16 by VDPBF16PS, which multiplies a pair of numbers by a
// pair and adds both products to a float. The left operand is read in place if
// its rows are dense.
class Pairs {
 public:
  using Element = at::BFloat16;
  using S = Element;
  using Vec = vec::Vectorized<float>;
  struct Context {};
  static constexpr int64_t TERMS = 2; // terms are a multiple

  // A left operand, as blocks of BLOCK rows.
  //   at(i, j)[0] = x[i][j] for even j
  struct Left {
    static constexpr int64_t BLOCK = 32;

    S* data;
    int64_t rows, cols;
    int64_t row_stride = at::round_up(cols, BLOCK) + BLOCK;
    int64_t pair_stride = 2;
    int64_t block_stride = BLOCK * row_stride;

    S* at(int64_t row, int64_t col) const {
      return data + row / BLOCK * block_stride + row % BLOCK * row_stride +
             col / 2 * pair_stride + col % 2;
    }
    static int64_t size(int64_t rows, int64_t cols) {
      return rows * Left{nullptr, rows, cols}.row_stride;
    }
  };

  // Returns whether VDPBF16PS is there and starts as often as FMA. No feature
  // bit says that. It does on AMD's processors, which have SSE4A, and half as
  // often on Intel's. If it were measured, the kernel and so the bits could
  // differ between runs.
  static bool available() {
#if defined(__GNUC__)
    static const bool available =
        __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("sse4a");
    return available;
#else
    return false;
#endif
  }

  // Return whether this is faster than FMA (Zen 5). With m = 8192, n = 4 and
  // d = e = 8 FMA takes a third less, at n = 16 a third to a half more. In the
  // backward at n = 6 it takes 4% less with d + e of 81, a tenth more with 96.
  // With fewer rows FMA reads k and v in place and takes a third less. A sum
  // without terms would not be set to zero.
  static bool fits_forward(const Sizes& sizes) {
    const auto [batch, m, n, d, e] = sizes;
    return std::min(d, e) > 0 && m > 4 && (n > 4 || n * e > 4 * d + 64);
  }
  static bool fits_backward(const Sizes& sizes) {
    const auto [batch, m, n, d, e] = sizes;
    return std::min(d, e) > 0 && m > 2 && (n > 8 || (n > 4 && d + e > 90));
  }

  // Rounds floats, and subnormal ones to zero, by one instruction for nine.
  static C10_ALWAYS_INLINE vec::Vectorized<S> round(const Pair<float>& x) {
    __m512i rounded{};
#if defined(__GNUC__)
    asm("vcvtne2ps2bf16 %2, %1, %0"
        : "=v"(rounded)
        : "v"(static_cast<__m512>(x[1])), "v"(static_cast<__m512>(x[0])));
#endif
    return rounded;
  }

  // C (+)= at most 64 rows of A, from `row` on, times B, which is in panels of
  // 32 columns. A C of lower precision is overwritten.
  template <typename O>
  static void multiply(
      bool accumulate,
      const Left& a,
      int64_t row,
      int64_t rows,
      const S* b,
      int64_t cols,
      O* c,
      int64_t ldc) {
    const auto pairs = at::ceil_div<int64_t>(a.cols, 2);
    // A B that fits in the L1 cache is read for each R rows, so that C is
    // written about in the order of memory: with n = 11, d = 2 and e = 256 the
    // forward takes 0.6 of the time.
    const auto step = pairs * cols <= SMALL ? R : Left::BLOCK;
    for (const auto end = row + rows; row < end; row += step, c += step * ldc) {
      const auto some = std::min(step, end - row);
      Left left = a;
      for (int64_t col = 0; col < cols; col += COLS) {
        const S* panel = b + col * 2 * pairs;
        const auto count = std::min(COLS, cols - col);
        const auto by_width = [&](auto v) {
          by_rows(some, [&](auto m, int64_t r) {
            left.data = a.at(row + r, 0);
            O* dst = c + r * ldc + col;
            kernel<decltype(m)::value, decltype(v)::value>(
                accumulate, left, panel, count, dst, ldc);
          });
        };
        if (count > Vec::size()) {
          by_width(std::integral_constant<int, 2>());
        } else {
          by_width(std::integral_constant<int, 1>());
        }
      }
    }
  }

  static constexpr int64_t R = 8;      // rows of C at once
  static constexpr int64_t NARROW = 8; // columns, at most

  // C = at most 64 rows of A, from `row` on, times B of at most NARROW columns:
  //   b[8 i + 4 j + t] = B[i + t][j] for i = 0, 4, ...
  // A vector has two pairs of terms for each column.
  static void multiply_narrow(
      const Left& a,
      int64_t row,
      int64_t rows,
      const S* b,
      int64_t cols,
      float* c,
      int64_t ldc) {
    const auto by_layout = [&](auto dense) {
      Left left = a;
      by_rows(rows, [&](auto m, int64_t r) {
        left.data = a.at(row + r, 0);
        if (decltype(dense)::value) {
          const S* ahead = left.data + R * a.row_stride;
          prefetch_rows(ahead, a.row_stride, decltype(m)::value, a.cols);
        }
        narrow_kernel<decltype(m)::value, decltype(dense)::value>(
            left, b, cols, c + r * ldc, ldc);
      });
    };
    if (a.pair_stride == 2) {
      by_layout(std::true_type());
    } else {
      by_layout(std::false_type());
    }
  }

 private:
  // Calls fn(M, r) for blocks of M rows from r on.
  template <typename F>
  static C10_ALWAYS_INLINE void by_rows(int64_t rows, const F& fn) {
    int64_t r = 0;
    const auto call = [&](auto m) {
      for (; r + decltype(m)::value <= rows; r += decltype(m)::value) {
        fn(m, r);
      }
    };
    call(std::integral_constant<int, R>());
    call(std::integral_constant<int, 4>());
    call(std::integral_constant<int, 2>());
    call(std::integral_constant<int, 1>());
  }

  // Reads N of the four terms from `a` on; the rest are zeros.
  template <int N>
  static C10_ALWAYS_INLINE int64_t terms_at(const S* a, int64_t pair_stride) {
    uint64_t terms = 0;
    if (N == 4 && pair_stride == 2) {
      std::memcpy(&terms, a, sizeof(terms));
      return static_cast<int64_t>(terms);
    }
    // In one memcpy of three terms, a read would wait for two writes.
    uint32_t low = 0, high = 0;
    std::memcpy(&low, a, std::min(N, 2) * sizeof(S));
    if (N > 2) {
      std::memcpy(&high, a + pair_stride, (N - 2) * sizeof(S));
    }
    return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
  }

  // sum + a b. ATen's AVX-512 is compiled without this instruction.
  static C10_ALWAYS_INLINE __m512 add_pairs(__m512 sum, __m512i a, __m512i b) {
#if defined(__GNUC__)
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(b), "v"(a));
#endif
    return sum;
  }

  // Computes M rows of C, each as C sums of every Cth group of four terms.
  template <int M, bool dense>
  static void narrow_kernel(
      const Left& left, const S* b, int64_t cols, float* c, int64_t ldc) {
    constexpr int C = std::min(4, 16 / M);
    const S* a = left.data;
    const auto row_stride = left.row_stride;
    const auto pair_stride = dense ? 2 : left.pair_stride;
    auto acc = zeros<float>(std::make_index_sequence<C * M>());
    const auto add = [&](auto chain, auto n) C10_ALWAYS_INLINE_ATTRIBUTE {
      const auto right = _mm512_loadu_si512(b);
      c10::ForcedUnroll<M>{}([&](auto r) C10_ALWAYS_INLINE_ATTRIBUTE {
        const auto terms =
            terms_at<decltype(n)::value>(a + r * row_stride, pair_stride);
        constexpr int i = decltype(chain)::value * M + decltype(r)::value;
        acc[i] = add_pairs(acc[i], _mm512_set1_epi64(terms), right);
      });
      a += 2 * pair_stride;
      b += 4 * NARROW;
    };
    constexpr std::integral_constant<int, 0> first;
    constexpr std::integral_constant<int, 4> all;
    int64_t p = 0;
    for (; p + 4 * C <= left.cols; p += 4 * C) {
      c10::ForcedUnroll<C>{}([&](auto i)
                                 C10_ALWAYS_INLINE_ATTRIBUTE { add(i, all); });
    }
    for (; p + 4 <= left.cols; p += 4) {
      add(first, all);
    }
    if (left.cols - p == 3) {
      add(first, std::integral_constant<int, 3>());
    } else if (left.cols - p == 2) {
      add(first, std::integral_constant<int, 2>());
    } else if (left.cols - p == 1) {
      add(first, std::integral_constant<int, 1>());
    }
    const auto even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    const auto mask = static_cast<__mmask16>((1 << cols) - 1);
    c10::ForcedUnroll<M>{}([&](auto r) C10_ALWAYS_INLINE_ATTRIBUTE {
      __m512 sum = acc[r];
      for (int i = 1; i < C; ++i) {
        sum = _mm512_add_ps(sum, acc[i * M + r]);
      }
      sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
      sum = _mm512_permutexvar_ps(even, sum);
      _mm512_mask_storeu_ps(c + r * ldc, mask, sum);
    });
  }

  static constexpr int64_t COLS = 32;              // of a panel
  static constexpr int64_t LD = 2 * COLS;          // of its pairs of rows
  static constexpr int64_t SMALL = (24 << 10) / 4; // pairs that fit in L1

  // Computes M rows and V vectors of C, each as C sums of every Cth pair. With
  // few rows one sum would make each addition wait for the one before.
  template <int M, int V, typename O>
  static void kernel(
      bool accumulate,
      const Left& left,
      const S* b,
      int64_t count,
      O* c,
      int64_t ldc) {
    constexpr int C = std::min(4, 16 / (M * V));
    const S* a = left.data;
    const auto row_stride = left.row_stride, pair_stride = left.pair_stride;
    auto acc = zeros<float>(std::make_index_sequence<C * M * V>());
    const auto add = [&](auto chain, auto n) C10_ALWAYS_INLINE_ATTRIBUTE {
      __m512i right[V];
      for (int v = 0; v < V; ++v) {
        right[v] = _mm512_loadu_si512(b + v * (LD / 2));
      }
      c10::ForcedUnroll<M>{}([&](auto r) C10_ALWAYS_INLINE_ATTRIBUTE {
        const auto pair = terms_at<decltype(n)::value>(a + r * row_stride, 2);
        const auto x = _mm512_set1_epi32(static_cast<int32_t>(pair));
        c10::ForcedUnroll<V>{}([&](auto v) C10_ALWAYS_INLINE_ATTRIBUTE {
          constexpr int i =
              (decltype(chain)::value * M + decltype(r)::value) * V +
              decltype(v)::value;
          acc[i] = add_pairs(acc[i], x, right[v]);
        });
      });
      a += pair_stride;
      b += LD;
    };
    constexpr std::integral_constant<int, 0> first;
    constexpr std::integral_constant<int, 2> whole;
    int64_t p = 0;
    for (; p + 2 * C <= left.cols; p += 2 * C) {
      c10::ForcedUnroll<C>{}(
          [&](auto i) C10_ALWAYS_INLINE_ATTRIBUTE { add(i, whole); });
    }
    for (; C > 1 && p + 2 <= left.cols; p += 2) {
      add(first, whole);
    }
    if (p < left.cols) {
      add(first, std::integral_constant<int, 1>());
    }
    c10::ForcedUnroll<M>{}([&](auto r) C10_ALWAYS_INLINE_ATTRIBUTE {
      Pair<float> sum(0);
      c10::ForcedUnroll<V>{}([&](auto v) C10_ALWAYS_INLINE_ATTRIBUTE {
        sum[v] = acc[r * V + v];
        for (int i = 1; i < C; ++i) {
          sum[v] = sum[v] + acc[(i * M + r) * V + v];
        }
      });
      O* dst = c + r * ldc;
      if constexpr (std::is_same_v<O, S>) {
        round(sum).store(dst, count);
      } else {
        store(dst, accumulate ? load<float>(dst, count) + sum : sum, count);
      }
    });
  }
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu

#endif
