#pragma once

// Launches a sweep over the rows or the columns of attn, and chooses the size
// of its blocks.

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/native/cuda/AttnRows.cuh>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

namespace at::native::attn_tiles {

// If there are fewer blocks than this, smaller blocks are faster, although they
// read the same data more often. That matters less if products of T are slow.
template <typename T>
int64_t enough_blocks() {
  return (sizeof(T) < sizeof(float) ? 2 : 4) *
         at::cuda::getCurrentDeviceProperties()->multiProcessorCount / 3;
}

// Returns the number of blocks for `lines` rows, or columns, of every sample.
inline int64_t blocks_of(
    const Batch& batch, int64_t lines, int64_t lines_of_block) {
  const auto& [x, y, z] = batch.sizes;
  return static_cast<int64_t>(x) * y * z *
         ((lines + lines_of_block - 1) / lines_of_block);
}

// Launches a sweep over the rows, or columns, of every sample. Returns false if
// the device has too little shared memory or allows too few blocks.
template <typename Sweep, typename Args>
bool launch(
    void (*kernel)(Args),
    const Args& args,
    int64_t lines,
    int64_t lines_of_block) {
  const int64_t blocks = blocks_of(args.batch, lines, lines_of_block);
  constexpr size_t shared = Sweep::shared;
  if (blocks > std::numeric_limits<int>::max() ||
      shared > at::cuda::getCurrentDeviceProperties()->sharedMemPerBlockOptin) {
    return false;
  }
  constexpr int without_asking = 48 << 10;
  if constexpr (Sweep::shared > without_asking) {
    C10_CUDA_CHECK(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Sweep::shared));
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  kernel<<<static_cast<int>(blocks), Sweep::threads, Sweep::shared, stream>>>(
      args);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return true;
}

// Calls fn(slices) with the number of warps that share rows or columns. Takes
// the first number, which gives the largest blocks, if that gives `enough`
// blocks and fn returns true, else the next. Returns false if fn never does.
template <int first, int... others, typename F>
bool for_slices_of(
    std::integer_sequence<int, first, others...> /*slices*/,
    const Batch& batch,
    int64_t lines,
    int64_t lines_of_block, // if warps share nothing
    int64_t enough,
    const F& fn) {
  const std::integral_constant<int, first> slices{};
  if constexpr (sizeof...(others) > 0) {
    const std::integer_sequence<int, others...> next{};
    if ((blocks_of(batch, lines, lines_of_block / first) >= enough &&
         fn(slices)) ||
        for_slices_of(next, batch, lines, lines_of_block, enough, fn)) {
      return true;
    }
  }
  return fn(slices);
}

// Calls fn with the smallest width of tiles for d and e columns. Returns false
// if there is none for T.
template <typename T, typename F>
bool for_width_of(int d, int e, const F& fn) {
  if (d <= 64 && e <= 64) {
    return fn(std::integral_constant<int, 64>{});
  }
  if constexpr (sizeof(T) <= sizeof(float)) {
    return fn(std::integral_constant<int, 128>{});
  }
  return false;
}

// Launches the sweep for half and bfloat16. Returns false if no block fits.
template <typename T, bool backward>
std::enable_if_t<sizeof(T) == 2, bool> launch_rows(
    const RowArgs<T, backward>& args) {
  return for_width_of<T>(args.d, args.e, [&](auto width) {
    constexpr int rows = RowSweep<width, 1>::rows;
    return for_slices_of(
        Slices<width>{},
        args.batch,
        args.m,
        rows,
        enough_blocks<T>(),
        [&](auto slices) {
          using Sweep = RowSweep<width, slices>;
          return launch<Sweep>(
              attn_rows<T, width, backward, slices>, args, args.m, Sweep::rows);
        });
  });
}

} // namespace at::native::attn_tiles
