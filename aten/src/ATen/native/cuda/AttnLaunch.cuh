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

// With fewer blocks than this, smaller blocks are faster, though they read more
// of the same data. The slower the products of T are, the less that counts.
template <typename T>
int64_t enough_blocks() {
  return (sizeof(T) < sizeof(float) ? 2 : 4) *
         at::cuda::getCurrentDeviceProperties()->multiProcessorCount / 3;
}

// How many blocks a sweep has over `lines` rows, or columns, of every sample.
inline int64_t blocks_of(
    const Batch& batch, int64_t lines, int64_t lines_of_block) {
  const auto& [x, y, z] = batch.sizes;
  return static_cast<int64_t>(x) * y * z *
         ((lines + lines_of_block - 1) / lines_of_block);
}

// Launches a sweep over the rows, or the columns, of every sample; false if
// this device has too little room for that.
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

// Calls fn with how many warps share a block's rows or columns: the first, with
// which blocks are largest, or the next, until there are enough blocks, or what
// takes less shared memory than there is. False if nothing does.
template <int first, int... others, typename F>
bool for_across_of(
    std::integer_sequence<int, first, others...> /*across*/,
    const Batch& batch,
    int64_t lines,
    int64_t lines_of_block, // without sharing
    int64_t enough,
    const F& fn) {
  const std::integral_constant<int, first> across{};
  if constexpr (sizeof...(others) > 0) {
    const std::integer_sequence<int, others...> next{};
    if ((blocks_of(batch, lines, lines_of_block / first) >= enough &&
         fn(across)) ||
        for_across_of(next, batch, lines, lines_of_block, enough, fn)) {
      return true;
    }
  }
  return fn(across);
}

// Calls fn with the least width of tiles that has room for d and e columns;
// false if there is none for T.
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

// Launches the sweep for half and bfloat16; false if no blocks fit.
template <typename T, bool backward>
std::enable_if_t<sizeof(T) == 2, bool> launch_rows(
    const RowArgs<T, backward>& args) {
  return for_width_of<T>(args.d, args.e, [&](auto width) {
    constexpr int rows = RowSweep<width, 1>::rows;
    return for_across_of(
        Across<width>{},
        args.batch,
        args.m,
        rows,
        enough_blocks<T>(),
        [&](auto across) {
          using Sweep = RowSweep<width, across>;
          return launch<Sweep>(
              attn_rows<T, width, backward, across>, args, args.m, Sweep::rows);
        });
  });
}

} // namespace at::native::attn_tiles
