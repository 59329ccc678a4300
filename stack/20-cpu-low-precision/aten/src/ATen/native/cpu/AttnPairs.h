#pragma once

#include <ATen/ceil_div.h>
#include <ATen/native/cpu/AttnMatrix.h>
#include <ATen/native/cpu/AttnVec.h>

#include <cstring>

#if defined(CPU_CAPABILITY_AVX512)

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Products of bfloat16 by VDPBF16PS, which multiplies a pair of numbers by a
// pair and adds both products to a float.
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

  // Return whether this is faster than FMA (Zen 5). A vector is 16 columns:
  // with m = 8192, n = 8 and d = e = 8 both take as long, with n = 4 or in the
  // backward FMA takes a third less, and at n = 16 a third to a half more. With
  // fewer rows FMA reads k and v in place and takes a third less. A sum without
  // terms would not be set to zero.
  static bool fits_forward(const Sizes& sizes) {
    const auto [batch, m, n, d, e] = sizes;
    return std::min(d, e) > 0 && m > 4 && (n > 4 || n * e > 4 * d + 64);
  }
  static bool fits_backward(const Sizes& sizes) {
    const auto [batch, m, n, d, e] = sizes;
    return std::min(d, e) > 0 && m > 2 && (n > 8 || (n > 4 && d + e > 128));
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
          int64_t r = 0;
          const auto add_rows = [&](auto m) {
            constexpr int M = decltype(m)::value, V = decltype(v)::value;
            for (; r + M <= some; r += M) {
              left.data = a.at(row + r, 0);
              O* dst = c + r * ldc + col;
              kernel<M, V>(accumulate, pairs, left, panel, count, dst, ldc);
            }
          };
          add_rows(std::integral_constant<int, R>());
          add_rows(std::integral_constant<int, 4>());
          add_rows(std::integral_constant<int, 2>());
          add_rows(std::integral_constant<int, 1>());
        };
        if (count > Vec::size()) {
          by_width(std::integral_constant<int, 2>());
        } else {
          by_width(std::integral_constant<int, 1>());
        }
      }
    }
  }

 private:
  static constexpr int64_t COLS = 32;              // of a panel
  static constexpr int64_t LD = 2 * COLS;          // of its pairs of rows
  static constexpr int64_t R = 8;                  // rows of C at once
  static constexpr int64_t SMALL = (24 << 10) / 4; // pairs that fit in L1

  // Computes M rows and V vectors of C, each as C sums of every Cth pair. With
  // few rows one sum would make each addition wait for the one before.
  template <int M, int V, typename O>
  static void kernel(
      bool accumulate,
      int64_t pairs,
      const Left& left,
      const S* b,
      int64_t count,
      O* c,
      int64_t ldc) {
    constexpr int C = std::min(4, 16 / (M * V));
    const S* a = left.data;
    const auto row_stride = left.row_stride, pair_stride = left.pair_stride;
    auto acc = zeros<float>(std::make_index_sequence<C * M * V>());
    const auto add_pair = [&](auto chain) C10_ALWAYS_INLINE_ATTRIBUTE {
      __m512i right[V];
      for (int v = 0; v < V; ++v) {
        right[v] = _mm512_loadu_si512(b + v * (LD / 2));
      }
      c10::ForcedUnroll<M>{}([&](auto r) C10_ALWAYS_INLINE_ATTRIBUTE {
        int32_t pair = 0;
        std::memcpy(&pair, a + r * row_stride, sizeof(pair));
        const auto x = _mm512_set1_epi32(pair);
        c10::ForcedUnroll<V>{}([&](auto v) C10_ALWAYS_INLINE_ATTRIBUTE {
          constexpr int i =
              (decltype(chain)::value * M + decltype(r)::value) * V +
              decltype(v)::value;
          // ATen's AVX-512 is compiled without this instruction.
          __m512 sum = acc[i];
#if defined(__GNUC__)
          asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(right[v]), "v"(x));
#endif
          acc[i] = sum;
        });
      });
      a += pair_stride;
      b += LD;
    };
    int64_t p = 0;
    for (; p + C <= pairs; p += C) {
      c10::ForcedUnroll<C>{}(add_pair);
    }
    for (; C > 1 && p < pairs; ++p) {
      add_pair(std::integral_constant<int, 0>());
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
