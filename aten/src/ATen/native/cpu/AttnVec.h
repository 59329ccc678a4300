#pragma once

#include <ATen/OpMathType.h>
#include <ATen/ceil_div.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/cpu/vec/vec_n.h>
#include <ATen/native/cpu/AttnMatrix.h>
#include <ATen/native/cpu/AttnTanh.h>
#include <c10/macros/Macros.h>
#include <c10/util/Unroll.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

// The vectors that the kernels of attn move: loads and stores of a part of a
// vector, and conversions from and to the precision S of the tensors. Sums are
// of precision T, which is S or, of half and bfloat16, float.

namespace at::native {
inline namespace CPU_CAPABILITY {

// NC, the most columns of a tile, and KC, the most terms that a micro-kernel
// sums at once.
constexpr int64_t ATTN_BLOCK = 288;
// The leading dimension of a tile. No power of two, lest rows fall into the
// same cache sets.
constexpr int64_t ATTN_LD = ATTN_BLOCK + 16;

// The line of the cache that holds *p will be used soon.
C10_ALWAYS_INLINE void prefetch_line([[maybe_unused]] const void* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p);
#endif
}

// Two vectors: as many floats as there are elements in one of half or bfloat16.
template <typename T>
using Pair = vec::VectorizedN<T, 2>;

template <typename T>
constexpr int64_t pair_size = Pair<T>::size();

// Accumulators that shall stay in registers. The compiler leaves them in memory
// where they are made by a default constructor, in a loop, or where a function
// that uses them, such as a lambda, is not inlined early: hence also
// C10_ALWAYS_INLINE_ATTRIBUTE.
template <typename T, size_t... I>
C10_ALWAYS_INLINE std::array<vec::Vectorized<T>, sizeof...(I)> zeros(
    std::index_sequence<I...> /*indices*/) {
  return {((void)I, vec::Vectorized<T>(T(0)))...};
}

// x (1 - y²)
template <typename T>
C10_ALWAYS_INLINE Pair<T> tanh_backward(const Pair<T>& x, const Pair<T>& y) {
  return x * (Pair<T>(T(1)) - y * y);
}

template <typename T, typename S>
C10_ALWAYS_INLINE Pair<T> load(const S* p) {
  using Vec = vec::Vectorized<T>;
  if constexpr (std::is_same_v<T, S>) {
    return {Vec::loadu(p), Vec::loadu(p + Vec::size())};
  } else {
    auto [lo, hi] = vec::convert_to_float<S>(vec::Vectorized<S>::loadu(p));
    return {lo, hi};
  }
}

// Loads `count` elements and zero-fills the rest.
template <typename T, typename S>
C10_ALWAYS_INLINE Pair<T> load(const S* p, int64_t count) {
  using Vec = vec::Vectorized<T>;
  constexpr int64_t size = Vec::size();
  if (count >= 2 * size) {
    return load<T>(p);
  }
  if constexpr (std::is_same_v<T, S>) {
    return {
        Vec::loadu(p, std::min(count, size)),
        count > size ? Vec::loadu(p + size, count - size) : Vec(T(0))};
  } else {
    auto [lo, hi] =
        vec::convert_to_float<S>(vec::Vectorized<S>::loadu(p, count));
#if !defined(CPU_CAPABILITY_AVX512)
    // Not all releases' loadu makes the rest zeros.
    const Vec zero(T(0));
    lo = Vec::set(zero, lo, std::min(count, size));
    hi = Vec::set(zero, hi, std::max(count - size, int64_t(0)));
#endif
    return {lo, hi};
  }
}

template <typename T, typename S>
C10_ALWAYS_INLINE void store(S* p, const Pair<T>& x) {
  if constexpr (std::is_same_v<T, S>) {
    x[0].store(p);
    x[1].store(p + vec::Vectorized<T>::size());
  } else {
    vec::convert_from_float<S>(x[0], x[1]).store(p);
  }
}

template <typename T, typename S>
C10_ALWAYS_INLINE void store(S* p, const Pair<T>& x, int64_t count) {
  constexpr int64_t size = vec::Vectorized<T>::size();
  if (count >= 2 * size) {
    store(p, x);
  } else if constexpr (std::is_same_v<T, S>) {
    x[0].store(p, std::min(count, size));
    if (count > size) {
      x[1].store(p + size, count - size);
    }
  } else {
    vec::convert_from_float<S>(x[0], x[1]).store(p, count);
  }
}

// Stores `count` elements, and where `stream` past the caches, as what is not
// read soon; p is then aligned.
template <typename T, typename S>
C10_ALWAYS_INLINE void store(
    S* p, const Pair<T>& x, int64_t count, bool stream) {
#if defined(CPU_CAPABILITY_AVX512)
  if (stream && count >= pair_size<T>) {
    if constexpr (std::is_same_v<S, float>) {
      _mm512_stream_ps(p, x[0]);
      _mm512_stream_ps(p + 16, x[1]);
      return;
    } else if constexpr (std::is_same_v<S, double>) {
      _mm512_stream_pd(p, x[0]);
      _mm512_stream_pd(p + 8, x[1]);
      return;
    } else {
      _mm512_stream_si512(
          reinterpret_cast<__m512i*>(p),
          vec::convert_from_float<S>(x[0], x[1]));
      return;
    }
  }
#endif
  store(p, x, count);
}

// Orders what was stored past the caches before all later stores. No lock or
// atomic does.
inline void fence_streamed([[maybe_unused]] bool stream) {
#if defined(CPU_CAPABILITY_AVX512)
  if (stream) {
    _mm_sfence();
  }
#endif
}

// tanh(x), as exact as S can hold it, of the first `count` elements at least
template <typename S, typename T>
C10_ALWAYS_INLINE Pair<T> attn_tanh_for(const Pair<T>& x, int64_t count) {
  const auto tanh = [](const auto& y) {
    if constexpr (std::is_same_v<T, S>) {
      return attn_tanh(y);
    } else {
      return attn_tanh_reduced(y);
    }
  };
  const bool second = count > vec::Vectorized<T>::size();
  return {tanh(x[0]), second ? tanh(x[1]) : x[1]};
}

// x, rounded to S.
template <typename S, typename T>
C10_ALWAYS_INLINE Pair<T> round_to(const Pair<T>& x) {
  if constexpr (std::is_same_v<T, S>) {
    return x;
  } else {
    auto [lo, hi] =
        vec::convert_to_float<S>(vec::convert_from_float<S>(x[0], x[1]));
    return {lo, hi};
  }
}

// dst (+)= x
template <typename T, typename O>
void add_sum(bool first, O* dst, const T* x, int64_t count) {
  for (int64_t i = 0; i < count; i += pair_size<T>) {
    const auto y = load<T>(x + i, count - i);
    store(dst + i, first ? y : load<T>(dst + i, count - i) + y, count - i);
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
// dst[j * dst_ld + i] = src[i][j] for at most as many rows as a vector has
// elements, which are so many bytes from one another. Parts of four columns (of
// two, in double) are transposed within the lanes of 128 bits.
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
  if (x.row_stride == 1) {
    if constexpr (std::is_same_v<T, S>) {
      transpose(x.data, x.col_stride, dst, dst_ld, x.cols, x.rows);
      return;
    } else if constexpr (std::is_same_v<T, Opmath>) {
      alignas(64) T widened[w * w];
      for (int64_t i = 0; i < x.rows; i += w) {
        const auto rows = std::min(w, x.rows - i);
        for (int64_t j = 0; j < x.cols; j += w) {
          const auto cols = std::min(w, x.cols - j);
          copy_rows<T, S>(widened, w, x.block(i, j, rows, cols).t());
          transpose(widened, w, dst + i * dst_ld + j, dst_ld, cols, rows);
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

// Hands out the parts of a scratch memory, by their offsets. Each begins with a
// line of the cache if the memory does.
class ScratchLayout {
 public:
  int64_t add(int64_t count) {
    const auto begin = size_;
    size_ += at::round_up<int64_t>(count, 64);
    return begin;
  }
  int64_t size() const {
    return size_;
  }

 private:
  int64_t size_ = 0;
};

} // namespace CPU_CAPABILITY
} // namespace at::native
