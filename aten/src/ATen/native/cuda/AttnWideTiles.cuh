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

// What is summed apart from it is finite only if `of` is: an inf has no lo.
__device__ inline float with_rest(float of, float rest) {
  return of - of == 0 ? of + rest : of;
}

template <typename T, Precision precision>
struct Sums {
  Part<T> of = {}, rest = {};

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
          of[0][j] += sum[0][j];
          of[1][j] += sum[1][j];
        }
      } else {
        mma(of, hi, hi_b);
      }
    } else {
      const Part<T> x = {
          {rounded(a[0][0]), rounded(a[0][1])},
          {rounded(a[1][0]), rounded(a[1][1])}};
      const T y[2] = {rounded(b[0]), rounded(b[1])};
      mma(of, x, y);
    }
  }

  __device__ T value(int i, int j) const {
    if constexpr (precision == Precision::split) {
      return with_rest(of[i][j], rest[i][j]);
    } else {
      return of[i][j];
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

// The same as add_across, of float and double.
template <int across, typename T, int count>
__device__ inline void add_wide_across(Part<T> (&sums)[count], uint32_t room) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto place_of = [&](int of, int c, int i, int j) {
    const int at = ((of * count + c) * 2 + i) * 2 + j;
    return room + (at * 32 + lane) * static_cast<uint32_t>(sizeof(T));
  };
  __syncthreads();
  if (warp % across) {
#pragma unroll
    for (int c = 0; c < count; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        store_shared(place_of(warp, c, i, 0), sums[c][i][0]);
        store_shared(place_of(warp, c, i, 1), sums[c][i][1]);
      }
    }
  }
  __syncthreads();
  if (warp % across == 0) {
#pragma unroll 1
    for (int other = 1; other < across; ++other) {
#pragma unroll
      for (int c = 0; c < count; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            sums[c][i][j] += load_shared<T>(place_of(warp + other, c, i, j));
          }
        }
      }
    }
  }
}

// A thread's part in loading tiles: Loader's, for these.
template <typename T, int rows, int width, int stride, int threads>
struct WideLoader {
  static constexpr int per = 16 / sizeof(T), chunks = width / per;
  static constexpr int step = threads / chunks;
  static_assert(threads % chunks == 0 && rows % step == 0);
  const T* from; // of its chunk
  int64_t row_stride;
  uint32_t to; // in a tile at 0
  int row, bytes;

  __device__ WideLoader(const T* data, int64_t row_stride_, int d)
      : row_stride(row_stride_) {
    row = threadIdx.x / chunks;
    const int c = threadIdx.x % chunks * per, left = d - c;
    bytes = sizeof(T) * (left < 0 ? 0 : left < per ? left : per);
    from = data + row * row_stride + c;
    to = (row * stride + c) * sizeof(T);
  }

  // The rows from `first` on, of which m are left.
  __device__ void load(uint32_t tile, int first, int m) const {
    const T* at = from + first * row_stride;
#pragma unroll
    for (int down = 0; down < rows; down += step) {
      copy_async(
          tile + to + down * stride * static_cast<uint32_t>(sizeof(T)),
          at + down * row_stride,
          row + down < m ? bytes : 0);
    }
  }
};

// A tile of attn, whose rows are not as an operand's; m rows and n columns are
// left.
template <typename T, int rows, int width, int stride, int threads>
__device__ inline void load_wide_scores(
    uint32_t tile, const T* from, const Scores<const T>& of, int m, int n) {
  for (int i = threadIdx.x; i < rows * width; i += threads) {
    const int r = i / width, c = i % width;
    store_shared(
        tile + (r * stride + c) * sizeof(T),
        r < m && c < n ? from[r * of.row + c * of.column] : T(0));
  }
}

// Two elements of a row of attn from column c on, of n.
template <typename T, typename S>
__device__ inline void load_two(
    T (&to)[2], const T* row, const Scores<S>& of, int c, int n) {
  if (of.aligned && c < n) {
    load_pair(to, row + c);
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to[i] = c + i < n ? row[(c + i) * of.column] : T(0);
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
