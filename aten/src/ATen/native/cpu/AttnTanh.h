#pragma once

#include <ATen/cpu/vec/vec.h>
#include <c10/macros/Macros.h>
#include <c10/util/Unroll.h>

#include <type_traits>

// tanh of the vectors that a kernel of attn has in its registers, for all x.
//
//   function           lanes   with     largest error  found
//   attn_tanh          float   AVX512   1.4 ULP        1.31, of all floats
//                              others   2.5 ULP        2.496, of all floats
//   attn_tanh          double  AVX512   1 ULP          0.93, of 5 * 10^7
//                              others   1 ULP          0.89, of 10^8
//                              no FMA   1.5 ULP        1.475, of 10^8
//   attn_tanh_reduced  float   any      2^-14.6 tanh   2^-14.69, of all floats
//
// Each is exactly odd, keeps NaN and the sign of zero, and never exceeds 1.
// Each reaches 1, attn_tanh_reduced after rounding.
//
// The constants are of minimax approximations:
// tools/attn_tanh_coefficients.py derives them and checks those below.

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// clang-format off
alignas(64) constexpr float attn_tanh_avx512[6][32] = {
    {1.52050781f, 1.75469971f, 2.00341797f, 2.24560547f, 2.52929688f,
     2.7097168f, 3.04248047f, 3.19921875f, 3.62322998f, 4.08572388f,
     4.60354614f, 5.10247803f, 5.5480957f, 6.16238403f, 6.64279175f,
     7.21893311f, 7.85961914f, 8.66521263f, 0.f, 0.095123291f, 0.155563354f,
     0.215759277f, 0.278778076f, 0.345428467f, 0.439956665f, 0.567718506f,
     0.688842773f, 0.804168701f, 0.95123291f, 1.05082703f, 1.18199158f,
     1.30961609f},
    {0.908786118f, 0.941908062f, 0.964268267f, 0.977834284f, 0.987371266f,
     0.991179764f, 0.995456636f, 0.99667722f, 0.998575628f, 0.999434948f,
     0.999799371f, 0.999926031f, 0.999969661f, 0.999991119f, 0.999996603f,
     0.999998927f, 0.999999702f, 0.99999994f, 0.f, 0.0948374197f, 0.154320508f,
     0.212472454f, 0.271773785f, 0.332315058f, 0.413608521f, 0.513681769f,
     0.597238064f, 0.666360855f, 0.74034071f, 0.782127678f, 0.828078568f,
     0.86417824f},
    {0.174107894f, 0.112808928f, 0.0701863468f, 0.0438398123f, 0.0250978954f,
     0.0175626874f, 0.00906610116f, 0.00663455157f, 0.00284625613f,
     0.00112966402f, 0.000401161204f, 0.000147913466f, 6.06773356e-05f,
     1.77592665e-05f, 6.79415962e-06f, 2.14690363e-06f, 5.944691e-07f,
     1.18977134e-07f, 1.f, 0.991005838f, 0.976185143f, 0.954855442f,
     0.926138997f, 0.88956672f, 0.828927994f, 0.736131251f, 0.643306971f,
     0.555963457f, 0.451895744f, 0.388276398f, 0.314285994f, 0.253196031f},
    {-0.158230767f, -0.106255226f, -0.0676777884f, -0.0428692251f,
     -0.0247767735f, -0.017411042f, -0.00902280584f, -0.00661378214f,
     -0.0028424263f, -0.00113025215f, -0.000401344732f, -0.000148004299f,
     -6.07708898e-05f, -1.77381335e-05f, -6.79036839e-06f, -2.1420949e-06f,
     -5.95851191e-07f, -1.19758468e-07f, 5.94260518e-06f, -0.0939831659f,
     -0.150645301f, -0.202881172f, -0.251700699f, -0.29561612f, -0.342851251f,
     -0.37814039f, -0.384208828f, -0.370465249f, -0.334566295f, -0.30367583f,
     -0.260251671f, -0.218806043f},
    {0.0857316405f, 0.0625518933f, 0.0419574864f, 0.0273822602f, 0.0161313713f,
     0.0114080505f, 0.00596251385f, 0.00437494507f, 0.00191887538f,
     0.000761381641f, 0.000271258003f, 0.000100047379f, 4.06396211e-05f,
     1.19924462e-05f, 4.59850889e-06f, 1.4248825e-06f, 4.2257949e-07f,
     8.06165943e-08f, -0.333910882f, -0.321278423f, -0.302016139f,
     -0.275079131f, -0.240236863f, -0.198247492f, -0.134535506f, -0.051338356f,
     0.0147280293f, 0.061279539f, 0.0969041064f, 0.107947513f, 0.110629655f,
     0.104621246f},
    {-0.0247660149f, -0.0234684944f, -0.0178979933f, -0.0123437382f,
     -0.00806800183f, -0.00511515653f, -0.00318585197f, -0.0019633905f,
     -0.000949445996f, -0.000351911352f, -0.000129818014f, -4.78057591e-05f,
     -1.75933073e-05f, -6.47310253e-06f, -2.38144139e-06f, -8.76099591e-07f,
     -2.04184204e-07f, -3.23150822e-08f, 0.0159642659f, 0.06024611f,
     0.0967882425f, 0.127077088f, 0.149725243f, 0.164001554f, 0.169603392f,
     0.153336436f, 0.119558655f, 0.0800045505f, 0.0434437394f, 0.0145317661f,
     -0.00552576268f, -0.0176393427f},
};

