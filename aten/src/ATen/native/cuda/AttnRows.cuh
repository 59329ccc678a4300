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

// x, y and w have `width` columns, filled up with zeros. `across` warps share
// the same rows and divide their columns. There are then more blocks, of fewer
// rows, for matrices that would otherwise keep few multiprocessors busy.
template <int width, int across>
struct RowSweep {
  // Tiles of 16 rows that a warp has.
  static constexpr int tall = width == 64 ? 2 : 1;
  static constexpr int warps = 8 / tall, threads = 32 * warps;
  static constexpr int rows = 128 / across;              // in a block
  static constexpr int columns = across == 4 ? 128 : 64; // in a step
  using X = Panels<rows>;
  using Y = Panels<columns>;                       // and w
  static constexpr int tile = 2 * columns * width; // bytes of y's, or w's
  static constexpr int shared = 2 * rows * width + 4 * tile;
};

// What the backward reads of attn and its gradient, and makes of them: see
// AttnScores.cuh.
template <typename T>
struct ScoreGradient;

template <typename T, bool backward>
struct RowArgs {
  Batch batch;
  Operand<T> x, y, w; // (m, d), (n, d), (n, e)
  // Forward: contiguous, and written.
  Scores<std::conditional_t<backward, const T, T>> attn;
  Scores<const T> grad_attn;
  T* z; // (m, e), contiguous
  int m, n, d, e;
};

template <typename T, int width, bool backward, int across>
__global__ void __launch_bounds__(
    RowSweep<width, across>::threads, width == 64 ? 2 : 1)
    attn_rows(RowArgs<T, backward> args) {
#if ATTN_KERNELS
  using Size = RowSweep<width, across>;
  using X = typename Size::X;
  using Y = typename Size::Y;
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
  const Loader<T, Y, width, Size::threads> y(
      sample_of(args.y, args.batch, sample), args.y.row, args.d);
  const Loader<T, Y, width, Size::threads> w(
      sample_of(args.w, args.batch, sample), args.w.row, args.e);

  const auto load_step = [&](int column, int stage) {
    const int left = args.n - column;
    y.load(y_tile + stage * Size::tile, column, left);
    w.load(w_tile + stage * Size::tile, column, left);
    commit();
  };
  Loader<T, X, width, Size::threads>(
      sample_of(args.x, args.batch, sample), args.x.row, args.d)
      .load(x_tile, row0, args.m - row0);
  load_step(0, 0);
  wait<0>();
  __syncthreads();

  // Where this lane's rows of matrices are.
  const uint32_t x_row =
      X::place(x_tile, warp / across * tall * 16 + lane % 16, lane / 16);
  const int first = warp % across * 32; // of this warp's columns
  const uint32_t y_row =
      Y::place(y_tile, first + permuted(lane / 16, lane % 8), lane / 8 % 2);
  const uint32_t w_row =
      Y::place(w_tile, first + permuted(lane / 8 % 2, lane % 8), lane / 16);
  uint32_t x[keep ? steps : 1][tall][4];
  const auto load_x = [&](uint32_t (&to)[tall][4], int step) {
#pragma unroll
    for (int i = 0; i < tall; ++i) {
      load_matrices(to[i], X::place_from(x_row, 16 * i, 2 * step));
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
  auto* attn = sample_of(args.attn, args.batch, sample) + row * args.attn.row;
  const T* grad_attn = args.grad_attn.data
                           ? sample_of(args.grad_attn, args.batch, sample) +
                                 row * args.grad_attn.row
                           : nullptr;
  Part<float> z[tall][width / 8] = {};
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
      const int left = args.m - row;
      // They come while S is multiplied.
      uint4 a[tall][2] = {}, ga[tall][2] = {};
      if constexpr (backward) {
        using Gradient = ScoreGradient<T>;
        Gradient::load(a, attn, args.attn, left, c0, args.n);
        if (grad_attn) {
          Gradient::load(ga, grad_attn, args.grad_attn, left, c0, args.n);
        }
      }
      Part<float> s[tall][4] = {};
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
              Y::place_from(
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
          const uint4 x = a[i][below], g = ga[i][below];
          const uint32_t as[4] = {x.x, x.y, x.z, x.w},
                         gs[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float (&score)[2] = s[i][j][below];
            if constexpr (backward) {
              p[i][below][j] =
                  ScoreGradient<T>::make(score[0], score[1], as[j], gs[j]);
            } else {
              p[i][below][j] =
                  pack<T>(tanh_for<T>(score[0]), tanh_for<T>(score[1]));
            }
          }
        }
      }
      if constexpr (!backward) {
        store_rows<T>(attn, p, args.attn, left, c0, args.n);
      }
      // Beyond n there may be an inf * 0, which must not meet w's zeros.
      if (column + Size::columns > args.n) {
#pragma unroll
        for (int i = 0; i < 8 * tall; ++i) {
          uint32_t& both = p[i / 8][i / 4 % 2][i % 4];
          both = keep_below(both, c0 + 2 * (i % 4), args.n);
        }
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int c = 0; c < width / 8; c += 2) {
          uint32_t b[4];
          load_transposed(
              b, Y::place_from(w_row + stage * Size::tile, part + 4 * u, c));
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
        store_acc<T, width>(
            args.z + (sample * static_cast<int64_t>(args.m) + down) * args.e,
            z[i],
            below,
            args.e);
      }
    }
  }
#else
  __trap();
#endif
}

} // namespace at::native::attn_tiles
