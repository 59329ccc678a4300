// AVX-512 on any x86-64 machine: SIMDe has most of its functions for AVX2, and
// here are those that it lacks and attn's kernel calls, lane by lane. Included
// before all else.
#pragma once

#include <immintrin.h>
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#define __AVX512F__ 1 // so that SLEEF declares what at::vec names
#include <sleef.h>
#undef __AVX512F__

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace emulated {

template <typename T, typename V>
std::array<T, sizeof(V) / sizeof(T)> lanes(V x) {
  std::array<T, sizeof(V) / sizeof(T)> found;
  std::memcpy(&found, &x, sizeof(x));
  return found;
}

// Returns a vector whose lane i is fn(i).
template <typename V, typename T, typename F>
V made(const F& fn) {
  std::array<T, sizeof(V) / sizeof(T)> lanes;
  for (size_t i = 0; i < lanes.size(); ++i) {
    lanes[i] = fn(i);
  }
  V found;
  std::memcpy(&found, &lanes, sizeof(found));
  return found;
}

template <typename V, typename T>
V masked_load(uint64_t mask, const void* p) {
  return made<V, T>([&](size_t i) {
    return mask >> i & 1 ? static_cast<const T*>(p)[i] : T(0);
  });
}

template <typename T, typename V>
void masked_store(void* p, uint64_t mask, V x) {
  const auto from = lanes<T>(x);
  for (size_t i = 0; i < from.size(); ++i) {
    if (mask >> i & 1) {
      static_cast<T*>(p)[i] = from[i];
    }
  }
}

// Lane i of a result is of a or, if by_b(i), of b, within blocks of 16 bytes:
// the lane of the block that at(i) says.
template <typename T, typename V, typename B, typename A>
V shuffled(V a, V b, const B& by_b, const A& at) {
  constexpr size_t block = 16 / sizeof(T);
  const auto x = lanes<T>(a), y = lanes<T>(b);
  return made<V, T>([&](size_t i) {
    const auto from = i / block * block + at(i % block);
    return by_b(i % block) ? y[from] : x[from];
  });
}

// Block i of a result is block control[i] of a or, in the upper half, of b.
template <typename V>
V blocks(V a, V b, int control) {
  const auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(b);
  return made<V, uint32_t>([&](size_t i) {
    const auto from = (control >> (i / 4 * 2) & 3) * 4 + i % 4;
    return i < 8 ? x[from] : y[from];
  });
}

inline float no_subnormal(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x;
}

inline float from_bfloat16(uint16_t bits) {
  const uint32_t all = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &all, sizeof(x));
  return no_subnormal(x);
}

inline uint16_t to_bfloat16(float x) {
  x = no_subnormal(x);
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return std::isnan(x) ? bits >> 16 | 0x40
                       : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// VCVTNE2PS2BF16
inline __m512i round_to_bfloat16(__m512 low, __m512 high) {
  const auto x = lanes<float>(low), y = lanes<float>(high);
  return made<__m512i, uint16_t>(
      [&](size_t i) { return to_bfloat16(i < 16 ? x[i] : y[i - 16]); });
}

// VDPBF16PS, by Intel's manual: the second product of a pair is added last.
inline __m512 add_pairs(__m512 sum, __m512i a, __m512i b) {
  const auto c = lanes<float>(sum);
  const auto x = lanes<uint16_t>(a), y = lanes<uint16_t>(b);
  return made<__m512, float>([&](size_t i) {
    const auto product = [&](size_t j) {
      return no_subnormal(from_bfloat16(x[j]) * from_bfloat16(y[j]));
    };
    const float first = no_subnormal(c[i] + product(2 * i));
    return no_subnormal(first + product(2 * i + 1));
  });
}

// In place of cpublas::brgemm: c (+)= a b, where b is in VNNI layout.
template <typename S>
void brgemm(
    int64_t rows,
    int64_t cols,
    int64_t terms,
    int64_t lda,
    int64_t ldb,
    int64_t ldc,
    bool add,
    const S* a,
    const S* b,
    float* c) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      float sum = add ? c[i * ldc + j] : 0;
      for (int64_t p = 0; p < terms; ++p) {
        sum +=
            float(a[i * lda + p]) * float(b[p / 2 * 2 * ldb + 2 * j + p % 2]);
      }
      c[i * ldc + j] = sum;
    }
  }
}

} // namespace emulated

