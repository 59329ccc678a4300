#pragma once

// The arguments of the kernels, tiles in shared memory, and rows of attn in
// registers.

#include <ATen/native/cuda/AttnMma.cuh>

#include <cstdint>
#include <type_traits>
#include <utility>

// On architectures older than 8.0, which lack the instructions, kernels have no
// body. They are never launched there.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define ATTN_KERNELS 1
#else
#define ATTN_KERNELS 0
#endif

namespace at::native::attn_tiles {

// The numbers of warps that may share a block's rows, or columns; there is a
// kernel for each. If warps share nothing, blocks are largest and read least.
// If 4 share, there are most blocks, but for width 128 these would need more
// shared memory than compute capability 8.6 and 8.9 have.
template <int width>
using Slices = std::conditional_t<
    width == 64,
    std::integer_sequence<int, 1, 2, 4>,
    std::integer_sequence<int, 1, 2>>;

// The batch dimensions that all operands have, merged where they can be.
constexpr int kBatchDims = 3;

struct Batch {
  uint32_t sizes[kBatchDims];
};

// q, k, v or the gradient of output: one matrix for each sample. Rows are
// contiguous and start at multiples of 16 bytes.
template <typename T>
struct Operand {
  const T* data; // null if all elements are zero
  int64_t row;   // strides, in elements
  int64_t batch[kBatchDims];
};

// attn or its gradient, (m, n) per sample.
template <typename T>
struct Scores {
  T* data; // null if all elements are zero
  int64_t row, column;
  int64_t batch[kBatchDims];
  bool aligned; // whether rows are as an Operand's and n is a multiple of 8
};

template <typename X>
__device__ inline auto sample_of(
    const X& x, const Batch& batch, uint32_t sample) {
  int64_t offset = 0;
#pragma unroll
  for (int i = kBatchDims - 1; i >= 0; --i) {
    offset += sample % batch.sizes[i] * x.batch[i];
    sample /= batch.sizes[i];
  }
  return x.data + offset;
}

// The swizzled shared-memory layout of a tile. Its rows are panels of 128
// bytes, 8 chunks of 16 bytes each, and chunk c of row r is stored at c ^
// swizzle(r). So there are no bank conflicts among 8 consecutive rows, nor
// among the rows r, r + 1, r + 8, r + 9, ... r + 25 (r even) of a permuted
// matrix, see below.
template <int rows_>
struct Panels {
  static constexpr int rows = rows_;

  static __device__ constexpr int swizzle(int r) {
    return ((r & 1) | (r >> 2 & 6)) ^ (r & 6);
  }

  static __device__ uint32_t place(uint32_t tile, int r, int chunk) {
    return tile + ((chunk / 8) * rows + r) * 128 +
           (((chunk % 8) ^ swizzle(r)) * 16);
  }

  // Returns the address of row r + down and chunk + right from that of row r
  // and chunk. r and down must have no bit in common, nor chunk and right: then
  // swizzle(r + down) is swizzle(r) ^ swizzle(down). If down and right are
  // compile-time constants, this is one instruction.
  static __device__ uint32_t place_from(uint32_t place, int down, int right) {
    return (place ^ ((right % 8 ^ swizzle(down)) * 16)) +
           ((right / 8) * rows + down) * 128;
  }
};

// Returns which column of attn is column c of the j-th of four 8-wide tiles. By
// this permutation, a thread's pairs of columns in the four tiles are 8
// consecutive columns, which it stores as 16 bytes without shuffles.
__device__ inline int permuted(int j, int c) {
  return 8 * (c / 2) + 2 * j + c % 2;
}

// One thread's part in loading tiles of `width` columns, in the given Layout.
// The operand has d columns; the rest are zeros.
template <typename T, typename Layout, int width, int threads>
struct Loader {
  static constexpr int per = 16 / sizeof(T); // elements in a chunk
  static constexpr int chunks = width / per, step = threads / chunks;
  static_assert(threads % chunks == 0 && Layout::rows % step == 0);
  const T* from; // this thread's chunk in the first row
  int64_t stride;
  uint32_t to; // its offset in a tile
  int row, bytes;
  bool whole; // whether d is a multiple of a chunk

  __device__ Loader(const T* data, int64_t stride_, int d) : stride(stride_) {
    row = threadIdx.x / chunks;
    const int chunk = threadIdx.x % chunks, left = d - chunk * per;
    bytes = sizeof(T) * (left < 0 ? 0 : left < per ? left : per);
    from = data + row * stride + chunk * per;
    to = Layout::place(0, row, chunk);
    whole = d % per == 0;
  }

