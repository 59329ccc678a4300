#pragma once

#include <ATen/native/cpu/AttnMatrix.h>
#include <ATen/native/cpu/AttnVec.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

// Copies of matrices and sums: packed, transposed, converted.

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// dst (+)= x
template <typename T, typename O>
void add_sum(bool accumulate, O* dst, const T* x, int64_t count) {
  for (int64_t i = 0; i < count; i += pair_size<T>) {
    const auto y = load<T>(x + i, count - i);
    store(dst + i, accumulate ? load<T>(dst + i, count - i) + y : y, count - i);
  }
}

// dst = x
template <typename T, typename S>
void convert(S* dst, const T* x, int64_t count) {
  for (int64_t i = 0; i < count; i += pair_size<T>) {
    store(dst + i, load<T>(x + i, count - i), count - i);
  }
}

#if defined(CPU_CAPABILITY_AVX512)
// Transposes as many rows as a vector of T has elements, of which `rows` exist;
// the others are zeros. Calls store(j, x) for each column j, with x[i] =
// src[i][j]. Numbers of 2 bytes are moved in pairs: then j is even, and x[i]
// has the bits of src[i][j] and, above them, those of src[i][j + 1], or zeros
// after the last column. Blocks of 16 bytes a row are transposed within 128-bit
// lanes.
template <typename T, typename S, typename F>
C10_ALWAYS_INLINE void transpose_rows(
    const S* src, int64_t src_ld, int64_t rows, int64_t cols, const F& store) {
  constexpr int64_t step = 16 / sizeof(S);
  const auto block =
      [&](int64_t j, int64_t count, auto whole) C10_ALWAYS_INLINE_ATTRIBUTE {
        const auto mask = (1u << (count * sizeof(S) / 2)) - 1;
        const auto row = [&](int64_t i) C10_ALWAYS_INLINE_ATTRIBUTE {
          const S* p = src + i * src_ld + j;
          if constexpr (decltype(whole)::value) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
          }
          return _mm_maskz_loadu_epi16(
              static_cast<__mmask8>(i < rows ? mask : 0), p);
        };
        // Rows i, i + n, i + 2 n and i + 3 n, where n is a quarter of the rows.
        const auto four_rows = [&](int64_t i) C10_ALWAYS_INLINE_ATTRIBUTE {
          constexpr int64_t n = 16 / sizeof(T);
          auto x = _mm512_zextsi128_si512(row(i));
          if (!decltype(whole)::value && rows <= n) {
            return x;
          }
          x = _mm512_inserti32x4(x, row(i + n), 1);
          x = _mm512_inserti32x4(x, row(i + 2 * n), 2);
          return _mm512_inserti32x4(x, row(i + 3 * n), 3);
        };
        const auto a = four_rows(0), b = four_rows(1);
        if constexpr (sizeof(T) == 8) {
          store(j, _mm512_unpacklo_epi64(a, b));
          if (count > 1) {
            store(j + 1, _mm512_unpackhi_epi64(a, b));
          }
        } else {
          const auto c = four_rows(2), d = four_rows(3);
          const auto lo_ab = _mm512_unpacklo_epi32(a, b);
          const auto hi_ab = _mm512_unpackhi_epi32(a, b);
          const auto lo_cd = _mm512_unpacklo_epi32(c, d);
          const auto hi_cd = _mm512_unpackhi_epi32(c, d);
          const __m512i columns[] = {
              _mm512_unpacklo_epi64(lo_ab, lo_cd),
              _mm512_unpackhi_epi64(lo_ab, lo_cd),
              _mm512_unpacklo_epi64(hi_ab, hi_cd),
              _mm512_unpackhi_epi64(hi_ab, hi_cd)};
          constexpr int64_t each = step / 4;
          for (int64_t i = 0; i < count; i += each) {
            store(j + i, columns[i / each]);
          }
        }
      };
  constexpr int64_t most = 64 / sizeof(T); // rows
  for (int64_t j = 0; j < cols; j += step) {
    const auto count = std::min(step, cols - j);
    // Only columns up to cols are stored, so what follows them may be read, if
    // it is part of the matrix. A masked load takes ten times as long if it
    // crosses cache lines (Zen 5). The upper half of a pair must be zeros.
    const bool is_inside = rows >= most &&
                           (rows - most) * src_ld >= j + step - cols &&
                           (sizeof(S) > 2 || count % 2 == 0);
    if (is_inside) {
      block(j, count, std::true_type());
    } else {
      block(j, count, std::false_type());
    }
  }
}

// Converts the lower and the upper halves of 32-bit numbers, which are of S.
template <typename S>
C10_ALWAYS_INLINE Pair<float> halves(__m512i x) {
  const auto upper = _mm512_srli_epi32(x, 16);
  if constexpr (std::is_same_v<S, at::BFloat16>) {
    return {
        _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
        _mm512_castsi512_ps(_mm512_slli_epi32(upper, 16))};
  } else {
    return {
        _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)),
        _mm512_cvtph_ps(_mm512_cvtepi32_epi16(upper))};
  }
}

