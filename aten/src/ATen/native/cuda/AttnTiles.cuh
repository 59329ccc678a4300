#pragma once

// What the kernels of attn are given, its tiles in shared memory, and rows of
// attn in registers.

#include <ATen/native/cuda/AttnMma.cuh>

#include <cstdint>

namespace at::native::attn_tiles {

// The batch dimensions that all operands have, merged where they can be.
constexpr int kBatchDims = 3;

struct Batch {
  uint32_t sizes[kBatchDims];
};

// One of q, k, v, and the gradient of output, as a matrix per sample. Its rows
// are contiguous and start at multiples of 16 bytes.
template <typename T>
struct Operand {
  const T* data; // null: all zeros
  int64_t row;   // strides, in elements
  int64_t batch[kBatchDims];
};

// attn or its gradient, (m, n) per sample.
template <typename T>
struct Scores {
  T* data; // null: all zeros
  int64_t row, column;
  int64_t batch[kBatchDims];
  bool aligned; // its rows are as an Operand's, and n is a multiple of 8
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

// In shared memory a tile's rows are panels of 128 bytes, in 8 chunks of 16;
// chunk c of row r lies at c ^ swizzle(r). Neither 8 rows in succession nor the
// rows r, r + 1, r + 8, r + 9, ... r + 25 (r even) of a permuted matrix, below,
// share a bank.
__device__ constexpr int swizzle(int r) {
  return ((r & 1) | (r >> 2 & 6)) ^ (r & 6);
}

// The column of attn that column c of the j-th of four 8-wide tiles stands for.
// A thread's pairs of columns in the four tiles are then 8 columns in
// succession: 16 bytes, for which nothing is exchanged.
__device__ inline int permuted(int j, int c) {
  return 8 * (c / 2) + 2 * j + c % 2;
}

template <int rows>
__device__ inline uint32_t place(uint32_t tile, int r, int chunk) {
  return tile + ((chunk / 8) * rows + r) * 128 +
         (((chunk % 8) ^ swizzle(r)) * 16);
}

// The place of row r + down and chunk + right, if these have no bit that those
// have too: swizzle(r + down) is swizzle(r) ^ swizzle(down) then. It takes one
// instruction where down and right are known at compile time.
template <int rows>
__device__ inline uint32_t place_from(uint32_t place, int down, int right) {
  return (place ^ ((right % 8 ^ swizzle(down)) * 16)) +
         ((right / 8) * rows + down) * 128;
}

// A thread's part in loading tiles of `rows` x `width` of an operand, which has
// d columns; zeros are beyond them.
template <typename T, int rows, int width, int threads>
struct Loader {
  static constexpr int chunks = width / 8, step = threads / chunks;
  static_assert(threads % chunks == 0 && rows % step == 0);
  const T* from; // of its chunk
  int64_t stride;
  uint32_t to; // in a tile at 0
  int row, bytes;

  __device__ Loader(const T* data, int64_t stride_, int d) : stride(stride_) {
    row = threadIdx.x / chunks;
    const int chunk = threadIdx.x % chunks, left = d - chunk * 8;
    bytes = left < 0 ? 0 : left < 8 ? 2 * left : 16;
    from = data + row * stride + chunk * 8;
    to = place<rows>(0, row, chunk);
  }

