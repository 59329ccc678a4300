#pragma once

#include <ATen/OpMathType.h>
#include <ATen/ceil_div.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/cpu/vec/vec_n.h>
#include <ATen/native/cpu/AttnTanh.h>
#include <c10/macros/Macros.h>
#include <c10/util/Unroll.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

// Loads and stores of whole and partial vectors. They convert between the
// precision S of tensors and the precision T of sums: T is float for half and
// bfloat16, else S.

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Prefetches the cache line of *p.
C10_ALWAYS_INLINE void prefetch_line([[maybe_unused]] const void* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p);
#endif
}

// Two vectors. Two of float have as many elements as one of half or bfloat16.
template <typename T>
using Pair = vec::VectorizedN<T, 2>;

template <typename T>
constexpr int64_t pair_size = Pair<T>::size();

// Returns accumulators that stay in registers. GCC keeps them in memory if they
// are made by a default constructor or in a loop, or if a function that uses
// them is inlined late. So lambdas have C10_ALWAYS_INLINE_ATTRIBUTE.
template <typename T, size_t... I>
C10_ALWAYS_INLINE std::array<vec::Vectorized<T>, sizeof...(I)> zeros(
    std::index_sequence<I...> /*indices*/) {
  return {((void)I, vec::Vectorized<T>(T(0)))...};
}

// Rounds floats to S. Adding to the bits of a NaN could give another number,
// but not here: a NaN of bfloat16, or computed from one, ends in zeros. So does
// one of the scale: see form_of.
template <typename S>
C10_ALWAYS_INLINE vec::Vectorized<S> round_pair(const Pair<float>& x) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<S, at::BFloat16>) {
    // Rounds to nearest even: adds half a unit, less one bit if the last bit
    // that stays is zero, and keeps the upper halves.
    const auto rounded = [](__m512i bits) C10_ALWAYS_INLINE_ATTRIBUTE {
      const auto last =
          _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      return _mm512_add_epi32(
          bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
    };
    alignas(64) static constexpr uint16_t upper[] = {
        1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(
        rounded(_mm512_castps_si512(x[0])),
        _mm512_load_si512(upper),
        rounded(_mm512_castps_si512(x[1])));
  }
#endif
  return vec::convert_from_float<S>(x[0], x[1]);
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
    round_pair<S>(x).store(p);
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
    round_pair<S>(x).store(p, count);
  }
}

// Stores a vector past the caches, where the machine can. p must be aligned.
template <typename S>
C10_ALWAYS_INLINE void store_streamed(S* p, const vec::Vectorized<S>& x) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<S, float>) {
    _mm512_stream_ps(p, x);
  } else if constexpr (std::is_same_v<S, double>) {
    _mm512_stream_pd(p, x);
  } else {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), x);
  }
#else
  x.store(p);
#endif
}

// Stores `count` elements. If `stream`, they are stored past the caches,
// because they are not read soon.
template <typename T, typename S>
C10_ALWAYS_INLINE void store(
    S* p, const Pair<T>& x, int64_t count, bool stream) {
  if (!stream || count < pair_size<T>) {
    store(p, x, count);
  } else if constexpr (std::is_same_v<T, S>) {
    store_streamed(p, x[0]);
    store_streamed(p + vec::Vectorized<T>::size(), x[1]);
  } else {
    store_streamed(p, round_pair<S>(x));
  }
}

// Completes stores past the caches before any later store. Locks and atomics
// don't order these.
inline void fence_streamed([[maybe_unused]] bool stream) {
#if defined(CPU_CAPABILITY_AVX512)
  if (stream) {
    _mm_sfence();
  }
#endif
}

// Returns tanh(x) of at least the first `count` elements, exact enough for S.
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

// Rounds x to S and converts it back.
template <typename S, typename T>
C10_ALWAYS_INLINE Pair<T> round_to(const Pair<T>& x) {
  if constexpr (std::is_same_v<T, S>) {
    return x;
  } else {
    auto [lo, hi] = vec::convert_to_float<S>(round_pair<S>(x));
    return {lo, hi};
  }
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
