#pragma once

// Launches the sweeps for float and double.

#include <ATen/Context.h>
#include <ATen/native/cuda/AttnWideColumns.cuh>
#include <ATen/native/cuda/AttnWideRows.cuh>

#include <type_traits>

namespace at::native::attn_tiles {

// Calls fn with the Precision by which T, float or double, is multiplied.
template <typename T, typename F>
bool for_precision_of(const F& fn) {
  if constexpr (std::is_same_v<T, float>) {
    const auto precision = at::globalContext().float32Precision(
        Float32Backend::CUDA, Float32Op::MATMUL);
    if (precision != Float32Precision::TF32) {
      return fn(std::integral_constant<Precision, Precision::split>{});
    }
  }
  return fn(std::integral_constant<Precision, Precision::plain>{});
}

// Launches the sweep for float and double. Returns false if no block fits.
template <typename T, bool backward>
std::enable_if_t<sizeof(T) != 2, bool> launch_rows(
    const RowArgs<T, backward>& args) {
  return for_width_of<T>(args.d, args.e, [&](auto width) {
    constexpr int rows = WideRowSweep<T, width, 1>::rows;
    return for_precision_of<T>([&](auto precision) {
      return for_slices_of(
          WideSlices<T, precision>{},
          args.batch,
          args.m,
          rows,
          enough_blocks<T>(),
          [&](auto slices) {
            using Sweep = WideRowSweep<T, width, slices>;
            return launch<Sweep>(
                attn_wide_rows<T, width, backward, precision, slices>,
                args,
                args.m,
                Sweep::rows);
          });
    });
  });
}

// Launches the sweep for float and double. Returns false if no block fits.
template <typename T>
std::enable_if_t<sizeof(T) != 2, bool> launch_columns(
    const ColumnArgs<T>& args) {
  return for_width_of<T>(args.d, args.e, [&](auto width) {
    constexpr int columns = WideColumnSweep<T, width, 1>::columns;
    constexpr bool fit = width * sizeof(T) <= 64 * sizeof(float);
    return for_precision_of<T>([&](auto precision) {
      return for_gradients_of<fit>(args, [&](const auto& some, auto both) {
        return for_slices_of(
            WideSlices<T, precision>{},
            args.batch,
            args.n,
            columns,
            enough_blocks<T>(),
            [&](auto slices) {
              using Sweep = WideColumnSweep<T, width, slices>;
              return launch<Sweep>(
                  attn_wide_columns<T, width, precision, both, slices>,
                  some,
                  args.n,
                  Sweep::columns);
            });
      });
    });
  });
}

} // namespace at::native::attn_tiles