  // The rows from `first` on, of which m are left.
  __device__ void load(uint32_t tile, int first, int m) const {
    const T* at = from + first * stride;
#pragma unroll
    for (int down = 0; down < rows; down += step) {
      copy_async(
          place_from<rows>(tile + to, down, 0),
          at + down * stride,
          row + down < m ? bytes : 0);
    }
  }
};

// `count` elements, at most 8, in 16 bytes; the others are zero.
__device__ inline uint4 gather(
    const uint16_t* from, int64_t stride, int count) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = 2 * i < count ? from[2 * i * stride] : 0;
    const uint32_t high = 2 * i + 1 < count ? from[(2 * i + 1) * stride] : 0;
    words[i] = low | high << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// 8 elements of a row of attn from column c on, of n. They are read once.
template <typename T>
__device__ inline uint4 load_row(
    const T* row, const Scores<const T>& of, int c, int n) {
  if (c >= n) {
    return make_uint4(0, 0, 0, 0);
  }
  if (of.aligned) {
    return __ldcs(reinterpret_cast<const uint4*>(row + c));
  }
  return gather(
      reinterpret_cast<const uint16_t*>(row + c * of.column), of.column, n - c);
}

// A tile of `rows` x `width` of attn, whose rows are not as an operand's; m
// rows and n columns are left.
template <typename T, int rows, int width, int threads>
__device__ inline void load_scores(
    uint32_t tile, const T* from, const Scores<const T>& of, int m, int n) {
  constexpr int chunks = width / 8;
  for (int i = threadIdx.x; i < rows * chunks; i += threads) {
    const int r = i / chunks, chunk = i % chunks;
    const uint4 x = r < m ? load_row(from + r * of.row, of, chunk * 8, n)
                          : make_uint4(0, 0, 0, 0);
    store_shared(place<rows>(tile, r, chunk), x);
  }
}

// The same to a row that is contiguous.
template <typename T>
__device__ inline void store_row(T* row, int c, int n, bool aligned, uint4 x) {
  if (aligned && c < n) {
    __stcs(reinterpret_cast<uint4*>(row + c), x);
    return;
  }
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (c + i < n) {
      reinterpret_cast<uint16_t*>(row + c)[i] =
          static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2));
    }
  }
}

// This thread's columns, of `width`, of a row of sums: row lane / 4 of a tile,
// or 8 `below` it.
template <typename T, int width>
__device__ inline void store_sums(
    T* row, const float (&sums)[width / 8][4], int below, int d) {
  auto* to = reinterpret_cast<uint16_t*>(row);
#pragma unroll
  for (int c = 0; c < width / 8; ++c) {
    const int at = 8 * c + 2 * (threadIdx.x % 4);
    const uint32_t both = pack<T>(sums[c][2 * below], sums[c][2 * below + 1]);
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

// To the first warp's sums of `across` neighbours those of the others, in their
// order, by way of shared memory that holds nothing any more.
template <int across, int count>
__device__ inline void add_across(float (&sums)[count][4], uint32_t room) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto place_of = [&](int of, int c) {
    return room + ((of * count + c) * 32 + lane) * 16;
  };
  __syncthreads();
  if (warp % across) {
#pragma unroll
    for (int c = 0; c < count; ++c) {
      const float (&x)[4] = sums[c];
      store_shared(
          place_of(warp, c),
          make_uint4(
              __float_as_uint(x[0]),
              __float_as_uint(x[1]),
              __float_as_uint(x[2]),
              __float_as_uint(x[3])));
    }
  }
  __syncthreads();
  if (warp % across == 0) {
#pragma unroll 1
    for (int other = 1; other < across; ++other) {
#pragma unroll
      for (int c = 0; c < count; ++c) {
        const uint4 x = load_shared(place_of(warp + other, c));
        sums[c][0] += __uint_as_float(x.x);
        sums[c][1] += __uint_as_float(x.y);
        sums[c][2] += __uint_as_float(x.z);
        sums[c][3] += __uint_as_float(x.w);
      }
    }
  }
}

// tanh, off by less than rounding the result to T is.
template <typename T>
__device__ inline float tanh_for(float x);

// bfloat16's rounding is 2^-9.
template <>
__device__ inline float tanh_for<__nv_bfloat16>(float x) {
  return tanh_approx(x);
}

// tanh(x) = 1 - 2 / (exp(2 x) + 1), off by some 2^-22, which is too much for
// small x; but for them tanh(x) is x within 2^-13. half's rounding is 2^-12.
template <>
__device__ inline float tanh_for<__half>(float x) {
  const float y = 1 - __fdividef(2, __expf(2 * x) + 1);
  return fabsf(x) < 0x1p-6f ? x : y;
}

// (s + grad_attn) ∘ (1 - attn²) for two elements.
template <typename T>
__device__ inline uint32_t grad_scores(
    float s0, float s1, uint32_t attn, uint32_t grad_attn) {
  const float2 a = unpack<T>(attn), g = unpack<T>(grad_attn);
  return pack<T>((s0 + g.x) * (1 - a.x * a.x), (s1 + g.y) * (1 - a.y * a.y));
}

// Of two elements at `i` and `i + 1`, those below n; zeros for the others.
__device__ inline uint32_t keep_below(uint32_t both, int i, int n) {
  return both & ((i < n ? 0xffff : 0) | (i + 1 < n ? 0xffff0000 : 0));
}

} // namespace at::native::attn_tiles
