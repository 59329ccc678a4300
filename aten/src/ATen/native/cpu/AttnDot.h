#pragma once

#include <ATen/native/cpu/AttnVec.h>

namespace at::native {
inline namespace CPU_CAPABILITY {

// Products with a transposed matrix as dot products:
//   C (M x N) (+)= A (M x K) Bᵀ, with B (N x K)
// The rows of B are read where they are, once for each four rows of A. For few
// rows this takes less than to transpose B for the micro-kernel of AttnFma.
template <typename S>
class AttnDot {
 public:
  using T = at::opmath_type<S>;
  static constexpr int64_t MAX_ROWS = 16;

  // Whether adding up the elements of vectors, one for each element of C, takes
  // less than to transpose B.
  static bool fits(int64_t rows, int64_t terms) {
    return rows <= MAX_ROWS && terms >= LANES * rows;
  }

  // Writes rows of C one after the other, each to a multiple of a vector.
  static void product(
      int64_t rows,
      const T* a,
      int64_t lda,
      const Matrix<const S>& b,
      bool add,
      T* c,
      int64_t ldc) {
    for (int64_t row = 0; row < rows; row += 4) {
      const T* left = a + row * lda;
      T* dst = c + row * ldc;
      switch (rows - row) {
        case 1:
          strip<1>(left, lda, b, add, dst, ldc);
          break;
        case 2:
          strip<2>(left, lda, b, add, dst, ldc);
          break;
        case 3:
          strip<3>(left, lda, b, add, dst, ldc);
          break;
        default:
          strip<4>(left, lda, b, add, dst, ldc);
      }
    }
  }

 private:
  using Vec = vec::Vectorized<T>;
  static constexpr int64_t LANES = Vec::size();
  static constexpr int64_t W = pair_size<T>;
  static constexpr int64_t LINE = 64 / sizeof(S);

  // R rows of C
  template <int R>
  static void strip(
      const T* a,
      int64_t lda,
      const Matrix<const S>& b,
      bool add,
      T* c,
      int64_t ldc) {
    constexpr int COLS = R > 2 ? 2 : 4; // as many chains as hide latency
    alignas(64) T partial[R][LANES][LANES];
    for (int64_t col = 0; col < b.rows; col += LANES) {
      const auto cols = std::min(LANES, b.rows - col);
      const S* data = b.data + col * b.row_stride;
      int64_t j = 0;
      for (; j + COLS <= cols; j += COLS) {
        dots<R, COLS>(a, lda, b, data + j * b.row_stride, j, partial);
      }
      for (; j < cols; ++j) {
        dots<R, 1>(a, lda, b, data + j * b.row_stride, j, partial);
      }
      for (const auto r : c10::irange(R)) {
        std::fill(partial[r][cols], partial[r][LANES], T(0));
        T* dst = c + r * ldc + col;
        const auto sums = sums_of(partial[r][0]);
        (add ? Vec::loadu(dst) + sums : sums).store(dst);
      }
    }
  }

  // partial[r][j + c] = a vector whose elements' sum is the dot product of row
  // r of A and the cth row of those at `data`
  template <int R, int C>
  static C10_ALWAYS_INLINE void dots(
      const T* a,
      int64_t lda,
      const Matrix<const S>& b,
      const S* data,
      int64_t j,
      T (*partial)[LANES][LANES]) {
    auto lo = zeros<T>(std::make_index_sequence<R * C>());
    auto hi = lo;
    const auto add_terms = [&](int64_t p,
                               auto... count) C10_ALWAYS_INLINE_ATTRIBUTE {
      c10::ForcedUnroll<C>{}([&](auto c) C10_ALWAYS_INLINE_ATTRIBUTE {
        const S* row = data + c * b.row_stride + p;
        for (int64_t i = 0; i < W; i += LINE) {
          prefetch_line(row + C * b.row_stride + i);
        }
        const auto right = load<T>(row, count...);
        c10::ForcedUnroll<R>{}([&](auto r) C10_ALWAYS_INLINE_ATTRIBUTE {
          constexpr int i = decltype(r)::value * C + decltype(c)::value;
          const auto left = load<T>(a + r * lda + p, count...);
          lo[i] = vec::fmadd(left[0], right[0], lo[i]);
          hi[i] = vec::fmadd(left[1], right[1], hi[i]);
        });
      });
    };
    int64_t p = 0;
    for (; p + W <= b.cols; p += W) {
      add_terms(p);
    }
    if (p < b.cols) {
      add_terms(p, b.cols - p);
    }
    c10::ForcedUnroll<R * C>{}([&](auto i) C10_ALWAYS_INLINE_ATTRIBUTE {
      (lo[i] + hi[i]).store(partial[i / C][j + i % C]);
    });
  }

  // The sum of each of as many vectors as one has elements.
  static C10_ALWAYS_INLINE Vec sums_of(const T* vectors) {
#if defined(CPU_CAPABILITY_AVX512)
    // Halves of two vectors, added, are one with half the terms of both.
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
} // namespace at::native
