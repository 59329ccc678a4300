#pragma once

// How a sweep over the columns of attn is launched.

#include <ATen/native/cuda/AttnColumns.cuh>
#include <ATen/native/cuda/AttnLaunch.cuh>

#include <type_traits>

namespace at::native::attn_tiles {

// Calls fn with each launch's arguments, and whether it makes both gradients,
// which it does if both are wanted and `fit` into registers.
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

// Launches the sweep for half and bfloat16; false if no blocks fit.
template <typename T>
std::enable_if_t<sizeof(T) == 2, bool> launch_columns(
    const ColumnArgs<T>& args) {
  return for_width_of<T>(args.d, args.e, [&](auto width) {
    constexpr int columns = ColumnSweep<width, 1>::columns;
    return for_gradients_of<true>(args, [&](const auto& some, auto both) {
      return for_across_of(
          Across<width>{},
          args.batch,
          args.n,
          columns,
          enough_blocks<T>(),
          [&](auto across) {
            using Sweep = ColumnSweep<width, across>;
            return launch<Sweep>(
                attn_columns<T, width, both, across>,
                some,
                args.n,
                Sweep::columns);
          });
    });
  });
}

} // namespace at::native::attn_tiles
