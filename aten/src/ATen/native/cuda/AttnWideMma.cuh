#pragma once

// Matrix products of one warp on tensor cores, for float and double, with their
// loads and stores: PTX for compute capability 8.0 and later.

#include <ATen/native/cuda/AttnMma.cuh>

#include <cstdint>

namespace at::native::attn_tiles {

// c += a b, where a is 16 x 8 and b is 8 x 8. Lane 4 g + t holds the elements
// of b at row 2 t + j, for j = 0 and 1, and column g. The instruction itself
// takes columns t and t + 4 of a, and these rows of b. Here they are 2 t and 2
// t + 1, which only changes the order of the terms in a sum.
__device__ inline void mma(
    Fragment<float>& c, const Fragment<float>& a, const float (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[1][0]), "+f"(c[1][1])
      : "r"(__float_as_uint(a[0][0])),
        "r"(__float_as_uint(a[1][0])),
        "r"(__float_as_uint(a[0][1])),
        "r"(__float_as_uint(a[1][1])),
        "r"(__float_as_uint(b[0])),
        "r"(__float_as_uint(b[1])));
}

__device__ inline void mma(
    Fragment<double>& c, const Fragment<double>& a, const double (&b)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 "
          "{%0,%1}, {%2}, {%3}, {%0,%1};"
          : "+d"(c[i][0]), "+d"(c[i][1])
          : "d"(a[i][j]), "d"(b[j]));
    }
  }
}

// Rounds x to the 11 bits of a significand that tensor cores take.
__device__ inline float to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

__device__ inline double to_tf32(double x) {
  return x;
}

// Loads and stores in shared memory.
__device__ inline void load_pair(float (&x)[2], uint32_t address) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
               : "=f"(x[0]), "=f"(x[1])
               : "r"(address)
               : "memory");
}

__device__ inline void load_pair(double (&x)[2], uint32_t address) {
  asm volatile("ld.shared.v2.f64 {%0,%1}, [%2];"
               : "=d"(x[0]), "=d"(x[1])
               : "r"(address)
               : "memory");
}

template <>
__device__ inline double load_shared<double>(uint32_t address) {
  double x;
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(address) : "memory");
  return x;
}

__device__ inline void store_shared(uint32_t to, double x) {
  asm volatile("st.shared.f64 [%0], %1;" ::"r"(to), "d"(x) : "memory");
}

// Loads and stores in global memory, of elements that are used once.
__device__ inline void load_pair(float (&x)[2], const float* from) {
  const float2 both = __ldcs(reinterpret_cast<const float2*>(from));
  x[0] = both.x;
  x[1] = both.y;
}

__device__ inline void load_pair(double (&x)[2], const double* from) {
  const double2 both = __ldcs(reinterpret_cast<const double2*>(from));
  x[0] = both.x;
  x[1] = both.y;
}

__device__ inline void store_pair(float* to, const float (&x)[2]) {
  __stcs(reinterpret_cast<float2*>(to), make_float2(x[0], x[1]));
}

__device__ inline void store_pair(double* to, const double (&x)[2]) {
  __stcs(reinterpret_cast<double2*>(to), make_double2(x[0], x[1]));
}

} // namespace at::native::attn_tiles
