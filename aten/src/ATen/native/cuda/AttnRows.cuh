#pragma once

// One sweep over the rows of attn, for q's side of attn and its backward, on
// tensor cores:
//   forward   attn = tanh(q kᵀ),                        output = attn v
//   backward  S̄ = (G_o vᵀ + G_a) ∘ (1 - attn²),         grad_q = S̄ k
// that is, of S = x yᵀ, element by element, P is made, and z = P w. A warp has
// rows of attn and goes through their columns; P stays in its registers, where
// the accumulators of one product are laid out as an operand of the next. While
// it computes, the next columns of y and w come into shared memory.

#include <ATen/native/cuda/AttnTiles.cuh>

namespace at::native::attn_tiles {

// With `across`, so many warps share the same rows and divide their columns:
// more blocks, of fewer rows, for matrices that would keep few multiprocessors
// busy otherwise.
template <int width_, int across_>
struct RowSweep {
  static constexpr int width = width_; // columns of x, y and w, with zeros
  static constexpr int across = across_;
  // Tiles of 16 rows that a warp has.
  static constexpr int tall = width == 64 ? 2 : 1;
  static constexpr int warps = 8 / tall, threads = 32 * warps;
  static constexpr int rows = 128 / across;              // in a block
  static constexpr int columns = across == 4 ? 128 : 64; // in a step
  static constexpr int tile = 2 * columns * width;       // bytes of y's, or w's
  static constexpr int shared = 2 * rows * width + 4 * tile;
};

template <typename T>
struct RowArgs {
  Batch batch;
  Operand<T> x, y, w; // (m, d), (n, d), (n, e)
  Scores<T> attn;     // forward: contiguous
  Scores<const T> grad_attn;
  T* z; // (m, e), contiguous
  int m, n, d, e;
};

template <typename T, int width, bool backward, int across>
__global__ void __launch_bounds__(
    RowSweep<width, across>::threads, width == 64 ? 2 : 1)
    attn_rows(RowArgs<T> args) {
  using Size = RowSweep<width, across>;
  constexpr int steps = width / 16, tall = Size::tall;
  constexpr bool keep = width == 64; // x in registers
  extern __shared__ __align__(128) uint4 shared[];
  const uint32_t x_tile =
      static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t y_tile = x_tile + 2 * Size::rows * width,
                 w_tile = y_tile + 2 * Size::tile;

  const int blocks = (args.m + Size::rows - 1) / Size::rows;
  const uint32_t sample = blockIdx.x / blocks;
  const int row0 = blockIdx.x % blocks * Size::rows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Loader<T, Size::columns, width, Size::threads> y(
      sample_of(args.y, args.batch, sample), args.y.row, args.d);
  const Loader<T, Size::columns, width, Size::threads> w(
      sample_of(args.w, args.batch, sample), args.w.row, args.e);

  const auto load_step = [&](int column, int stage) {
    const int left = args.n - column;
    y.load(y_tile + stage * Size::tile, column, left);
    w.load(w_tile + stage * Size::tile, column, left);
    commit();
  };
  Loader<T, Size::rows, width, Size::threads>(
      sample_of(args.x, args.batch, sample), args.x.row, args.d)
      .load(x_tile, row0, args.m - row0);
  load_step(0, 0);
  wait<0>();
  __syncthreads();

  // Where this lane's rows of matrices are.
  const uint32_t x_row = place<Size::rows>(
      x_tile, warp / across * tall * 16 + lane % 16, lane / 16);
  const int first = warp % across * 32; // of this warp's columns
  const uint32_t y_row = place<Size::columns>(
      y_tile, first + permuted(lane / 16, lane % 8), lane / 8 % 2);
  const uint32_t w_row = place<Size::columns>(
      w_tile, first + permuted(lane / 8 % 2, lane % 8), lane / 16);
  uint32_t x[keep ? steps : 1][tall][4];
  const auto load_x = [&](uint32_t (&to)[tall][4], int step) {
#pragma unroll
    for (int i = 0; i < tall; ++i) {
      load_matrices(to[i], place_from<Size::rows>(x_row, 16 * i, 2 * step));
    }
  };
  if constexpr (keep) {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      load_x(x[step], step);
    }
  }

