#pragma once

// PTX that the backward needs besides AttnMma.cuh, for compute capability 8.0
// and later.

#include <ATen/native/cuda/AttnMma.cuh>

#include <cstdint>

namespace at::native::attn_tiles {

__device__ inline void store_shared(uint32_t to, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to),
               "r"(x.x),
               "r"(x.y),
               "r"(x.z),
               "r"(x.w)
               : "memory");
}

template <typename T>
__device__ inline float2 unpack(uint32_t both);

template <>
__device__ inline float2 unpack<__nv_bfloat16>(uint32_t both) {
  return make_float2(
      __uint_as_float(both << 16), __uint_as_float(both & 0xffff0000));
}

template <>
__device__ inline float2 unpack<__half>(uint32_t both) {
  return __half22float2(*reinterpret_cast<const __half2*>(&both));
}

} // namespace at::native::attn_tiles