constexpr float attn_tanh_log_float[2] = {
    2.88539004f, 0.346573591f
};

constexpr float attn_tanh_float[3] = {
    -0.333333224f, 0.133311853f, -0.0527273044f
};

constexpr float attn_tanh_p[3] = {
    16466.6973f, 1908.06311f, 26.0717049f
};

constexpr float attn_tanh_q[4] = {
    16466.6973f, 7396.62695f, 296.548828f, 1.f
};

alignas(64) constexpr double attn_tanh_angles[3][16] = {
    {2.2380464480874318, 3.3147199453551912, 4.4108435792349727,
     5.5039959016393443, 6.6173668032786885, 7.7085211748633879,
     8.7960040983606564, 9.8852459016393439, 11.557889344262295,
     13.741939890710382, 15.888729508196722, 18.021843032786887, 0., 0.,
     0.82587561344192895, 1.4221396857923496},
    {0.97750043393769892, 0.99736167950723853, 0.99970504491466816,
     0.99996686303698845, 0.99999642515311971, 0.99999959682509865,
     0.9999999541944713, 0.99999999481421509, 0.99999999981720056,
     0.99999999999768296, 0.99999999999996836, 0.99999999999999956, 0., 0.,
     0.67825518659082173, 0.89004444361009405},
    {0.044492901651610309, 0.0052696802505004152, 0.0005898231721613137,
     6.627282796477956e-05, 7.1496809810584036e-06, 8.0634964015676429e-07,
     9.1611055308604e-08, 1.0371569798332394e-08, 3.6559888446874372e-10,
     4.6340707599369485e-12, 6.3282684152650359e-14, 8.8814939765069675e-16, 1.,
     1., 0.53996990186264959, 0.20782088839879811},
};

constexpr double attn_tanh_series[12] = {
    -0.33333333333332399, 0.13333333333208372, -0.053968253910111737,
    0.021869487184872739, -0.0088632172430398934, 0.0035919718408876852,
    -0.0014549542170468831, 0.00058668311748872508, -0.0002305145348836908,
    8.1991098069192817e-05, -2.2187773289528269e-05, 3.1531978187269784e-06
};

constexpr double attn_tanh_log_double[3] = {
    2.8853900817779268, 0.34657359027994517, 2.7489615093541856e-14
};

constexpr double attn_tanh_double[7] = {
    -0.33333333333332421, 0.13333333332988714, -0.053968253526969427,
    0.021869461708867194, -0.0088623613045712667, 0.0035764027097834471,
    -0.0013076392943168638
};
// clang-format on

