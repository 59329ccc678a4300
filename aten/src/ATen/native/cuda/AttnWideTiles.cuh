#pragma once

// Tiles of float and double in shared memory, and products of one warp on
// tensor cores. The sweeps are those of AttnRows.cuh and AttnColumns.cuh.

#include <ATen/native/cuda/AttnTiles.cuh>
#include <ATen/native/cuda/AttnWideMma.cuh>

#include <type_traits>

namespace at::native::attn_tiles {

// How float is multiplied by tensor cores, which take 11 bits of a significand.
enum class Precision {
  plain, // double; or float rounded to that
  split, // x = hi + lo, x y = hi hi' + (hi lo' + lo hi'), off by some 2^-23
};

// x rounded to 11 bits; a NaN may become a number, but then x - high(x) is NaN.
__device__ inline float high(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x1000) & 0xffffe000);
}

// acc + rest or, if acc is infinite or NaN, acc: the rest of an inf is NaN.
__device__ inline float with_rest(float acc, float rest) {
  return acc - acc == 0 ? acc + rest : acc;
}

// As Across is. Split products take longer than what smaller blocks read anew;
// plain ones don't, so that blocks of 4 would wait for the L2 cache. Of double,
// those in between have to do.
template <typename T, Precision precision>
using WideAcross = std::conditional_t<
    std::is_same_v<T, double>,
    std::integer_sequence<int, 2>,
    std::conditional_t<
        precision == Precision::split,
        std::integer_sequence<int, 2, 4>,
        std::integer_sequence<int, 1, 2>>>;

template <typename T, Precision precision>
struct Accumulator {
  Part<T> acc = {}, rest = {};

  // With `round` for long sums: tensor cores cut off what they add to.
  template <bool round = false>
  __device__ void add(const Part<T>& a, const T (&b)[2]) {
    if constexpr (precision == Precision::split) {
      Part<T> hi, lo;
      T hi_b[2], lo_b[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        hi[0][j] = high(a[0][j]);
        hi[1][j] = high(a[1][j]);
        hi_b[j] = high(b[j]);
        // Of 12 bits, the last of which is cut off: no worse than rounding.
        lo[0][j] = a[0][j] - hi[0][j];
        lo[1][j] = a[1][j] - hi[1][j];
        lo_b[j] = b[j] - hi_b[j];
      }
      mma(rest, lo, hi_b);
      mma(rest, hi, lo_b);
      if constexpr (round) {
        Part<T> sum = {};
        mma(sum, hi, hi_b);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          acc[0][j] += sum[0][j];
          acc[1][j] += sum[1][j];
        }
      } else {
        mma(acc, hi, hi_b);
      }
    } else {
      const Part<T> x = {
          {to_tf32(a[0][0]), to_tf32(a[0][1])},
          {to_tf32(a[1][0]), to_tf32(a[1][1])}};
      const T y[2] = {to_tf32(b[0]), to_tf32(b[1])};
      mma(acc, x, y);
    }
  }

  __device__ T value(int i, int j) const {
    if constexpr (precision == Precision::split) {
      return with_rest(acc[i][j], rest[i][j]);
    } else {
      return acc[i][j];
    }
  }
};

// c += x yᵀ without tensor cores, of d columns (an odd one's neighbour is
// zero): rows g and g + 8 of x, from its row g on, and 2 t and 2 t + 1 of y.
template <typename T, int stride>
__device__ inline void add_exactly(
    Part<T>& c, uint32_t x_row, uint32_t y_row, int d) {
#pragma unroll 1
  for (int at = 0; at < d; at += 2) {
    Part<T> x, y;
    const uint32_t pair = at * sizeof(T);
    load_pair(x[0], x_row + pair);
    load_pair(x[1], x_row + 8 * stride * sizeof(T) + pair);
    load_pair(y[0], y_row + pair);
    load_pair(y[1], y_row + stride * sizeof(T) + pair);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        c[i][j] = ::fma(x[i][1], y[j][1], ::fma(x[i][0], y[j][0], c[i][j]));
      }
    }
  }
}

// Elements from one row of a tile to the next. Of factors that are read in
// pairs of columns, and of those that are read in pairs of rows: in neither
// case two threads meet in a bank.
template <typename T, int width>
constexpr int kByColumns = width + 8;
template <typename T, int width>
constexpr int kByRows = width + (sizeof(T) == 4 ? 4 : 2);

// How such a tile lies in shared memory.
template <typename T, int rows_, int stride>
struct Padded {
  static constexpr int rows = rows_;
  static constexpr int bytes = sizeof(T) * rows * stride;

  static __device__ uint32_t place(uint32_t tile, int r, int chunk) {
    return tile + r * stride * static_cast<uint32_t>(sizeof(T)) + chunk * 16;
  }

  static __device__ uint32_t place_from(uint32_t from, int down, int right) {
    return place(from, down, right);
  }
};

// A thread's elements of attn, or of its gradient, from column c on, of n, in
// tiles of 8 columns; m rows are left.
template <typename T, int tiles>
__device__ inline void load_parts(
    Part<T> (&to)[tiles],
    const T* row,
    const Scores<const T>& scores,
    int m,
    int c,
    int n) {
  const auto each = [&](const auto& load) {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        load(to[j][i], row + 8 * i * scores.row, c + 8 * j, 8 * i < m ? n : 0);
      }
    }
  };
  if (scores.aligned) {
    each([&](T(&x)[2], const T* at, int c, int n) {
      if (c < n) {
        load_pair(x, at + c);
      } else {
        x[0] = x[1] = T(0);
      }
    });
  } else {
    each([&](T(&x)[2], const T* at, int c, int n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        x[h] = c + h < n ? at[(c + h) * scores.column] : T(0);
      }
    });
  }
}

// The same to attn, which is contiguous.
template <typename T, int tiles>
__device__ inline void store_parts(
    T* row,
    const Part<T> (&x)[tiles],
    const Scores<T>& scores,
    int m,
    int c,
    int n) {
  const auto each = [&](const auto& store) {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        store(row + 8 * i * scores.row, x[j][i], c + 8 * j, 8 * i < m ? n : 0);
      }
    }
  };
  if (scores.aligned) {
    each([&](T* at, const T(&two)[2], int c, int n) {
      if (c < n) {
        store_pair(at + c, two);
      }
    });
  } else {
    each([&](T* at, const T(&two)[2], int c, int n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (c + h < n) {
          at[c + h] = two[h];
        }
      }
    });
  }
}

// Two elements from column c on of a row that is contiguous, of n.
template <typename T>
__device__ inline void store_two(
    T* row, const T (&x)[2], int c, int n, bool aligned) {
  if (aligned && c < n) {
    store_pair(row + c, x);
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (c + i < n) {
      row[c + i] = x[i];
    }
  }
}

} // namespace at::native::attn_tiles
