#pragma once

#include <ATen/native/cpu/AttnCopy.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Computes a product with a transposed matrix by dot products:
//   C (M x N) (+)= A (M x K) Bᵀ, with B (N x K)
// The rows of B are read in place. If A has few rows, this takes less time than
// transposing B for the micro-kernel in AttnFma.h.
template <typename S>
class Dot {
 public:
  using T = at::opmath_type<S>;
  using Vec = vec::Vectorized<T>;
  static constexpr int64_t LANES = Vec::size();
  // If A has more rows, a panel of Aᵀ is nearly full: see AttnScores.h.
  static constexpr int64_t MAX_ROWS = 3 * LANES / 4;

  // On x86 without AVX, where lower precision is converted one number at a
  // time, these would be a quarter of the kernel's code, and save up to half
  // the time.
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2) || \
    !defined(__x86_64__)
  static constexpr bool available = true;
#else
  static constexpr bool available = std::is_same_v<T, S>;
#endif

  // Returns whether dot products are faster than transposing B. For each
  // element of C, the elements of a vector must be added up at the end.
  static bool fits(int64_t rows, int64_t terms) {
    return available && rows <= MAX_ROWS && terms >= LANES * rows;
  }

  // Writes the rows of C in order. Each is written up to a multiple of a
  // vector.
  static void product(
      int64_t rows,
      const T* a,
      int64_t lda,
      const Matrix<const S>& b,
      bool accumulate,
      T* c,
      int64_t ldc) {
    // Computes one vector of columns of C at a time, so that each row of B is
    // read from memory once.
    for (int64_t col = 0; col < b.rows; col += LANES) {
      const auto part = b.block(col, 0, std::min(LANES, b.rows - col), b.cols);
      for (int64_t row = 0; row < rows; row += 4) {
        const T* left = a + row * lda;
        T* dst = c + row * ldc + col;
        switch (rows - row) {
          case 1:
            tile<1>(left, lda, part, accumulate, dst, ldc);
            break;
          case 2:
            tile<2>(left, lda, part, accumulate, dst, ldc);
            break;
          case 3:
            tile<3>(left, lda, part, accumulate, dst, ldc);
            break;
          default:
            tile<4>(left, lda, part, accumulate, dst, ldc);
        }
      }
    }
  }

 private:
  // This many dot products are computed at once, so that an addition need not
  // wait for the one before. More would not fit in the registers.
#if defined(CPU_CAPABILITY_AVX512)
  static constexpr int CHAINS = std::is_same_v<T, S> ? 16 : 8;
#else
  static constexpr int CHAINS = std::is_same_v<T, S> ? 8 : 4;
