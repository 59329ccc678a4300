#pragma once

// AttnColumns.cuh's sweep for float and double.

#include <ATen/native/cuda/AttnColumns.cuh>
#include <ATen/native/cuda/AttnWideTiles.cuh>

namespace at::native::attn_tiles {

// See ColumnSweep.
template <typename T, int width, int slices>
struct WideColumnSweep {
  static constexpr int warps = 4, threads = 32 * warps;
  static constexpr int columns = 64 / slices;        // columns in a block
  static constexpr int rows = slices == 4 ? 32 : 16; // rows in a step
  static constexpr int by_columns = kByColumns<T, width>;
  static constexpr int by_rows = kByRows<T, width>;
  static constexpr int score_row = kByRows<T, columns>;
  using V = Padded<T, columns, by_columns>;
  using Q = Padded<T, rows, by_rows>;
  using G = Padded<T, rows, by_columns>;
  using A = Padded<T, rows, score_row>; // attn's gradient has it too
  static constexpr int stage = Q::bytes + G::bytes + 2 * A::bytes;
  static constexpr int shared = V::bytes + 2 * stage;
};

template <
    typename T,
    int width,
    Precision precision,
    bool both, // see attn_columns
    int slices>
__global__ void __launch_bounds__(WideColumnSweep<T, width, slices>::threads, 2)
    attn_wide_columns(ColumnArgs<T> args) {
#if ATTN_KERNELS
  using Size = WideColumnSweep<T, width, slices>;
  constexpr int parts = Size::rows / (8 * slices);
  extern __shared__ uint4 shared[];
  const uint32_t v_tile =
      static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t stages = v_tile + Size::V::bytes;

  const int blocks = (args.n + Size::columns - 1) / Size::columns;
  const uint32_t sample = blockIdx.x / blocks;
  const int column0 = blockIdx.x % blocks * Size::columns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
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
  constexpr int score_row = Size::score_row;
  using Parts = ScoreLoader<T, typename Size::A, Size::columns, Size::threads>;
  const Loader<T, typename Size::Q, width, Size::threads> q(
      sample_of(args.q, args.batch, sample), args.q.row, args.d);
  const Loader<T, typename Size::G, width, Size::threads> grad(
      sample_of(args.grad_output, args.batch, sample),
      args.grad_output.row,
      args.e);
  const Parts a_part(attn, args.attn, columns_left);
  const Parts ga_part(grad_attn, args.grad_attn, columns_left);

  const auto load_step = [&](int row, int stage) {
    const uint32_t q_tile = stages + stage * Size::stage;
    const uint32_t g_tile = q_tile + Size::Q::bytes;
    const uint32_t a_tile = g_tile + Size::G::bytes;
    const int left = args.m - row;
    if (of_k) {
      q.load(q_tile, row, left);
    }
    if (has_output) {
      grad.load(g_tile, row, left);
    }
    a_part.load(a_tile, row, left);
    if (has_attn) {
      ga_part.load(a_tile + Size::A::bytes, row, left);
    }
    commit();
  };
  Loader<T, typename Size::V, width, Size::threads>(
      sample_of(args.v, args.batch, sample), args.v.row, args.e)
      .load(v_tile, column0, columns_left);
  load_step(0, 0);

  const int first = warp % slices * 8 * parts; // the first of this warp's rows
  // This thread's columns of attn are `column` and column + 8.
  const int column = warp / slices * 16 + g;
  const uint32_t v_row =
      v_tile + (column * Size::by_columns + 2 * t) * sizeof(T);
  // The other factor is q, or G_o if only grad_v is wanted: its offset in a
  // stage, and the distance of its rows.
  const uint32_t factor = of_k ? 0 : Size::Q::bytes;
  const int factor_row = of_k ? Size::by_rows : Size::by_columns;
  // acc is grad_k if that is wanted, else grad_v. If both are, grad_v is apart.
  Fragment<T> acc[width / 8] = {}, grad_v[width / 8] = {};
  for (int row = 0, stage = 0; row < args.m; row += Size::rows, stage ^= 1) {
    wait<0>();
    __syncthreads();
    if (row + Size::rows < args.m) {
      load_step(row + Size::rows, stage ^ 1);
    }
    const uint32_t q_tile = stages + stage * Size::stage;
    const uint32_t g_tile = q_tile + Size::Q::bytes;
    const uint32_t a_tile = g_tile + Size::G::bytes;

    // attnᵀ and S̄ᵀ, as fragments of 8 rows of attn
    Fragment<T> a[parts], p[parts];
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      Accumulator<T, precision> s;
      if (of_k && has_output) {
#pragma unroll 4
        for (int c = 0; c < width; c += 8) {
          Fragment<T> x;
          T b[2];
          load_pair(x[0], v_row + c * sizeof(T));
          load_pair(x[1], v_row + (8 * Size::by_columns + c) * sizeof(T));
          load_pair(
              b,
              g_tile + ((first + 8 * part + g) * Size::by_columns + c + 2 * t) *
                           sizeof(T));
          s.template add<true>(x, b);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int r = first + 8 * part + 2 * t + h;
          const uint32_t at =
              a_tile + (r * score_row + column + 8 * i) * sizeof(T);
          const T x = load_shared<T>(at);
          const T ga = has_attn ? load_shared<T>(at + Size::A::bytes) : T(0);
          a[part][i][h] = x;
          // Beyond m, inf * 0 may have given NaN, which times q's zeros would
          // be NaN.
          p[part][i][h] = !of_k ? x
                          : row + r < args.m
                              ? (s.value(i, h) + ga) * ::fma(-x, x, T(1))
                              : T(0);
        }
      }
    }

    // Each step is summed by itself: see attn_wide_rows.
#pragma unroll
    for (int c = 0; c < width / 8; ++c) {
      Accumulator<T, precision> of_p, of_a;
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        T b[2], d[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int r = first + 8 * part + 2 * t + h, at = 8 * c + g;
          b[h] = load_shared<T>(
              q_tile + factor + (r * factor_row + at) * sizeof(T));
          d[h] = both ? load_shared<T>(
                            g_tile + (r * Size::by_columns + at) * sizeof(T))
                      : T(0);
        }
        of_p.add(p[part], b);
        if constexpr (both) {
          of_a.add(a[part], d);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          acc[c][i][h] += of_p.value(i, h);
          grad_v[c][i][h] += of_a.value(i, h);
        }
      }
    }
  }

  if constexpr (slices > 1) {
    add_slices<slices>(acc, v_tile);
    if constexpr (both) {
      add_slices<slices>(grad_v, v_tile);
    }
    if (warp % slices) {
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = column0 + column + 8 * i;
    const int64_t line = sample * static_cast<int64_t>(args.n) + at;
#pragma unroll
    for (int c = 0; c < width / 8; ++c) {
      const int first = 8 * c + 2 * t;
      if (at < args.n) {
        const int size = of_k ? args.d : args.e;
        T* to = (of_k ? args.grad_k : args.grad_v) + line * size;
        store_two(to, acc[c][i], first, size, size % 2 == 0);
      }
      if (both && at < args.n) {
        T* to = args.grad_v + line * args.e;
        store_two(to, grad_v[c][i], first, args.e, args.e % 2 == 0);
      }
    }
  }
#else
  __trap();
#endif
}

} // namespace at::native::attn_tiles