  // Loads the rows from `first` on, of which m are left.
  __device__ void load(uint32_t tile, int first, int m) const {
    const auto each = [&](const auto& copy) {
      const T* at = from + first * stride;
#pragma unroll
      for (int down = 0; down < Layout::rows; down += step) {
        copy(
            Layout::place_from(tile + to, down, 0),
            at + down * stride,
            row + down < m);
      }
    };
    if (whole) {
      each([&](uint32_t to, const T* at, bool within) {
        copy_async_if(within && bytes, to, at);
      });
    } else {
      each([&](uint32_t to, const T* at, bool within) {
        copy_async(to, at, within ? bytes : 0);
      });
    }
  }
};

// Stores 16 bytes of attn, which is contiguous, from column c of n, in a
// thread's two rows of each of `m_tiles` tiles. m rows are left.
template <typename T, int m_tiles>
__device__ inline void store_rows(
    T* row,
    const uint32_t (&x)[m_tiles][2][4],
    const Scores<T>& scores,
    int m,
    int c,
    int n) {
  const auto each = [&](const auto& store) {
#pragma unroll
    for (int i = 0; i < 2 * m_tiles; ++i) {
      if (8 * i < m) {
        store(row + 8 * i * scores.row + c, x[i / 2][i % 2]);
      }
    }
  };
  if (!scores.aligned) {
    each([&](T* at, const uint32_t (&words)[4]) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (c + j < n) {
          reinterpret_cast<uint16_t*>(at)[j] =
              static_cast<uint16_t>(words[j / 2] >> 16 * (j % 2));
        }
      }
    });
  } else if (c < n) {
    each([&](T* at, const uint32_t (&words)[4]) {
      __stcs(
          reinterpret_cast<uint4*>(at),
          make_uint4(words[0], words[1], words[2], words[3]));
    });
  }
}

// Stores this thread's columns of a row of the accumulator: row lane / 4 of a
// tile, or 8 `below` it. The row has d columns, padded to `width`.
template <typename T, int width>
__device__ inline void store_acc(
    T* row, const Fragment<float> (&acc)[width / 8], int below, int d) {
  auto* to = reinterpret_cast<uint16_t*>(row);
#pragma unroll
  for (int c = 0; c < width / 8; ++c) {
    const int at = 8 * c + 2 * (threadIdx.x % 4);
    const uint32_t both = pack<T>(acc[c][below][0], acc[c][below][1]);
    if (at + 1 < d && d % 2 == 0) {
      *reinterpret_cast<uint32_t*>(to + at) = both;
    } else if (at < d) {
      to[at] = static_cast<uint16_t>(both);
      if (at + 1 < d) {
        to[at + 1] = static_cast<uint16_t>(both >> 16);
      }
    }
  }
}

// Adds the accumulators of `slices` neighbouring warps to that of the first, in
// order, through shared memory that is no longer used.
template <int slices, typename T, int count>
__device__ inline void add_slices(Fragment<T> (&acc)[count], uint32_t room) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto place_of = [&](int w, int c, int i, int j) {
    const int at = ((w * count + c) * 2 + i) * 2 + j;
    return room + (at * 32 + lane) * static_cast<uint32_t>(sizeof(T));
  };
  __syncthreads();
  if (warp % slices) {
#pragma unroll
    for (int c = 0; c < count; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        store_shared(place_of(warp, c, i, 0), acc[c][i][0]);
        store_shared(place_of(warp, c, i, 1), acc[c][i][1]);
      }
    }
  }
  __syncthreads();
  if (warp % slices == 0) {
#pragma unroll 1
    for (int other = 1; other < slices; ++other) {
#pragma unroll
      for (int c = 0; c < count; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            acc[c][i][j] += load_shared<T>(place_of(warp + other, c, i, j));
          }
        }
      }
    }
  }
}

// Returns tanh(x), with an error smaller than that of rounding it to T.
template <typename T>
__device__ inline float tanh_for(float x);

// Rounding to bfloat16 has an error of 2^-9.
template <>
__device__ inline float tanh_for<__nv_bfloat16>(float x) {
  return tanh_approx(x);
}

// tanh(x) = 1 - 2 / (exp(2 x) + 1), with an absolute error of about 2^-22. That
// is too large for small x, where x itself is tanh(x) within 2^-13. Rounding to
// half has an error of 2^-12.
template <>
__device__ inline float tanh_for<__half>(float x) {
  const float y = 1 - __fdividef(2, __expf(2 * x) + 1);
  return fabsf(x) < 0x1p-6f ? x : y;
}

// Keeps the elements at i and i + 1 that are below n and zeroes the others.
__device__ inline uint32_t keep_below(uint32_t both, int i, int n) {
  return both & ((i < n ? 0xffff : 0) | (i + 1 < n ? 0xffff0000 : 0));
}

} // namespace at::native::attn_tiles