  // Rows of this thread: `lane / 4` and 8 below it, in each of the warp's
  // tiles.
  const int row = row0 + warp / across * tall * 16 + lane / 4;
  T* attn = sample_of(args.attn, args.batch, sample) + row * args.attn.row;
  const Scores<const T> saved = {
      nullptr, args.attn.row, args.attn.column, {}, args.attn.aligned};
  const T* grad_attn = args.grad_attn.data
                           ? sample_of(args.grad_attn, args.batch, sample) +
                                 row * args.grad_attn.row
                           : nullptr;
  float z[tall][width / 8][4] = {};
  for (int column = 0, stage = 0; column < args.n;
       column += Size::columns, stage ^= 1) {
    if (column) {
      wait<0>();
      __syncthreads();
    }
    if (column + Size::columns < args.n) {
      load_step(column + Size::columns, stage ^ 1);
    }
#pragma unroll
    for (int part = 0; part < Size::columns; part += 32 * across) {
      // This thread's, and the 7 after it.
      const int c0 = column + part + first + 8 * (lane % 4);
      float s[tall][4][4] = {};
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        if constexpr (!keep) {
          load_x(x[0], step);
        }
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          uint32_t b[4];
          load_matrices(
              b,
              place_from<Size::columns>(
                  y_row + stage * Size::tile, part + 2 * j, 2 * step));
#pragma unroll
          for (int i = 0; i < tall; ++i) {
            mma<T>(s[i][j], x[keep ? step : 0][i], b[0], b[1]);
            mma<T>(s[i][j + 1], x[keep ? step : 0][i], b[2], b[3]);
          }
        }
      }
      uint32_t p[tall][2][4]; // of each row, 8 columns
#pragma unroll
      for (int i = 0; i < tall; ++i) {
#pragma unroll
        for (int below = 0; below < 2; ++below) {
          const int down = 16 * i + 8 * below;
          const bool within = row + down < args.m;
          uint32_t (&to)[4] = p[i][below];
          if constexpr (backward) {
            const uint4 none = make_uint4(0, 0, 0, 0);
            const uint4 a =
                within ? load_row<T>(
                             attn + down * args.attn.row, saved, c0, args.n)
                       : none;
            const uint4 g = within && grad_attn
                                ? load_row<T>(
                                      grad_attn + down * args.grad_attn.row,
                                      args.grad_attn,
                                      c0,
                                      args.n)
                                : none;
            const uint32_t as[4] = {a.x, a.y, a.z, a.w},
                           gs[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              to[j] = grad_scores<T>(
                  s[i][j][2 * below], s[i][j][2 * below + 1], as[j], gs[j]);
            }
          } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              to[j] = pack<T>(
                  tanh_for<T>(s[i][j][2 * below]),
                  tanh_for<T>(s[i][j][2 * below + 1]));
            }
            if (within) {
              store_row(
                  attn + down * args.attn.row,
                  c0,
                  args.n,
                  args.attn.aligned,
                  make_uint4(to[0], to[1], to[2], to[3]));
            }
          }
          // Beyond n there may be an inf * 0, which must not meet w's zeros.
          if (column + Size::columns > args.n) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              to[j] = keep_below(to[j], c0 + 2 * j, args.n);
            }
          }
        }
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int c = 0; c < width / 8; c += 2) {
          uint32_t b[4];
          load_transposed(
              b,
              place_from<Size::columns>(
                  w_row + stage * Size::tile, part + 4 * u, c));
#pragma unroll
          for (int i = 0; i < tall; ++i) {
            const uint32_t a[4] = {
                p[i][0][2 * u],
                p[i][1][2 * u],
                p[i][0][2 * u + 1],
                p[i][1][2 * u + 1]};
            mma<T>(z[i][c], a, b[0], b[1]);
            mma<T>(z[i][c + 1], a, b[2], b[3]);
          }
        }
      }
    }
  }

  if constexpr (across > 1) {
#pragma unroll
    for (int i = 0; i < tall; ++i) {
      add_across<across>(z[i], x_tile);
    }
    if (warp % across) {
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < tall; ++i) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int64_t down = row + 16 * i + 8 * below;
      if (down < args.m) {
        store_sums<T, width>(
            args.z + (sample * static_cast<int64_t>(args.m) + down) * args.e,
            z[i],
            below,
            args.e);
      }
    }
  }
}

} // namespace at::native::attn_tiles
