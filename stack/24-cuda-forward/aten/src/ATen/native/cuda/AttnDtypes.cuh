#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/native/cuda/AttnMma.cuh>

// Maps a tensor's dtype to the element type of the CUDA kernels.

namespace at::native::attn_tiles {

// Calls fn with an element of the kernels' type for this dtype. Returns false
// if there is none.
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