#if defined(CPU_CAPABILITY_AVX512)

// tanh(a) = p(a - c), where a = |x|. The polynomial p and the center c belong
// to the interval of a. There are eight intervals of equal width for each power
// of two of a + 0.625, so the leading bits of that sum are the index.
inline vec::Vectorized<float> attn_tanh(vec::Vectorized<float> x) {
  using Vec = vec::Vectorized<float>;
  const Vec a = vec::clamp_max(x.abs(), Vec(9.2f));
  const __m512i i = _mm512_srli_epi32(_mm512_castps_si512(a + Vec(0.625f)), 20);
  const auto at_i = [i](const float (&row)[32]) -> Vec {
    return _mm512_permutex2var_ps(
        _mm512_load_ps(row), i, _mm512_load_ps(row + 16));
  };
  const auto& [c, c0, c1, c2, c3, c4] = attn_tanh_avx512;
  const Vec t = a - at_i(c);
  Vec p = vec::fmadd(at_i(c4), t, at_i(c3));
  p = vec::fmadd(p, t, at_i(c2));
  p = vec::fmadd(p, t, at_i(c1));
  p = vec::fmadd(p, t, at_i(c0));
  return p | (x & Vec(-0.f));
}

#endif

// tanh(x) = x p(x^2) / q(x^2). The result is then rounded to half or bfloat16;
// in half the error is at most 0.51 ULP.
inline vec::Vectorized<float> attn_tanh_reduced(vec::Vectorized<float> x) {
  using Vec = vec::Vectorized<float>;
  const Vec a = vec::clamp(x, Vec(-5.5f), Vec(5.5f));
  const Vec u = a * a;
  const auto& p = attn_tanh_p;
  const auto& q = attn_tanh_q;
  const Vec numerator =
      vec::fmadd(vec::fmadd(Vec(p[2]), u, Vec(p[1])), u, Vec(p[0]));
  // The leading coefficient of q is 1.
  const Vec denominator =
      vec::fmadd(vec::fmadd(u + Vec(q[2]), u, Vec(q[1])), u, Vec(q[0]));
  return a * numerator / denominator;
}

#if defined(CPU_CAPABILITY_AVX512)

// tanh(c + t) = T + (1 - T^2) s / (1 + T s), where T = tanh(c) and
// s = tanh(t) = t + t^3 r(t^2). The center c belongs to the interval of
// |x| = c + t. There are eight intervals for each power of two of
// 0.915 |x| + 6.455, from |x| = 0.596 on, so T is more than half.
inline vec::Vectorized<double> attn_tanh(vec::Vectorized<double> x) {
  using Vec = vec::Vectorized<double>;
  const Vec a = vec::clamp_max(x.abs(), Vec(19.1));
  const __m512i i = _mm512_srli_epi64(
      _mm512_castpd_si512(vec::fmadd(a, Vec(0.915), Vec(6.455))), 49);
  const auto at_i = [i](const double (&row)[16]) -> Vec {
    return _mm512_permutex2var_pd(
        _mm512_load_pd(row), i, _mm512_load_pd(row + 8));
  };
  const auto& [c, tanh_c, derivative] = attn_tanh_angles;
  const Vec t = a - at_i(c);
  const Vec u = t * t;
  Vec r = attn_tanh_series[11];
  for (int j = 10; j >= 0; --j) {
    r = vec::fmadd(r, u, Vec(attn_tanh_series[j]));
  }
  const Vec s = vec::fmadd(t * u, r, t);
  const Vec T = at_i(tanh_c);
  const Vec p = T + at_i(derivative) * s / vec::fmadd(T, s, Vec(1.));
  return p | (x & Vec(-0.));
}

#else

