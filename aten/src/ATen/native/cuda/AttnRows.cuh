#pragma once

// One sweep over the rows of attn, for q's side of attn and its backward, on
// tensor cores:
//   forward   attn = tanh(q kᵀ),                        output = attn v
//   backward  S̄ = (G_o vᵀ + G_a) ∘ (1 - attn²),         grad_q = S̄ k
// In both, P is computed from S = x yᵀ, element by element, and z = P w. Each
// warp owns some rows of attn and goes through the columns. P stays in its
// registers: the accumulator of the first product has the layout of an operand
// of the second. While the warp computes, the next rows of y and w are loaded
// into shared memory.

#include <ATen/native/cuda/AttnTiles.cuh>

namespace at::native::attn_tiles {

// x, y and w are padded with zeros to `width` columns. `slices` warps share the
// same rows and divide the columns between them, as sliced-K does. This gives
// more blocks of fewer rows, so that small matrices use all multiprocessors.
template <int width, int slices>
struct RowSweep {
  // M tiles per warp: tiles of 16 rows.
  static constexpr int m_tiles = width == 64 ? 2 : 1;
  static constexpr int warps = 8 / m_tiles, threads = 32 * warps;
  static constexpr int rows = 128 / slices;              // rows in a block
  static constexpr int columns = slices == 4 ? 128 : 64; // columns in a step
  using X = Panels<rows>;
  using Y = Panels<columns>;                       // w has this layout too
  static constexpr int tile = 2 * columns * width; // bytes of a tile of y or w
  static constexpr int shared = 2 * rows * width + 4 * tile;
};

// Loads attn and its gradient for the backward and computes S̄ from them: see
// AttnScores.cuh.
template <typename T>
struct ScoreGradient;

template <typename T, bool backward>
struct RowArgs {
  Batch batch;
  Operand<T> x, y, w; // (m, d), (n, d), (n, e)
  // The forward writes attn, which is contiguous.
  Scores<std::conditional_t<backward, const T, T>> attn;
  Scores<const T> grad_attn;
  T* z; // (m, e), contiguous
  int m, n, d, e;
};

template <typename T, int width, bool backward, int slices>
__global__ void __launch_bounds__(
    RowSweep<width, slices>::threads, width == 64 ? 2 : 1)
    attn_rows(RowArgs<T, backward> args) {
#if ATTN_KERNELS
  using Size = RowSweep<width, slices>;
  using X = typename Size::X;
  using Y = typename Size::Y;
  constexpr int steps = width / 16, m_tiles = Size::m_tiles;
  constexpr bool keep = width == 64; // whether x stays in registers
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

  // The addresses of this lane's matrix rows.
  const uint32_t x_row =
      X::place(x_tile, warp / slices * m_tiles * 16 + lane % 16, lane / 16);
  const int first = warp % slices * 32; // the first of this warp's columns
  const uint32_t y_row =
      Y::place(y_tile, first + permuted(lane / 16, lane % 8), lane / 8 % 2);
  const uint32_t w_row =
      Y::place(w_tile, first + permuted(lane / 8 % 2, lane % 8), lane / 16);
  uint32_t x[keep ? steps : 1][m_tiles][4];
  const auto load_x = [&](uint32_t (&to)[m_tiles][4], int step) {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
      load_matrices(to[i], X::place_from(x_row, 16 * i, 2 * step));
    }
  };
  if constexpr (keep) {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      load_x(x[step], step);
    }
  }

  // This thread's rows in each of the warp's tiles: lane / 4 and 8 below.
  const int row = row0 + warp / slices * m_tiles * 16 + lane / 4;
  auto* attn = sample_of(args.attn, args.batch, sample) + row * args.attn.row;
  const T* grad_attn = args.grad_attn.data
                           ? sample_of(args.grad_attn, args.batch, sample) +
                                 row * args.grad_attn.row
                           : nullptr;
  Fragment<float> z[m_tiles][width / 8] = {};
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
    for (int part = 0; part < Size::columns; part += 32 * slices) {
      // The first of this thread's 8 columns.
      const int c0 = column + part + first + 8 * (lane % 4);
      const int left = args.m - row;
      // These loads overlap with the product S.
      uint4 a[m_tiles][2] = {}, ga[m_tiles][2] = {};
      if constexpr (backward) {
        using Gradient = ScoreGradient<T>;
        Gradient::load(a, attn, args.attn, left, c0, args.n);
        if (grad_attn) {
          Gradient::load(ga, grad_attn, args.grad_attn, left, c0, args.n);
        }
      }
      Fragment<float> s[m_tiles][4] = {};
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
          for (int i = 0; i < m_tiles; ++i) {
            mma<T>(s[i][j], x[keep ? step : 0][i], b[0], b[1]);
            mma<T>(s[i][j + 1], x[keep ? step : 0][i], b[2], b[3]);
          }
        }
      }
      uint32_t p[m_tiles][2][4]; // 8 columns of each row
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
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
      // Beyond n, inf * 0 may have given NaN, which times w's zeros would be
      // NaN.
      if (column + Size::columns > args.n) {
#pragma unroll
        for (int i = 0; i < 8 * m_tiles; ++i) {
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
          for (int i = 0; i < m_tiles; ++i) {
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

  if constexpr (slices > 1) {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
      add_slices<slices>(z[i], x_tile);
    }
    if (warp % slices) {
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < m_tiles; ++i) {
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
