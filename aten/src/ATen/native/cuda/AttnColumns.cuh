#pragma once

// One sweep over the columns of attn, for the backward's gradients of k and v,
// on tensor cores:
//   S̄ᵀ = (v G_oᵀ + G_aᵀ) ∘ (1 - attnᵀ²),  grad_k = S̄ᵀ q,  grad_v = attnᵀ G_o
// Each warp owns some columns of attn and goes through the rows. While it
// computes, the next rows are loaded into shared memory. No two blocks add to
// the same sum, so results don't depend on the order of blocks.

#include <ATen/native/cuda/AttnLaunch.cuh>
#include <ATen/native/cuda/AttnScores.cuh>
#include <ATen/native/cuda/AttnTiles.cuh>

#include <type_traits>

namespace at::native::attn_tiles {

// q, v and G_o are padded with zeros to `width` columns. `slices` warps share
// the same columns and divide the rows between them: see RowSweep.
template <int width, int slices>
struct ColumnSweep {
  // M tiles per warp: tiles of 16 columns of attn.
  static constexpr int m_tiles = width == 64 ? 2 : 1;
  static constexpr int warps = 8 / m_tiles, threads = 32 * warps;
  static constexpr int columns = 128 / slices; // columns of attn in a block
  // Rows of attn in a step. For width 128, compute capability 8.6 and 8.9 have
  // too little shared memory for more.
  static constexpr int rows = width == 128 && slices == 2 ? 32 : 64;
  using V = Panels<columns>;
  using Q = Panels<rows>; // G_o, attn and its gradient have this layout too
  // The sizes of tiles in bytes. A row has at least 128.
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
  T *grad_k, *grad_v; // (n, d), (n, e), contiguous; null if not wanted
  int m, n, d, e;
};

// Computes `both` gradients, without a branch between their products, or only
// the one that is wanted: a product of S̄ᵀ or of attnᵀ. If grad_v is wanted,
// there is a G_o.
template <typename T, int width, bool both, int slices>
__global__ void __launch_bounds__(
    ColumnSweep<width, slices>::threads, width == 64 ? 2 : 1)
    attn_columns(ColumnArgs<T> args) {
#if ATTN_KERNELS
  using Size = ColumnSweep<width, slices>;
  using V = typename Size::V;
  using Q = typename Size::Q;
  constexpr int m_tiles = Size::m_tiles, steps = width / 16;
  extern __shared__ __align__(128) uint4 shared[];
  const uint32_t v_tile =
      static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t stages = v_tile + 2 * Size::columns * width;

  const int blocks = (args.n + Size::columns - 1) / Size::columns;
  const uint32_t sample = blockIdx.x / blocks;
  const int column0 = blockIdx.x % blocks * Size::columns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = warp / slices;
  const bool of_k = both || args.grad_k != nullptr;
  const bool has_output = both || args.grad_output.data != nullptr;
  const bool has_attn = of_k && args.grad_attn.data != nullptr;
  const int columns_left = args.n - column0;
  const T* attn =
      sample_of(args.attn, args.batch, sample) + column0 * args.attn.column;
  const T* grad_attn = has_attn
                           ? sample_of(args.grad_attn, args.batch, sample) +
                                 column0 * args.grad_attn.column
                           : nullptr;
  using Rows = Loader<T, Q, width, Size::threads>;
  using Parts = ScoreLoader<T, Q, Size::columns, Size::threads>;
  const Rows q(sample_of(args.q, args.batch, sample), args.q.row, args.d);
  const Rows g(
      sample_of(args.grad_output, args.batch, sample),
      args.grad_output.row,
      args.e);
  const Parts a_part(attn, args.attn, columns_left);
  const Parts ga_part(grad_attn, args.grad_attn, columns_left);

  const auto load_step = [&](int row, int stage) {
    const uint32_t tile = stages + stage * Size::stage;
    const int left = args.m - row;
    if (of_k) {
      q.load(tile, row, left);
    }
    if (has_output) {
      g.load(tile + Size::operand, row, left);
    }
    const uint32_t scores = tile + 2 * Size::operand;
    a_part.load(scores, row, left);
    if (has_attn) {
      ga_part.load(scores + Size::scores, row, left);
    }
    commit();
  };
  Loader<T, V, width, Size::threads>(
      sample_of(args.v, args.batch, sample), args.v.row, args.e)
      .load(v_tile, column0, columns_left);
  load_step(0, 0);

  // The addresses of this lane's matrix rows, relative to a stage except v's.
  const int first = warp % slices * 16; // the first of this warp's rows
  const int score_row = first + lane / 16 * 8 + lane % 8;
  const uint32_t a_row = Q::place(
      2 * Size::operand, score_row, group * m_tiles * 2 + lane / 8 % 2);
  const uint32_t g_row = Q::place(Size::operand, score_row, lane / 8 % 2);
  const uint32_t g_row_of_sums =
      Q::place(Size::operand, first + lane % 16, lane / 16);
  const uint32_t row_of_sums = g_row_of_sums - (of_k ? Size::operand : 0);
  const uint32_t v_row =
      V::place(v_tile, group * m_tiles * 16 + lane % 16, lane / 16);
  // acc is grad_k if that is wanted, else grad_v. If both are, grad_v is apart.
  Fragment<float> acc[m_tiles][width / 8] = {}, grad_v[m_tiles][width / 8] = {};
  for (int row = 0, stage = 0; row < args.m; row += Size::rows, stage ^= 1) {
    wait<0>();
    __syncthreads();
    if (row + Size::rows < args.m) {
      load_step(row + Size::rows, stage ^ 1);
    }
    const uint32_t tile = stages + stage * Size::stage;
#pragma unroll 1
    for (int part = 0; part < Size::rows; part += 16 * slices) { // rows of attn
      uint32_t a[m_tiles][4], ga[m_tiles][4] = {}; // attnᵀ and its gradient
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        load_transposed(a[i], Q::place_from(tile + a_row, part, 2 * i));
      }
      if (has_attn) {
#pragma unroll
        for (int i = 0; i < m_tiles; ++i) {
          load_transposed(
              ga[i], Q::place_from(tile + Size::scores + a_row, part, 2 * i));
        }
      }
      uint32_t p[m_tiles][4]; // S̄ᵀ, or attnᵀ if only grad_v is wanted
      if (of_k) {
        Fragment<float> s[m_tiles][2] = {};
        if (has_output) {
#pragma unroll
          for (int step = 0; step < steps; ++step) {
            uint32_t b[4];
            load_matrices(b, Q::place_from(tile + g_row, part, 2 * step));
#pragma unroll
            for (int i = 0; i < m_tiles; ++i) {
              uint32_t x[4];
              load_matrices(x, V::place_from(v_row, 16 * i, 2 * step));
              mma<T>(s[i][0], x, b[0], b[1]);
              mma<T>(s[i][1], x, b[2], b[3]);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
          for (int x = 0; x < 4; ++x) { // below + 2 j
            const float (&score)[2] = s[i][x / 2][x % 2];
            p[i][x] =
                ScoreGradient<T>::make(score[0], score[1], a[i][x], ga[i][x]);
            // Beyond m, inf * 0 may have given NaN, which times q's zeros would
            // be NaN.
            p[i][x] = keep_below(
                p[i][x],
                row + part + first + 8 * (x / 2) + 2 * (lane % 4),
                args.m);
          }
        }
      } else {
        memcpy(p, a, sizeof(p));
      }
#pragma unroll
      for (int c = 0; c < width / 8; c += 2) {
        uint32_t b[4];
        load_transposed(b, Q::place_from(tile + row_of_sums, part, c));
#pragma unroll
        for (int i = 0; i < m_tiles; ++i) {
          mma<T>(acc[i][c], p[i], b[0], b[1]);
          mma<T>(acc[i][c + 1], p[i], b[2], b[3]);
        }
      }
      if constexpr (both) {
#pragma unroll
        for (int c = 0; c < width / 8; c += 2) {
          uint32_t b[4];
          load_transposed(b, Q::place_from(tile + g_row_of_sums, part, c));
#pragma unroll
          for (int i = 0; i < m_tiles; ++i) {
            mma<T>(grad_v[i][c], a[i], b[0], b[1]);
            mma<T>(grad_v[i][c + 1], a[i], b[2], b[3]);
          }
        }
      }
    }
  }

  if constexpr (slices > 1) {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
      add_slices<slices>(acc[i], v_tile);
      if constexpr (both) {
        add_slices<slices>(grad_v[i], v_tile);
      }
    }
    if (warp % slices) {
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int column =
          column0 + (group * m_tiles + i) * 16 + 8 * below + lane / 4;
      const int64_t at = sample * static_cast<int64_t>(args.n) + column;
      if (column < args.n) {
        const int size = of_k ? args.d : args.e;
        store_acc<T, width>(
            (of_k ? args.grad_k : args.grad_v) + at * size,
            acc[i],
            below,
            size);
      }
      if (both && column < args.n) {
        store_acc<T, width>(
            args.grad_v + at * args.e, grad_v[i], below, args.e);
      }
    }
  }
#else
  __trap();
#endif
}

// Calls fn(arguments, both) for each launch. One launch computes both gradients
// if both are wanted and `fit` into registers.
template <bool fit, typename T, typename F>
bool for_gradients_of(const ColumnArgs<T>& args, const F& fn) {
  if (!args.grad_k || !args.grad_v) {
    return fn(args, std::false_type{});
  }
  if constexpr (fit) {
    return fn(args, std::true_type{});
  } else {
    auto of_k = args, of_v = args;
    of_k.grad_v = of_v.grad_k = nullptr;
    return fn(of_k, std::false_type{}) && fn(of_v, std::false_type{});
  }
}

// Launches the sweep for half and bfloat16. Returns false if no block fits.
template <typename T>
std::enable_if_t<sizeof(T) == 2, bool> launch_columns(
    const ColumnArgs<T>& args) {
  return for_width_of<T>(args.d, args.e, [&](auto width) {
    constexpr int columns = ColumnSweep<width, 1>::columns;
    return for_gradients_of<true>(args, [&](const auto& some, auto both) {
      return for_slices_of(
          Slices<width>{},
          args.batch,
          args.n,
          columns,
          enough_blocks<T>(),
          [&](auto slices) {
            using Sweep = ColumnSweep<width, slices>;
            return launch<Sweep>(
                attn_columns<T, width, both, slices>,
                some,
                args.n,
                Sweep::columns);
          });
    });
  });
}

} // namespace at::native::attn_tiles
