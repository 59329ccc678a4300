#pragma once

// AttnRows.cuh's sweep for float and double.

#include <ATen/native/cuda/AttnRows.cuh>
#include <ATen/native/cuda/AttnWideTiles.cuh>

namespace at::native::attn_tiles {

// See RowSweep.
template <typename T, int width, int slices>
struct WideRowSweep {
  static constexpr int warps = 4, threads = 32 * warps;
  static constexpr int rows = 64 / slices; // rows of attn in a block
  // Columns of attn in a step. For more there are too few registers.
  static constexpr int columns =
      (sizeof(T) * width <= 256 ? 32 : 16) * (slices == 4 ? 2 : 1);
  static constexpr int by_columns = kByColumns<T, width>;
  static constexpr int by_rows = kByRows<T, width>;
  using X = Padded<T, rows, by_columns>;
  using Y = Padded<T, columns, by_columns>;
  using W = Padded<T, columns, by_rows>;
  static constexpr int stage = Y::bytes + W::bytes;
  static constexpr int shared = X::bytes + 2 * stage;
};

template <typename T, int width, bool backward, Precision precision, int slices>
__global__ void __launch_bounds__(WideRowSweep<T, width, slices>::threads, 2)
    attn_wide_rows(RowArgs<T, backward> args) {
#if ATTN_KERNELS
  using Size = WideRowSweep<T, width, slices>;
  constexpr int tiles = Size::columns / (8 * slices);
  extern __shared__ uint4 shared[];
  const uint32_t x_tile =
      static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t stages = x_tile + Size::X::bytes;

  const int blocks = (args.m + Size::rows - 1) / Size::rows;
  const uint32_t sample = blockIdx.x / blocks;
  const int row0 = blockIdx.x % blocks * Size::rows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  constexpr int by_columns = Size::by_columns;
  const Loader<T, typename Size::Y, width, Size::threads> y(
      sample_of(args.y, args.batch, sample), args.y.row, args.d);
  const Loader<T, typename Size::W, width, Size::threads> w(
      sample_of(args.w, args.batch, sample), args.w.row, args.e);

  const auto load_step = [&](int column, int stage) {
    const uint32_t tile = stages + stage * Size::stage;
    y.load(tile, column, args.n - column);
    w.load(tile + Size::Y::bytes, column, args.n - column);
    commit();
  };
  Loader<T, typename Size::X, width, Size::threads>(
      sample_of(args.x, args.batch, sample), args.x.row, args.d)
      .load(x_tile, row0, args.m - row0);
  load_step(0, 0);

  const int first = warp % slices * 8 * tiles; // the first of its columns
  // This thread's rows of attn are `row` and row + 8.
  const int row = row0 + warp / slices * 16 + g;
  const uint32_t x_row =
      x_tile + (warp / slices * 16 + g) * by_columns * sizeof(T);
  // For so few terms, tensor cores are less exact than plain FMA.
  const bool few = precision == Precision::split && !backward && args.d <= 16;
  auto* attn = sample_of(args.attn, args.batch, sample) + row * args.attn.row;
  const T* grad_attn = args.grad_attn.data
                           ? sample_of(args.grad_attn, args.batch, sample) +
                                 row * args.grad_attn.row
                           : nullptr;
  Fragment<T> z[width / 8] = {};
  for (int column = 0, stage = 0; column < args.n;
       column += Size::columns, stage ^= 1) {
    wait<0>();
    __syncthreads();
    if (column + Size::columns < args.n) {
      load_step(column + Size::columns, stage ^ 1);
    }
    const uint32_t y_tile = stages + stage * Size::stage;
    const uint32_t w_tile = y_tile + Size::Y::bytes;

    const int left = args.m - row;
    const int c0 = column + first + 2 * t; // the first column of two in a tile
    Fragment<T> a[tiles], grad[tiles] = {};
    if constexpr (backward) { // these loads overlap with the product S
      load_fragments(a, attn, args.attn, left, c0, args.n);
      if (grad_attn) {
        load_fragments(grad, grad_attn, args.grad_attn, left, c0, args.n);
      }
    }
    Accumulator<T, precision> s[tiles];
    if (few) {
#pragma unroll
      for (int j = 0; j < tiles; ++j) {
        const uint32_t y_row =
            y_tile + (first + 8 * j + 2 * t) * by_columns * sizeof(T);
        add_exactly<T, by_columns>(s[j].acc, x_row, y_row, args.d);
      }
    } else {
#pragma unroll
      for (int c = 0; c < width; c += 8) {
        const uint32_t pair = (c + 2 * t) * sizeof(T);
        Fragment<T> x;
        load_pair(x[0], x_row + pair);
        load_pair(x[1], x_row + 8 * by_columns * sizeof(T) + pair);
#pragma unroll
        for (int j = 0; j < tiles; ++j) {
          T b[2];
          load_pair(
              b, y_tile + (first + 8 * j + g) * by_columns * sizeof(T) + pair);
          s[j].template add<true>(x, b);
        }
      }
    }

    Fragment<T> p[tiles];
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const T score = s[j].value(i, h), x = a[j][i][h];
          p[j][i][h] = backward ? (score + grad[j][i][h]) * ::fma(-x, x, T(1))
                                : ::tanh(score);
        }
      }
    }
    if constexpr (!backward) {
      store_fragments(attn, p, args.attn, left, c0, args.n);
    }
    // Beyond n, inf * 0 may have given NaN, which times w's zeros would be NaN.
    if (column + Size::columns > args.n) {
#pragma unroll
      for (int i = 0; i < 4 * tiles; ++i) {
        T& x = p[i / 4][i / 2 % 2][i % 2];
        x = c0 + 8 * (i / 4) + i % 2 < args.n ? x : T(0);
      }
    }

    // Each step is summed by itself and then added to z with rounding, because
    // tensor cores truncate.
#pragma unroll
    for (int c = 0; c < width / 8; ++c) {
      Accumulator<T, precision> acc;
#pragma unroll
      for (int j = 0; j < tiles; ++j) {
        T b[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int r = first + 8 * j + 2 * t + h;
          b[h] = load_shared<T>(
              w_tile + (r * Size::by_rows + 8 * c + g) * sizeof(T));
        }
        acc.add(p[j], b);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        z[c][i][0] += acc.value(i, 0);
        z[c][i][1] += acc.value(i, 1);
      }
    }
  }

  if constexpr (slices > 1) {
    add_slices<slices>(z, x_tile);
    if (warp % slices) {
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t down = row + 8 * i;
    if (down < args.m) {
      T* to = args.z + (sample * static_cast<int64_t>(args.m) + down) * args.e;
#pragma unroll
      for (int c = 0; c < width / 8; ++c) {
        store_two(to, z[c][i], 8 * c + 2 * t, args.e, args.e % 2 == 0);
      }
    }
  }
#else
  __trap();
#endif
}

} // namespace at::native::attn_tiles
