#pragma once

#include <ATen/OpMathType.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/cpu/AttnTanh.h>
#include <c10/macros/Macros.h>
#include <c10/util/Unroll.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

// Note [Tiles of attn]
// attn, its gradient and that of the scores are m x n. Of these only attn is
// ever in memory, and written once. They exist as tiles, blocks of a few rows
// and at most ATTN_BLOCK columns, in a thread's scratch memory. Every sum over
// a tile starts from zero, and the sums of tiles are added in the tiles' order,
// whichever threads they are on: results don't depend on the number of threads.
//
// A class of tiles computes them; it is made for a task and a scratch memory of
// its own. Forward, block by block of columns:
//   forward()       attn = tanh(q kᵀ), out (+)= attn v
//   add_output()    out (+)= attn v, of an attn that was made before
// Backward, of one tile:
//   start_tile()    S = (grad_output vᵀ + grad_attn) (1 - attn²), and attn
//   add_grad_q()    total (+)= S k
//   add_grad_k()    total (+)= Sᵀ q
//   add_grad_v()    total (+)= attnᵀ grad_output
//   finish_block()  the total of a block of grad_k or grad_v, to where it
//   belongs
// A total is of the precision of the sums. Where a tile's sums are all of it,
// it may be the gradient itself, of lower precision; in LoopTiles it is.
//
// Scratch memory is bounded, whatever the sizes: what grows with d or e is made
// in blocks of columns.