// Prefetches the `rows` rows of a transposition after the next ones: short rows
// further ahead.
template <typename S>
C10_ALWAYS_INLINE void prefetch_rows(
    const S* src, int64_t src_ld, int64_t rows, int64_t cols) {
  constexpr int64_t line = 64 / sizeof(S);
  if (src_ld <= line) {
    const S* ahead = src + 4 * rows * src_ld;
    for (int64_t i = 0; i < rows * src_ld; i += line) {
      prefetch_line(ahead + i);
    }
    return;
  }
  for (int64_t i = rows; i < 2 * rows; ++i) {
    for (int64_t j = 0; j < cols; j += line) {
      prefetch_line(src + i * src_ld + j);
    }
  }
}
#endif

// dst[j * dst_ld + i] = src[i * src_ld + j], and zeros for i from `rows` to
// `width`.
template <typename T, typename S>
void transpose(
    const S* src,
    int64_t src_ld,
    T* dst,
    int64_t dst_ld,
    int64_t rows,
    int64_t cols,
    int64_t width = 0) {
  width = std::max(rows, width);
#if defined(CPU_CAPABILITY_AVX512)
  using Vec = vec::Vectorized<T>;
  for (int64_t i = 0; i < width; i += Vec::size()) {
    const S* from = src + i * src_ld;
    const auto count = std::min<int64_t>(Vec::size(), width - i);
    if (i + Vec::size() < rows) {
      prefetch_rows(from, src_ld, Vec::size(), cols);
    }
    transpose_rows<T>(
        from,
        src_ld,
        rows - i,
        cols,
        [&](int64_t j, __m512i x) C10_ALWAYS_INLINE_ATTRIBUTE {
          T* to = dst + j * dst_ld + i;
          if constexpr (std::is_same_v<S, double>) {
            Vec(_mm512_castsi512_pd(x)).store(to, count);
          } else if constexpr (std::is_same_v<S, float>) {
            Vec(_mm512_castsi512_ps(x)).store(to, count);
          } else {
            const auto both = halves<S>(x);
            both[0].store(to, count);
            if (j + 1 < cols) {
              both[1].store(to + dst_ld, count);
            }
          }
        });
  }
#else
  for (int64_t j = 0; rows < width && j < cols; ++j) {
    std::fill(dst + j * dst_ld + rows, dst + j * dst_ld + width, T(0));
  }
  if constexpr (std::is_same_v<T, S>) {
    vec::transpose_mxn<T>(
        src,
        src_ld,
        dst,
        dst_ld,
        static_cast<int>(rows),
        static_cast<int>(cols));
  } else { // by blocks, which are converted first
    constexpr int64_t w = pair_size<T>;
    alignas(64) T block[w * w];
    for (int64_t i = 0; i < rows; i += w) {
      for (int64_t j = 0; j < cols; j += w) {
        const auto block_rows = std::min(w, rows - i);
        const auto block_cols = std::min(w, cols - j);
        for (int64_t r = 0; r < block_rows; ++r) {
          const S* from = src + (i + r) * src_ld + j;
          store(block + r * w, load<T>(from, block_cols));
        }
        T* to = dst + j * dst_ld + i;
        transpose(block, w, to, dst_ld, block_rows, block_cols);
      }
    }
  }
#endif
}

// dst[i * dst_ld + j] = x[i][j], and zeros for j from x.cols to `width`.
template <typename T, typename S>
void copy_rows(
    T* dst, int64_t dst_ld, const Matrix<const S>& x, int64_t width = 0) {
  width = std::max(x.cols, width);
  constexpr int64_t w = pair_size<T>;
  if (x.col_stride == 1) {
    const bool flat = x.cols == dst_ld && x.cols == x.row_stride;
    const auto rows = flat ? 1 : x.rows;
    const auto cols = flat ? x.rows * x.cols : x.cols;
    const auto end = flat ? cols : width;
    const S* src = x.data;
    for (int64_t i = 0; i < rows; ++i, src += x.row_stride, dst += dst_ld) {
      for (int64_t j = 0; j < end; j += w) {
        const auto count = std::max<int64_t>(cols - j, 0);
        store(dst + j, load<T>(src + j, count), end - j);
      }
    }
    return;
  }
  if (x.row_stride == 1) {
    transpose(x.data, x.col_stride, dst, dst_ld, x.cols, x.rows, width);
    return;
  }
  for (int64_t i = 0; i < x.rows; ++i, dst += dst_ld) {
    if (x.col_stride == 0 && x.cols > 0) { // as in the gradient of a sum
      std::fill_n(dst, x.cols, static_cast<T>(x.at(i, 0)));
    } else {
      for (const auto j : c10::irange(x.cols)) {
        dst[j] = static_cast<T>(x.at(i, j));
      }
    }
    std::fill(dst + x.cols, dst + width, T(0));
  }
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
