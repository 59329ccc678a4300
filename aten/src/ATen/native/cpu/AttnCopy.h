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
// dst[j * dst_ld + i] = src[i][j], for at most as many rows as a vector has
// elements. Rows of src are `src_bytes` apart. Blocks of four columns (two in
// double) are transposed within 128-bit lanes.
inline void transpose_rows(
    const void* src,
    int64_t src_bytes,
    float* dst,
    int64_t dst_ld,
    int64_t rows,
    int64_t cols) {
  const auto row_mask = static_cast<__mmask16>((1u << rows) - 1);
  for (int64_t j = 0; j < cols; j += 4) {
    const auto count = std::min<int64_t>(4, cols - j);
    const auto mask = static_cast<__mmask8>((1u << count) - 1);
    const auto part = [&](int64_t i) {
      const auto present = i < rows ? mask : __mmask8(0);
      return _mm_maskz_loadu_ps(
          present, static_cast<const char*>(src) + i * src_bytes + 4 * j);
    };
    __m512 x[4];
    for (int64_t i = 0; i < 4; ++i) {
      x[i] = _mm512_castps128_ps512(part(i));
      x[i] = _mm512_insertf32x4(x[i], part(i + 4), 1);
      x[i] = _mm512_insertf32x4(x[i], part(i + 8), 2);
      x[i] = _mm512_insertf32x4(x[i], part(i + 12), 3);
    }
    const auto lo01 = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1]));
    const auto hi01 = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
    const auto lo23 = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3]));
    const auto hi23 = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
    const __m512 y[4] = {
        _mm512_castpd_ps(_mm512_unpacklo_pd(lo01, lo23)),
        _mm512_castpd_ps(_mm512_unpackhi_pd(lo01, lo23)),
        _mm512_castpd_ps(_mm512_unpacklo_pd(hi01, hi23)),
        _mm512_castpd_ps(_mm512_unpackhi_pd(hi01, hi23))};
    for (int64_t c = 0; c < count; ++c) {
      _mm512_mask_storeu_ps(dst + (j + c) * dst_ld, row_mask, y[c]);
    }
  }
}
inline void transpose_rows(
    const void* src,
    int64_t src_bytes,
    double* dst,
    int64_t dst_ld,
    int64_t rows,
    int64_t cols) {
  const auto row_mask = static_cast<__mmask8>((1u << rows) - 1);
  for (int64_t j = 0; j < cols; j += 2) {
    const auto count = std::min<int64_t>(2, cols - j);
    const auto mask = static_cast<__mmask8>((1u << count) - 1);
    const auto part = [&](int64_t i) {
      const auto present = i < rows ? mask : __mmask8(0);
      return _mm_maskz_loadu_pd(
          present, static_cast<const char*>(src) + i * src_bytes + 8 * j);
    };
    __m512d x[2];
    for (int64_t i = 0; i < 2; ++i) {
      x[i] = _mm512_castpd128_pd512(part(i));
      x[i] = _mm512_insertf64x2(x[i], part(i + 2), 1);
      x[i] = _mm512_insertf64x2(x[i], part(i + 4), 2);
      x[i] = _mm512_insertf64x2(x[i], part(i + 6), 3);
    }
    const __m512d y[2] = {
        _mm512_unpacklo_pd(x[0], x[1]), _mm512_unpackhi_pd(x[0], x[1])};
    for (int64_t c = 0; c < count; ++c) {
      _mm512_mask_storeu_pd(dst + (j + c) * dst_ld, row_mask, y[c]);
    }
  }
}
#endif

// dst[j * dst_ld + i] = src[i * src_ld + j]
template <typename T>
void transpose(
    const T* src,
    int64_t src_ld,
    T* dst,
    int64_t dst_ld,
    int64_t rows,
    int64_t cols) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, at::opmath_type<T>>) {
    constexpr int64_t lanes = vec::Vectorized<T>::size();
    for (int64_t i = 0; i < rows; i += lanes) {
      const auto count = std::min(lanes, rows - i);
      if (cols <= lanes) { // Prefetching makes short rows faster.
        for (int64_t j = 0; j < lanes * cols; j += 64 / sizeof(T)) {
          prefetch_line(src + (i + 4 * lanes) * src_ld + j);
        }
      }
      transpose_rows(
          src + i * src_ld, src_ld * sizeof(T), dst + i, dst_ld, count, cols);
    }
    return;
  }
#endif
  vec::transpose_mxn<T>(
      src, src_ld, dst, dst_ld, static_cast<int>(rows), static_cast<int>(cols));
}

// dst[i * dst_ld + j] = x[i][j]
template <typename T, typename S>
void copy_rows(T* dst, int64_t dst_ld, const Matrix<const S>& x) {
  using Opmath = at::opmath_type<S>;
  constexpr int64_t w = pair_size<Opmath>;
  if (x.col_stride == 1) {
    const bool flat = x.cols == dst_ld && x.cols == x.row_stride;
    const auto rows = flat ? 1 : x.rows;
    const auto cols = flat ? x.rows * x.cols : x.cols;
    const S* src = x.data;
    for (int64_t i = 0; i < rows; ++i, src += x.row_stride, dst += dst_ld) {
      for (int64_t j = 0; j < cols; j += w) {
        store(dst + j, load<Opmath>(src + j, cols - j), cols - j);
      }
    }
    return;
  }
  // Each row is one number, as in the gradient of a sum, which is expanded.
  if (x.col_stride == 0 && x.cols > 0) {
    for (const auto i : c10::irange(x.rows)) {
      std::fill_n(dst + i * dst_ld, x.cols, static_cast<T>(x.at(i, 0)));
    }
    return;
  }
  if (x.row_stride == 1) {
    if constexpr (std::is_same_v<T, S>) {
      transpose(x.data, x.col_stride, dst, dst_ld, x.cols, x.rows);
      return;
    } else if constexpr (std::is_same_v<T, Opmath>) {
      alignas(64) T block[w * w];
      for (int64_t i = 0; i < x.rows; i += w) {
        const auto rows = std::min(w, x.rows - i);
        for (int64_t j = 0; j < x.cols; j += w) {
          const auto cols = std::min(w, x.cols - j);
          copy_rows<T, S>(block, w, x.block(i, j, rows, cols).t());
          transpose(block, w, dst + i * dst_ld + j, dst_ld, cols, rows);
        }
      }
      return;
    }
  }
  for (const auto i : c10::irange(x.rows)) {
    for (const auto j : c10::irange(x.cols)) {
      dst[i * dst_ld + j] = static_cast<T>(x.at(i, j));
    }
  }
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