#endif

  // Computes R rows and at most one vector of columns of C.
  template <int R>
  static void tile(
      const T* a,
      int64_t lda,
      const Matrix<const S>& b,
      bool accumulate,
      T* c,
      int64_t ldc) {
    constexpr int COLS = std::min<int64_t>(CHAINS / (R > 2 ? 4 : R), LANES);
    alignas(64) T partial[R][LANES][LANES];
    int64_t j = 0;
    for (; j + COLS <= b.rows; j += COLS) {
      dots<R, COLS>(a, lda, b, b.data + j * b.row_stride, j, partial);
    }
    for (; j < b.rows; ++j) {
      dots<R, 1>(a, lda, b, b.data + j * b.row_stride, j, partial);
    }
    for (const auto r : c10::irange(R)) {
      T* dst = c + r * ldc;
      const auto acc = sums_of(partial[r][0], b.rows);
      (accumulate ? Vec::loadu(dst) + acc : acc).store(dst);
    }
  }

  // Sets partial[r][j + c] to a vector. The sum of its elements is the dot
  // product of row r of A and row c of those at `data`.
  template <int R, int C>
  static C10_ALWAYS_INLINE void dots(
      const T* a,
      int64_t lda,
      const Matrix<const S>& b,
      const S* data,
      int64_t j,
      T (*partial)[LANES][LANES]) {
    // An operand of lower precision is loaded two vectors at a time, with
    // separate accumulators.
    constexpr int V = std::is_same_v<T, S> ? 1 : 2;
    constexpr int64_t step = V * LANES;
    auto acc = zeros<T>(std::make_index_sequence<V * R * C>());
    const auto add_terms = [&](int64_t p,
                               auto... count) C10_ALWAYS_INLINE_ATTRIBUTE {
      auto left = zeros<T>(std::make_index_sequence<V * R>());
      c10::ForcedUnroll<R>{}([&](auto r) C10_ALWAYS_INLINE_ATTRIBUTE {
        load_to<V>(&left[V * r], a + r * lda + p, count...);
      });
      c10::ForcedUnroll<C>{}([&](auto c) C10_ALWAYS_INLINE_ATTRIBUTE {
        const S* row = data + c * b.row_stride + p;
        prefetch_line(row + C * b.row_stride);
        auto right = zeros<T>(std::make_index_sequence<V>());
        load_to<V>(&right[0], row, count...);
        c10::ForcedUnroll<V * R>{}([&](auto i) C10_ALWAYS_INLINE_ATTRIBUTE {
          constexpr int at = decltype(i)::value * C + decltype(c)::value;
          acc[at] = vec::fmadd(left[i], right[i % V], acc[at]);
        });
      });
    };
    int64_t p = 0;
    for (; p + step <= b.cols; p += step) {
      add_terms(p);
    }
    if (p < b.cols) {
      add_terms(p, b.cols - p);
    }
    c10::ForcedUnroll<R * C>{}([&](auto i) C10_ALWAYS_INLINE_ATTRIBUTE {
      constexpr int r = decltype(i)::value / C, c = decltype(i)::value % C;
      Vec sum = acc[V * r * C + c];
      if constexpr (V == 2) {
        sum = sum + acc[(V * r + 1) * C + c];
      }
      sum.store(partial[r][j + c]);
    });
  }

  // Loads one or two vectors of x. If `count` is given, elements after the
  // first `count` are zero.
  template <int V, typename X, typename... Count>
  static C10_ALWAYS_INLINE void load_to(Vec* to, const X* x, Count... count) {
    if constexpr (V == 1) {
      to[0] = Vec::loadu(x, count...);
    } else {
      const auto both = load<T>(x, count...);
      to[0] = both[0];
      to[1] = both[1];
    }
  }

  // Returns a vector whose element i is the sum of the elements of vector i,
  // for the first `count` vectors.
  static C10_ALWAYS_INLINE Vec sums_of(T* vectors, int64_t count) {
    for (; count < LANES; ++count) {
      Vec(T(0)).store(vectors + count * LANES);
    }
#if defined(CPU_CAPABILITY_AVX512)
    // Adding halves of two vectors gives one vector with half the terms of
    // each.
    std::array<Vec, LANES> x;
    for (const auto i : c10::irange(LANES)) {
      x[i] = Vec::loadu(vectors + i * LANES);
    }
    if constexpr (std::is_same_v<T, float>) {
      for (const auto i : c10::irange(8)) {
        const __m512 a = x[2 * i], b = x[2 * i + 1];
        x[i] = Vec(_mm512_unpacklo_ps(a, b)) + Vec(_mm512_unpackhi_ps(a, b));
      }
      for (const auto i : c10::irange(4)) {
        const auto a = _mm512_castps_pd(x[2 * i]);
        const auto b = _mm512_castps_pd(x[2 * i + 1]);
        x[i] = Vec(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b))) +
               Vec(_mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
      }
      for (const auto size : {2, 1}) {
        for (const auto i : c10::irange(size)) {
          const __m512 a = x[2 * i], b = x[2 * i + 1];
          x[i] = Vec(_mm512_shuffle_f32x4(a, b, 0x88)) +
                 Vec(_mm512_shuffle_f32x4(a, b, 0xdd));
        }
      }
    } else {
      for (const auto i : c10::irange(4)) {
        const __m512d a = x[2 * i], b = x[2 * i + 1];
        x[i] = Vec(_mm512_unpacklo_pd(a, b)) + Vec(_mm512_unpackhi_pd(a, b));
      }
      for (const auto size : {2, 1}) {
        for (const auto i : c10::irange(size)) {
          const __m512d a = x[2 * i], b = x[2 * i + 1];
          x[i] = Vec(_mm512_shuffle_f64x2(a, b, 0x88)) +
                 Vec(_mm512_shuffle_f64x2(a, b, 0xdd));
        }
      }
    }
    return x[0];
#else
    alignas(64) T lanes[LANES * LANES];
    vec::transpose_mxn<T, LANES, LANES>(vectors, LANES, lanes, LANES);
    Vec sum = Vec::loadu(lanes);
    for (int64_t i = 1; i < LANES; ++i) {
      sum = sum + Vec::loadu(lanes + i * LANES);
    }
    return sum;
#endif
  }
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
