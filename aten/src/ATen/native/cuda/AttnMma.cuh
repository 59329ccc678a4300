#pragma once

// Matrix products of one warp on tensor cores, for bfloat16 and half, with
// their loads and stores: PTX for compute capability 8.0 and later.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace at::native::attn_tiles {

// The fragment of a 16 x 8 matrix that lane 4 g + t holds: [i][j] is the
// element at row g + 8 i and column 2 t + j.
template <typename T>
using Fragment = T[2][2];

// c += a b, where a is 16 x 16 and b is 16 x 8. Lane 4 g + t holds these pairs
// of neighbouring elements of a, by (row, column): (g, 2 t), (g + 8, 2 t), (g,
// 2 t + 8), (g + 8, 2 t + 8). Of b it holds pairs in a column, at (2 t, g) and
// (2 t + 8, g).
template <typename T>
__device__ inline void mma(
    Fragment<float>& c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void mma<__nv_bfloat16>(
    Fragment<float>& c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[1][0]), "+f"(c[1][1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void mma<__half>(
    Fragment<float>& c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[1][0]), "+f"(c[1][1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads four 8 x 8 matrices of 2-byte elements from shared memory. Lane 8 i + r
// gives the address of row r of matrix i. Each lane gets the pair at row
// lane / 4 and column lane % 4 * 2 of each matrix.
__device__ inline void load_matrices(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// Does the same and transposes each matrix.
__device__ inline void load_transposed(uint32_t (&x)[4], uint32_t address) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
      : "r"(address)
      : "memory");
}

// Copies the first `bytes` of 16 to shared memory, asynchronously. The rest are
// zeros.
__device__ inline void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
               "l"(from),
               "r"(bytes)
               : "memory");
}

// Copies all 16 bytes or writes zeros. A variable size would take more
// instructions.
__device__ inline void copy_async_if(
    bool within, uint32_t to, const void* from) {
  asm volatile(
      "{\n"
      "  .reg .pred beyond;\n"
      "  setp.eq.u32 beyond, %2, 0;\n"
      "  cp.async.cg.shared.global [%0], [%1], 16, beyond;\n"
      "}" ::"r"(to),
      "l"(from),
      "r"(static_cast<uint32_t>(within))
      : "memory");
}

__device__ inline void store_shared(uint32_t to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

template <typename T>
__device__ inline T load_shared(uint32_t address);

template <>
__device__ inline float load_shared<float>(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

__device__ inline void commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int pending>
__device__ inline void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

template <typename T>
__device__ inline uint32_t pack(float x, float y);

template <>
__device__ inline uint32_t pack<__nv_bfloat16>(float x, float y) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&both);
}

template <>
__device__ inline uint32_t pack<__half>(float x, float y) {
  const __half2 both = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// tanh with a relative error of up to 2^-11.
__device__ inline float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

} // namespace at::native::attn_tiles
