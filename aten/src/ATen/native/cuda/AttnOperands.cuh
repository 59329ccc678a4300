#pragma once

// Converts tensors to what the kernels take.

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/native/cuda/AttnLaunch.cuh>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

namespace at::native::attn_tiles {

// Merges neighbouring batch dimensions that are one dimension in memory in each
// of N tensors. Returns none if more than kBatchDims remain, or one is too
// large.
template <size_t N>
struct MergedBatch {
  Batch batch{{1, 1, 1}};
  int64_t strides[N][kBatchDims] = {};
};

template <size_t N>
std::optional<MergedBatch<N>> merge_batch(
    const std::array<const Tensor*, N>& tensors) {
  MergedBatch<N> merged;
  int at = kBatchDims; // the dimension that others are merged into
  for (int64_t dim = tensors[0]->dim() - 3; dim >= 0; --dim) {
    const int64_t size = tensors[0]->size(dim);
    if (size == 1) {
      continue;
    }
    bool merges = at < kBatchDims;
    for (size_t i = 0; merges && i < N; ++i) {
      merges = !tensors[i]->defined() ||
               tensors[i]->stride(dim) ==
                   merged.strides[i][at] * merged.batch.sizes[at];
    }
    if (!merges) {
      if (at == 0) {
        return std::nullopt;
      }
      --at;
      for (size_t i = 0; i < N; ++i) {
        merged.strides[i][at] =
            tensors[i]->defined() ? tensors[i]->stride(dim) : 0;
      }
    }
    if (size > std::numeric_limits<int>::max() / merged.batch.sizes[at]) {
      return std::nullopt;
    }
    merged.batch.sizes[at] *= size;
  }
  return merged;
}

// Returns whether each row is contiguous and starts at a multiple of 16 bytes.
inline bool has_aligned_rows(const Tensor& x) {
  bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 &&
                 (x.size(-1) == 1 || x.stride(-1) == 1);
  for (int64_t dim = 0; dim < x.dim() - 1; ++dim) {
    aligned = aligned &&
              (x.size(dim) == 1 || x.stride(dim) * x.element_size() % 16 == 0);
  }
  return aligned;
}

// Returns x, or a copy of it with such rows. If x is expanded, so is the copy.
inline Tensor with_aligned_rows(const Tensor& x) {
  if (!x.defined() || has_aligned_rows(x)) {
    return x;
  }
  Tensor once = x;
  for (int64_t dim = 0; dim < x.dim() - 1; ++dim) {
    if (x.stride(dim) == 0) {
      once = once.narrow(dim, 0, 1);
    }
  }
  const int64_t step = 16 / x.element_size();
  DimVector sizes(once.sizes());
  sizes.back() = (sizes.back() + step - 1) / step * step;
  return at::empty(sizes, x.options())
      .narrow(-1, 0, x.size(-1))
      .copy_(once)
      .expand(x.sizes());
}

template <typename T>
Operand<T> operand_of(const Tensor& x, const int64_t (&batch)[kBatchDims]) {
  Operand<T> to{};
  if (x.defined()) {
    to.data = static_cast<const T*>(x.const_data_ptr());
    to.row = x.stride(-2);
    std::copy_n(batch, kBatchDims, to.batch);
  }
  return to;
}

// The same for attn or its gradient, which is written unless T is const.
template <typename T>
Scores<T> scores_of(const Tensor& x, const int64_t (&batch)[kBatchDims]) {
  Scores<T> to{};
  if (x.defined()) {
    if constexpr (std::is_const_v<T>) {
      to.data = static_cast<T*>(x.const_data_ptr());
    } else {
      to.data = static_cast<T*>(x.mutable_data_ptr());
    }
    to.row = x.stride(-2);
    to.column = x.stride(-1);
    std::copy_n(batch, kBatchDims, to.batch);
    to.aligned = x.size(-1) % 8 == 0 && has_aligned_rows(x);
  }
  return to;
}

// Returns whether the kernels take these sizes on this device.
inline bool has_kernels(const Tensor& q, const Tensor& k, const Tensor& v) {
  constexpr int64_t widest = 128;
  constexpr int64_t most = std::numeric_limits<int>::max() - widest;
  return q.size(-1) <= widest && v.size(-1) <= widest && q.size(-2) <= most &&
         k.size(-2) <= most &&
         at::cuda::getCurrentDeviceProperties()->major >= 8;
}

// Computes P from S = x yᵀ, element by element, and z = P w: see AttnRows.cuh.
// Returns false if no kernel can.
template <typename T, bool backward>
bool sweep_rows(
    const Tensor& x,
    const Tensor& y,
    const Tensor& w,
    const Tensor& attn,
    const Tensor& grad_attn,
    const Tensor& z) {
  const auto merged = merge_batch<5>({&attn, &x, &y, &w, &grad_attn});
  if (!merged) {
    return false;
  }
  const auto& strides = merged->strides;
  RowArgs<T, backward> args{};
  args.batch = merged->batch;
  args.attn =
      scores_of<std::conditional_t<backward, const T, T>>(attn, strides[0]);
  args.x = operand_of<T>(x, strides[1]);
  args.y = operand_of<T>(y, strides[2]);
  args.w = operand_of<T>(w, strides[3]);
  args.grad_attn = scores_of<const T>(grad_attn, strides[4]);
  args.z = static_cast<T*>(z.mutable_data_ptr());
  args.m = attn.size(-2);
  args.n = attn.size(-1);
  args.d = x.defined() ? x.size(-1) : 0;
  args.e = w.size(-1);
  return launch_rows(args);
}

} // namespace at::native::attn_tiles