// tanh(n L + r) = (t B + A) / (t A + B), where L = log(2) / 2, t = tanh(r) =
// r + r^3 p(r^2), A = (2^n - 1) / 2 and B = (2^n + 1) / 2. If n = 0, that is t.
//
// On Zen 5 with AVX2 a float takes 0.9 cycles, where a table of eight intervals
// takes 1.1, and a double 5.2, where SLEEF's takes 14.5. On Zen 3, where each
// look-up takes two cycles, a table takes 2.3, and this form 0.8 by a count of
// what its multipliers do.
template <typename T>
#if defined(__aarch64__) && defined(__GNUC__)
// Some releases have no vectors of double for NEON. Their stand-in's functions
// would be called, with vectors in memory.
__attribute__((flatten))
#endif
inline vec::Vectorized<T> attn_tanh(vec::Vectorized<T> x) {
  using Vec = vec::Vectorized<T>;
  using Bits = vec::int_same_size_t<T>;
  constexpr bool is_float = std::is_same_v<T, float>;
  // A sum with it ends in the bits of an integer, plus the exponent of a half.
  const Vec rounder(is_float ? T(0x1.8p23 + 126) : T(0x1.8p52 + 1022));
  const Vec a = vec::clamp_max(x.abs(), Vec(T(is_float ? 9.2 : 19.1)));
  Vec y, r;
  if constexpr (is_float) {
    y = vec::fmadd(a, Vec(attn_tanh_log_float[0]), rounder);
    r = vec::fmadd(y - rounder, Vec(-attn_tanh_log_float[1]), a);
  } else {
    // n is the integer nearest to a / L - 1/4, since with this choice the error
    // of r matters least. L is the sum of two constants. The product of n and
    // the first is exact.
    y = vec::fmadd(a, Vec(attn_tanh_log_double[0]), Vec(-0.25)) + rounder;
    const Vec n = y - rounder;
    r = vec::fmadd(n, Vec(-attn_tanh_log_double[1]), a);
    r = vec::fmadd(n, Vec(-attn_tanh_log_double[2]), r);
  }
  const Vec u = r * r;
  const auto horner = [&](const auto& c) C10_ALWAYS_INLINE_ATTRIBUTE {
    constexpr int size = sizeof(c) / sizeof(T);
    Vec p = c[size - 1];
    c10::ForcedUnroll<size - 1>{}([&](auto i) C10_ALWAYS_INLINE_ATTRIBUTE {
      p = vec::fmadd(p, u, Vec(c[size - 2 - i]));
    });
    return p;
  };
  Vec p;
  if constexpr (is_float) {
    p = horner(attn_tanh_float);
  } else {
    p = horner(attn_tanh_double);
  }
  const Vec t = vec::fmadd(r * u, p, r);
  const Vec half(T(0.5));
  const Vec S = vec::cast<T, Bits>(
      vec::cast<Bits, T>(y) << vec::Vectorized<Bits>(Bits(is_float ? 23 : 52)));
  const Vec A = S - half, B = S + half;
  const Vec num = vec::fmadd(t, B, A);
  const Vec den = vec::fmadd(t, A, B);
  if constexpr (is_float) {
    return num / den | (x & Vec(T(-0.)));
  } else {
    // num_rest and den_rest are what rounding took from num and den. The
    // quotient is corrected by both. den_rest has A + 1 in place of B, because
    // S + 1/2 may have been rounded to S.
    const Vec one(T(1));
    const Vec num_rest = vec::fmadd(t, B, A - num);
    const Vec den_rest = vec::fmadd(t, A, (A - den) + one);
#if defined(CPU_CAPABILITY_AVX2) || defined(__aarch64__)
    const Vec inverse = one / den;
    const Vec q = num * inverse;
    const Vec rest = vec::fmadd(q.neg(), den, num) + num_rest;
    return vec::fmadd(vec::fmadd(q.neg(), den_rest, rest), inverse, q) |
           (x & Vec(T(-0.)));
#else // nothing is fused
    const Vec q = num / den;
    return q + (num_rest - q * den_rest) / den | (x & Vec(T(-0.)));
#endif
  }
}

#endif

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
