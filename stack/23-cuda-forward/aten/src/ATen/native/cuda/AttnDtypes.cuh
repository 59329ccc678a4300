#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/native/cuda/AttnMma.cuh>

// The dtypes that have kernels for CUDA.

namespace at::native::attn_tiles {

// Calls fn with an element as the kernels know it; false if they don't.
template <typename F>
bool for_dtype_of(const Tensor& q, const F& fn) {
  switch (q.scalar_type()) {
    case kHalf:
      return fn(__half{});
    case kBFloat16:
      return fn(__nv_bfloat16{});
    default:
      return false;
  }
}

} // namespace at::native::attn_tiles
