#pragma once

// Tiles of float and double in shared memory, and products of one warp on
// tensor cores. The sweeps are those of AttnRows.cuh and AttnColumns.cuh.

#include <ATen/native/cuda/AttnTiles.cuh>
#include <ATen/native/cuda/AttnWideMma.cuh>

#include <type_traits>

namespace at::native::attn_tiles {

// How tensor cores, which take 11 bits of a significand, multiply float.
enum class Precision {
  plain, // double as it is, float rounded to 11 bits
  // 3xTF32: x = big + small, x y = big big' + (big small' + small big'), with
  // an error of about 2^-23
  split,
};

// Rounds x to 11 bits. A NaN may become a number, but then x - big(x) is NaN.
__device__ inline float big(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x1000) & 0xffffe000);
}

// Returns acc + rest, or acc if that is infinite or NaN, because the small part
// of an infinity is NaN.
__device__ inline float with_rest(float acc, float rest) {
  return acc - acc == 0 ? acc + rest : acc;
}

// Like Slices, for float and double. Split products take so long that smaller
// blocks may read more. Plain products don't: if 4 warps shared, they would
// wait for the L2 cache. For double there is only one kernel.
template <typename T, Precision precision>
using WideSlices = std::conditional_t<
    std::is_same_v<T, double>,
    std::integer_sequence<int, 2>,
    std::conditional_t<
        precision == Precision::split,
        std::integer_sequence<int, 2, 4>,
        std::integer_sequence<int, 1, 2>>>;

template <typename T, Precision precision>
struct Accumulator {
  Fragment<T> acc = {}, rest = {};

  // acc += a b. Long sums need `round`, because tensor cores truncate.
  template <bool round = false>
  __device__ void add(const Fragment<T>& a, const T (&b)[2]) {
    if constexpr (precision == Precision::split) {
      Fragment<T> big_a, small_a;
      T big_b[2], small_b[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        big_a[0][j] = big(a[0][j]);
        big_a[1][j] = big(a[1][j]);
        big_b[j] = big(b[j]);
        // These have 12 bits. Tensor cores drop the last one, which is no worse
        // than rounding.
        small_a[0][j] = a[0][j] - big_a[0][j];
        small_a[1][j] = a[1][j] - big_a[1][j];
        small_b[j] = b[j] - big_b[j];
      }
      mma(rest, small_a, big_b);
      mma(rest, big_a, small_b);
      if constexpr (round) {
        Fragment<T> sum = {};
        mma(sum, big_a, big_b);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          acc[0][j] += sum[0][j];
          acc[1][j] += sum[1][j];
        }
      } else {
        mma(acc, big_a, big_b);
      }
    } else {
      const Fragment<T> x = {
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

// c += x yᵀ without tensor cores, for d columns, padded with a zero if d is
// odd. Takes rows g and g + 8 of x, and rows 2 t and 2 t + 1 of y.
template <typename T, int stride>
__device__ inline void add_exactly(
    Fragment<T>& c, uint32_t x_row, uint32_t y_row, int d) {
#pragma unroll 1
  for (int at = 0; at < d; at += 2) {
    Fragment<T> x, y;
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

// The leading dimension of a tile that is read in pairs of columns, and of one
// that is read in pairs of rows. Both avoid bank conflicts.
template <typename T, int width>
constexpr int kByColumns = width + 8;
template <typename T, int width>
constexpr int kByRows = width + (sizeof(T) == 4 ? 4 : 2);

// The shared-memory layout of such a tile.
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

// Loads a thread's elements of attn, or of its gradient, from column c of n, in
// tiles of 8 columns. m rows are left.
template <typename T, int tiles>
__device__ inline void load_fragments(
    Fragment<T> (&to)[tiles],
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

// Stores the same elements of attn, which is contiguous.
template <typename T, int tiles>
__device__ inline void store_fragments(
    T* row,
    const Fragment<T> (&x)[tiles],
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

// Stores two elements from column c of a contiguous row of n columns.
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
