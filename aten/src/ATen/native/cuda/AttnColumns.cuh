#pragma once

// One sweep over the columns of attn, for the backward's gradients of k and v,
// on tensor cores:
//   S̄ᵀ = (v G_oᵀ + G_aᵀ) ∘ (1 - attnᵀ²),  grad_k = S̄ᵀ q,  grad_v = attnᵀ G_o
// A warp has columns of attn, and goes through their rows, of which the next
// come into shared memory while it computes. No two blocks add to the same sum:
// nothing depends on their order.

#include <ATen/native/cuda/AttnTiles.cuh>

namespace at::native::attn_tiles {

// With `across`, so many warps share the same columns and divide their rows:
// see RowSweep.
template <int width_, int across_>
struct ColumnSweep {
  static constexpr int width = width_; // columns of q, v and G_o, with zeros
  static constexpr int across = across_;
  // Tiles of 16 columns of attn that a warp has.
  static constexpr int tall = width == 64 ? 2 : 1;
  static constexpr int warps = 8 / tall, threads = 32 * warps;
  static constexpr int columns = 128 / across; // of attn in a block
  static constexpr int rows = 64;              // of attn in a step
  // Bytes of tiles; a row of one has 128 at least.
  static constexpr int operand = 2 * rows * width;
  static constexpr int scores = 2 * rows * (columns < 64 ? 64 : columns);
  static constexpr int stage = 2 * operand + 2 * scores;
  static constexpr int shared = 2 * columns * width + 2 * stage;
};

template <typename T>
struct ColumnArgs {
  Batch batch;
  Operand<T> q, v, grad_output; // (m, d), (n, e), (m, e)
  Scores<const T> attn, grad_attn;
  T *grad_k, *grad_v; // (n, d), (n, e), contiguous; null: not wanted
  int m, n, d, e;
};

template <typename T, int width, int across>
__global__ void __launch_bounds__(
    ColumnSweep<width, across>::threads, width == 64 ? 2 : 1)
    attn_columns(ColumnArgs<T> args) {
  using Size = ColumnSweep<width, across>;
  constexpr int tall = Size::tall, steps = width / 16;
  extern __shared__ uint4 shared[];
  const uint32_t v_tile =
      static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t stages = v_tile + 2 * Size::columns * width;

  const int blocks = (args.n + Size::columns - 1) / Size::columns;
  const uint32_t sample = blockIdx.x / blocks;
  const int column0 = blockIdx.x % blocks * Size::columns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = warp / across;
  const bool has_output = args.grad_output.data != nullptr;
  const bool has_attn = args.grad_attn.data != nullptr;
  const T* q = sample_of(args.q, args.batch, sample);
  const T* g =
      has_output ? sample_of(args.grad_output, args.batch, sample) : nullptr;
  const T* attn =
      sample_of(args.attn, args.batch, sample) + column0 * args.attn.column;
  const T* grad_attn = has_attn
                           ? sample_of(args.grad_attn, args.batch, sample) +
                                 column0 * args.grad_attn.column
                           : nullptr;

  const auto load_step = [&](int row, int stage) {
    const uint32_t tile = stages + stage * Size::stage;
    const int left = args.m - row;
    if (args.grad_k) {
      load_tile<T, Size::rows, width, Size::threads>(
          tile, q + row * args.q.row, args.q.row, left, args.d);
    }
    if (has_output) {
      load_tile<T, Size::rows, width, Size::threads>(
          tile + Size::operand,
          g + row * args.grad_output.row,
          args.grad_output.row,
          left,
          args.e);
    }
    load_scores<T, Size::rows, Size::columns, Size::threads>(
        tile + 2 * Size::operand,
        attn + row * args.attn.row,
        args.attn,
        left,
        args.n - column0);
    if (has_attn) {
      load_scores<T, Size::rows, Size::columns, Size::threads>(
          tile + 2 * Size::operand + Size::scores,
          grad_attn + row * args.grad_attn.row,
          args.grad_attn,
          left,
          args.n - column0);
    }
    commit();
  };
  load_tile<T, Size::columns, width, Size::threads>(
      v_tile,
      sample_of(args.v, args.batch, sample) + column0 * args.v.row,
      args.v.row,
      args.n - column0,
      args.e);
  load_step(0, 0);

  float grad_k[tall][width / 8][4] = {}, grad_v[tall][width / 8][4] = {};
  for (int row = 0, stage = 0; row < args.m; row += Size::rows, stage ^= 1) {
    wait<0>();
    __syncthreads();
    if (row + Size::rows < args.m) {
      load_step(row + Size::rows, stage ^ 1);
    }
    const uint32_t q_tile = stages + stage * Size::stage,
                   g_tile = q_tile + Size::operand;
    const uint32_t a_tile = g_tile + Size::operand,
                   ga_tile = a_tile + Size::scores;
#pragma unroll
    for (int u = 0; u < Size::rows; u += 16 * across) { // rows of attn
      const int part = u + warp % across * 16;
      const int score_row = part + lane / 16 * 8 + lane % 8;
      uint32_t a[tall][4]; // attnᵀ
#pragma unroll
      for (int i = 0; i < tall; ++i) {
        const int chunk = (group * tall + i) * 2 + lane / 8 % 2;
        load_transposed(a[i], place<Size::rows>(a_tile, score_row, chunk));
      }
      if (args.grad_k) {
        float s[tall][2][4] = {};
        if (has_output) {
#pragma unroll
          for (int step = 0; step < steps; ++step) {
            uint32_t b[4];
            load_matrices(
                b,
                place<Size::rows>(g_tile, score_row, 2 * step + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < tall; ++i) {
              uint32_t x[4];
              const int r = (group * tall + i) * 16 + lane % 16;
              load_matrices(
                  x, place<Size::columns>(v_tile, r, 2 * step + lane / 16));
              mma<T>(s[i][0], x, b[0], b[1]);
              mma<T>(s[i][1], x, b[2], b[3]);
            }
          }
        }
        uint32_t p[tall][4];
#pragma unroll
        for (int i = 0; i < tall; ++i) {
          uint32_t ga[4] = {};
          if (has_attn) {
            const int chunk = (group * tall + i) * 2 + lane / 8 % 2;
            load_transposed(ga, place<Size::rows>(ga_tile, score_row, chunk));
          }
#pragma unroll
          for (int x = 0; x < 4; ++x) { // below + 2 j
            const float (&of)[4] = s[i][x / 2];
            p[i][x] = grad_scores<T>(
                of[2 * (x % 2)], of[2 * (x % 2) + 1], a[i][x], ga[x]);
            // Beyond m there may be an inf * 0, which must not meet q's zeros.
            p[i][x] = keep_below(
                p[i][x], row + part + 8 * (x / 2) + 2 * (lane % 4), args.m);
          }
        }
#pragma unroll
        for (int c = 0; c < width / 8; c += 2) {
          uint32_t b[4];
          load_transposed(
              b, place<Size::rows>(q_tile, part + lane % 16, c + lane / 16));
#pragma unroll
          for (int i = 0; i < tall; ++i) {
            mma<T>(grad_k[i][c], p[i], b[0], b[1]);
            mma<T>(grad_k[i][c + 1], p[i], b[2], b[3]);
          }
        }
      }
      if (args.grad_v) {
#pragma unroll
        for (int c = 0; c < width / 8; c += 2) {
          uint32_t b[4];
          load_transposed(
              b, place<Size::rows>(g_tile, part + lane % 16, c + lane / 16));
#pragma unroll
          for (int i = 0; i < tall; ++i) {
            mma<T>(grad_v[i][c], a[i], b[0], b[1]);
            mma<T>(grad_v[i][c + 1], a[i], b[2], b[3]);
          }
        }
      }
    }
  }

  if constexpr (across > 1) {
#pragma unroll
    for (int i = 0; i < tall; ++i) {
      if (args.grad_k) {
        add_across<across>(grad_k[i], v_tile);
      }
      if (args.grad_v) {
        add_across<across>(grad_v[i], v_tile);
      }
    }
    if (warp % across) {
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < tall; ++i) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int column =
          column0 + (group * tall + i) * 16 + 8 * below + lane / 4;
      const int64_t at = sample * static_cast<int64_t>(args.n) + column;
      if (column < args.n && args.grad_k) {
        store_sums<T, width>(
            args.grad_k + at * args.d, grad_k[i], below, args.d);
      }
      if (column < args.n && args.grad_v) {
        store_sums<T, width>(
            args.grad_v + at * args.e, grad_v[i], below, args.e);
      }
    }
  }
}

} // namespace at::native::attn_tiles