// clang-format off
#undef _mm512_cvtss_f32
#define _mm512_cvtss_f32(x) emulated::lanes<float>(x)[0]
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(x, rounding) [](__m512 v) { return emulated::made<__m256i, uint16_t>([y = emulated::lanes<float>(v)](size_t i) { return _cvtss_sh(y[i], 0); }); }(x)
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps(x) [](__m256i v) { return emulated::made<__m512, float>([y = emulated::lanes<uint16_t>(v)](size_t i) { return _cvtsh_ss(y[i]); }); }(x)
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(x) [](__m256i v) { return emulated::made<__m512i, uint32_t>([y = emulated::lanes<uint16_t>(v)](size_t i) { return y[i]; }); }(x)
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16(x) [](__m512i v) { return emulated::made<__m256i, uint16_t>([y = emulated::lanes<uint32_t>(v)](size_t i) { return y[i]; }); }(x)
#undef _mm512_extracti32x8_epi32
#define _mm512_extracti32x8_epi32(x, half) [](__m512i v) { return emulated::made<__m256i, uint32_t>([y = emulated::lanes<uint32_t>(v)](size_t i) { return y[8 * (half) + i]; }); }(x)
#undef _mm512_zextsi128_si512
#define _mm512_zextsi128_si512(x) [](__m128i v) { return emulated::made<__m512i, uint32_t>([y = emulated::lanes<uint32_t>(v)](size_t i) { return i < 4 ? y[i] : 0; }); }(x)
#undef _mm512_inserti32x4
#define _mm512_inserti32x4(x, part, block) [](__m512i v, __m128i w) { std::memcpy(reinterpret_cast<char*>(&v) + 16 * (block), &w, 16); return v; }(x, part)
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps(mask, p) emulated::masked_load<__m512, float>(mask, p)
#undef _mm512_maskz_loadu_pd
#define _mm512_maskz_loadu_pd(mask, p) emulated::masked_load<__m512d, double>(mask, p)
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16(mask, p) emulated::masked_load<__m256i, uint16_t>(mask, p)
#undef _mm_maskz_loadu_epi16
#define _mm_maskz_loadu_epi16(mask, p) emulated::masked_load<__m128i, uint16_t>(mask, p)
#undef _mm512_maskz_loadu_epi16
#define _mm512_maskz_loadu_epi16(mask, p) emulated::masked_load<__m512i, uint16_t>(mask, p)
#undef _mm512_mask_storeu_epi16
#define _mm512_mask_storeu_epi16(p, mask, x) emulated::masked_store<uint16_t>(p, mask, x)
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps(p, mask, x) emulated::masked_store<float>(p, mask, x)
#undef _mm512_mask_storeu_pd
#define _mm512_mask_storeu_pd(p, mask, x) emulated::masked_store<double>(p, mask, x)
#undef _mm512_unpacklo_epi64
#define _mm512_unpacklo_epi64(a, b) emulated::shuffled<uint64_t, __m512i>(a, b, [](size_t i) { return i == 1; }, [](size_t) { return 0; })
#undef _mm512_unpackhi_epi64
#define _mm512_unpackhi_epi64(a, b) emulated::shuffled<uint64_t, __m512i>(a, b, [](size_t i) { return i == 1; }, [](size_t) { return 1; })
#undef _mm512_permute_ps
#define _mm512_permute_ps(x, control) emulated::shuffled<float, __m512>(x, x, [](size_t) { return false; }, [](size_t i) { return (control) >> 2 * i & 3; })
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4(a, b, control) emulated::blocks<__m512>(a, b, control)
#undef _mm512_shuffle_f64x2
#define _mm512_shuffle_f64x2(a, b, control) emulated::blocks<__m512d>(a, b, control)
#undef _mm512_stream_ps
#define _mm512_stream_ps(p, x) _mm512_storeu_ps(p, x)
#undef _mm512_stream_pd
#define _mm512_stream_pd(p, x) _mm512_storeu_pd(p, x)
#undef _mm512_stream_si512
#define _mm512_stream_si512(p, x) _mm512_storeu_si512(p, x)
// clang-format on