namespace at::native {
inline namespace CPU_CAPABILITY {

constexpr int64_t ATTN_BLOCK = 288;
// From one row of a tile to the next. No power of two, lest rows fall into the
// same cache sets.
constexpr int64_t ATTN_LD = ATTN_BLOCK + 16;

// A matrix of any strides.
template <typename S>
struct Matrix {
  S* data;
  int64_t rows, cols, row_stride, col_stride;

  Matrix block(int64_t row, int64_t col, int64_t rows, int64_t cols) const {
    return {
        data + row * row_stride + col * col_stride,
        rows,
        cols,
        row_stride,
        col_stride};
  }
  S& at(int64_t row, int64_t col) const {
    return data[row * row_stride + col * col_stride];
  }
  Matrix t() const {
    return {data, cols, rows, col_stride, row_stride};
  }
};

// The line of the cache that holds *p will be used soon.
C10_ALWAYS_INLINE void prefetch_line([[maybe_unused]] const void* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p);
#endif
}

// Two vectors.
template <typename T>
struct Pair {
  vec::Vectorized<T> lo, hi;
};

// Vectors for sums that shall stay in registers. The compiler leaves them in
// memory where they are made by a default constructor, in a loop, or where a
// function that uses them, such as a lambda, is not inlined early: hence also
// C10_ALWAYS_INLINE_ATTRIBUTE.
template <typename T, size_t... I>
C10_ALWAYS_INLINE std::array<vec::Vectorized<T>, sizeof...(I)> zeros(
    std::index_sequence<I...> /*indices*/) {
  return {((void)I, vec::Vectorized<T>(T(0)))...};
}

template <typename T>
constexpr int64_t pair_size = 2 * vec::Vectorized<T>::size();

template <typename T>
inline Pair<T> operator+(const Pair<T>& x, const Pair<T>& y) {
  return {x.lo + y.lo, x.hi + y.hi};
}

// x y + z
template <typename T>
inline Pair<T> fmadd(const Pair<T>& x, const Pair<T>& y, const Pair<T>& z) {
  return {vec::fmadd(x.lo, y.lo, z.lo), vec::fmadd(x.hi, y.hi, z.hi)};
}

// x (1 - y²)
template <typename T>
inline Pair<T> tanh_backward(const Pair<T>& x, const Pair<T>& y) {
  const vec::Vectorized<T> one(T(1));
  return {x.lo * (one - y.lo * y.lo), x.hi * (one - y.hi * y.hi)};
}

template <typename T, typename S>
inline Pair<T> load(const S* p) {
  using Vec = vec::Vectorized<T>;
  if constexpr (std::is_same_v<T, S>) {
    return {Vec::loadu(p), Vec::loadu(p + Vec::size())};
  } else {
    auto [lo, hi] = vec::convert_to_float<S>(vec::Vectorized<S>::loadu(p));
    return {lo, hi};
  }
}

// The first `count`, and zeros.
template <typename T, typename S>
inline Pair<T> load(const S* p, int64_t count) {
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
inline void store(S* p, const Pair<T>& x) {
  if constexpr (std::is_same_v<T, S>) {
    x.lo.store(p);
    x.hi.store(p + vec::Vectorized<T>::size());
  } else {
    vec::convert_from_float<S>(x.lo, x.hi).store(p);
  }
}

template <typename T, typename S>
inline void store(S* p, const Pair<T>& x, int64_t count) {
  constexpr int64_t size = vec::Vectorized<T>::size();
  if (count >= 2 * size) {
    store(p, x);
  } else if constexpr (std::is_same_v<T, S>) {
    x.lo.store(p, std::min(count, size));
    if (count > size) {
      x.hi.store(p + size, count - size);
    }
  } else {
    vec::convert_from_float<S>(x.lo, x.hi).store(p, count);
  }
}

// Past the caches if `stream`, for what is not read soon; p is then aligned.
template <typename T, typename S>
inline void store(S* p, const Pair<T>& x, int64_t count, bool stream) {
#if defined(CPU_CAPABILITY_AVX512)
  if (stream && count >= pair_size<T>) {
    if constexpr (std::is_same_v<S, float>) {
      _mm512_stream_ps(p, x.lo);
      _mm512_stream_ps(p + 16, x.hi);
      return;
    } else if constexpr (std::is_same_v<S, double>) {
      _mm512_stream_pd(p, x.lo);
      _mm512_stream_pd(p + 8, x.hi);
      return;
    } else {
      _mm512_stream_si512(
          reinterpret_cast<__m512i*>(p),
          vec::convert_from_float<S>(x.lo, x.hi));
      return;
    }
  }
#endif
  store(p, x, count);
}

// What was stored past the caches comes before what is stored after this: such
// stores are in no order, and no lock or atomic waits for them.
inline void fence_streamed([[maybe_unused]] bool stream) {
#if defined(CPU_CAPABILITY_AVX512)
  if (stream) {
    _mm_sfence();
  }
#endif
}

// tanh(x), as exact as S can hold it
template <typename S, typename T>
inline Pair<T> attn_tanh_for(const Pair<T>& x) {
  if constexpr (std::is_same_v<T, S>) {
    return {attn_tanh(x.lo), attn_tanh(x.hi)};
  } else {
    return {attn_tanh_reduced(x.lo), attn_tanh_reduced(x.hi)};
  }
}

// What is left of x when it is stored as S.
template <typename S, typename T>
inline Pair<T> rounded(const Pair<T>& x) {
  if constexpr (std::is_same_v<T, S>) {
    return x;
  } else {
    auto [lo, hi] =
        vec::convert_to_float<S>(vec::convert_from_float<S>(x.lo, x.hi));
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

// dst[i * dst_ld + j] = x[i][j]
template <typename T, typename S>
void copy_rows(T* dst, int64_t dst_ld, const Matrix<const S>& x) {
  using Opmath = at::opmath_type<S>;
  constexpr int64_t w = pair_size<Opmath>;
  if constexpr (std::is_same_v<T, S>) {
    if (x.row_stride == 1 && x.col_stride != 1) {
      const int rows = static_cast<int>(x.rows);
      const int cols = static_cast<int>(x.cols);
      vec::transpose_mxn<T>(x.data, x.col_stride, dst, dst_ld, cols, rows);
      return;
    }
  }
  const S* src = x.data;
  for (int64_t i = 0; i < x.rows; ++i, src += x.row_stride, dst += dst_ld) {
    if (x.col_stride == 1) {
      for (int64_t j = 0; j < x.cols; j += w) {
        store(dst + j, load<Opmath>(src + j, x.cols - j), x.cols - j);
      }
    } else {
      for (const auto j : c10::irange(x.cols)) {
        dst[j] = static_cast<T>(src[j * x.col_stride]);
      }
    }
  }
}

inline int64_t round_up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

} // namespace CPU_CAPABILITY
} // namespace at::native
