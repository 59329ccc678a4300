// Instructions of compute capability 9.0, each in a function: mbarriers, copies
// by TMA, products by wgmma, and tiles between registers and shared memory.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace at::native::attn_sweep {

// ---- threads ----------------------------------------------------------------

// Gives up registers of a warpgroup, or takes them, so that a thread has kMost.
template <int kMost>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kMost));
}

template <int kMost>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMost));
}

// Returns x, which is the same in all threads of a warp, so that the compiler
// knows.
__device__ __forceinline__ int of_warp(int x) {
  return __shfl_sync(~0u, x, 0);
}

// Returns when all threads of the warp have come here.
__device__ __forceinline__ void warp_wait() {
  __syncwarp();
}

// Keeps the compiler from knowing what x is.
__device__ __forceinline__ void hide(int& x) {
  asm volatile("" : "+r"(x));
}

// Keeps the compiler from moving uses of these registers across this point.
template <int n>
__device__ __forceinline__ void pin(float (&r)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    asm volatile("" : "+f"(r[i])::"memory");
  }
}

__device__ __forceinline__ uint32_t address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarrier ---------------------------------------------------------------

__device__ __forceinline__ void init(uint64_t* barrier, int arrivals) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)),
      "r"(arrivals)
      : "memory");
}

// Shows TMA the barriers that this thread made.
__device__ __forceinline__ void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile(
      "mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier))
      : "memory");
}

// Arrives, and makes the phase wait for so many bytes.
__device__ __forceinline__ void expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   address(barrier)),
               "r"(bytes)
               : "memory");
}

// Returns whether the phase of this parity has ended, after up to 10 ms.
__device__ __forceinline__ bool has_ended(uint64_t* barrier, int parity) {
  uint32_t ended;
  asm volatile(
      "{ .reg .pred p;"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, 0x989680;"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(ended)
      : "r"(address(barrier)), "r"(parity)
      : "memory");
  return ended;
}

// Returns when the phase of this parity has ended. A new barrier is in the
// phase of parity 0, as if one of parity 1 had ended. The branch to a trap is
// for ptxas: without it, it moves reads of accumulators beyond waits, finds
// that out, and makes all products wait (its remark C7514). With
// ATTN_SWEEP_WATCHDOG it is taken after 200 calls, which is up to 2 s.
__device__ __forceinline__ void wait(uint64_t* barrier, int parity) {
#ifdef ATTN_SWEEP_WATCHDOG
  constexpr unsigned kMost = 200;
#else
  constexpr unsigned kMost = 0xFFFFFFFF;
#endif
  for (unsigned calls = 0; !has_ended(barrier, parity); ++calls) {
    if (calls == kMost) {
      __trap();
    }
  }
}

// ---- TMA --------------------------------------------------------------------

// A matrix's element in five dimensions, the first of which runs fastest.
using Place = int[5];

// Makes what is copied the first to leave the L2.
__device__ __forceinline__ uint64_t leaves_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;"
               : "=l"(policy));
  return policy;
}

// Copies the box at `from` to shared memory: zeros where it is beyond the
// matrix. `full` is told of the bytes. If kOnce, nobody reads them again.
template <bool kOnce>
__device__ __forceinline__ void load_box(
    uint32_t to, const CUtensorMap* map, const Place& from, uint64_t* full) {
  if constexpr (kOnce) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile"
        ".mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
        "l"(map),
        "r"(from[0]),
        "r"(from[1]),
        "r"(from[2]),
        "r"(from[3]),
        "r"(from[4]),
        "r"(address(full)),
        "l"(leaves_first())
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile"
        ".mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
        "l"(map),
        "r"(from[0]),
        "r"(from[1]),
        "r"(from[2]),
        "r"(from[3]),
        "r"(from[4]),
        "r"(address(full))
        : "memory");
  }
}

// Copies a box to the matrix, but for what is beyond it.
__device__ __forceinline__ void store_box(
    uint32_t from, const CUtensorMap* map, const Place& to) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group"
      ".L2::cache_hint [%0, {%1, %2, %3, %4, %5}], [%6], %7;" ::"l"(map),
      "r"(to[0]),
      "r"(to[1]),
      "r"(to[2]),
      "r"(to[3]),
      "r"(to[4]),
      "r"(from),
      "l"(leaves_first())
      : "memory");
}

__device__ __forceinline__ void store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Returns when at most kPending groups of this thread's stores, the last ones,
// still read shared memory.
template <int kPending>
__device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Shows TMA what this thread has written to shared memory.
__device__ __forceinline__ void show_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- wgmma ------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Returns when at most kPending groups, the last ones, are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// clang-format off
#define ATTN_R8(r, i)                                                    \
  "+f"(r[i]), "+f"(r[i + 1]), "+f"(r[i + 2]), "+f"(r[i + 3]),            \
  "+f"(r[i + 4]), "+f"(r[i + 5]), "+f"(r[i + 6]), "+f"(r[i + 7])
#define ATTN_R32(r, i) \
  ATTN_R8(r, i), ATTN_R8(r, i + 8), ATTN_R8(r, i + 16), ATTN_R8(r, i + 24)
#define ATTN_L32                                               \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16," \
  "%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define ATTN_L64                                                    \
  ATTN_L32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,"  \
  "%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// c (64 x N) = [c +] A B. The first has A (64 x 16) and Bᵀ (N x 16) in shared
// memory, the second A in registers, and B with neighboring columns if kMajor.
#define ATTN_MULTIPLY(T, NAME, N, LIST, A, B, C, D, E, F, ...)                \
  template <bool kAdd>                                                        \
  __device__ __forceinline__ void multiply(                                   \
      T, float (&c)[N / 2], uint64_t a, uint64_t b) {                         \
    asm volatile(                                                             \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME       \
        " {" LIST "}, %" #A ", %" #B ", %" #C ", 1, 1, 0, 0;"                 \
        : __VA_ARGS__                                                         \
        : "l"(a), "l"(b), "n"(kAdd));                                         \
  }                                                                           \
  template <bool kAdd, bool kMajor>                                           \
  __device__ __forceinline__ void multiply(                                   \
      T, float (&c)[N / 2], const uint32_t* a, uint64_t b) {                  \
    asm volatile(                                                             \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME       \
        " {" LIST "}, {%" #A ",%" #B ",%" #C ",%" #D "}, %" #E ", %" #F       \
        ", 1, 1, %" ATTN_AFTER_##F ";"                                        \
        : __VA_ARGS__                                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd),      \
          "n"(kMajor));                                                       \
  }
#define ATTN_AFTER_37 "38"
#define ATTN_AFTER_69 "70"
#define ATTN_MULTIPLY_BOTH(T, NAME)                                          \
  ATTN_MULTIPLY(                                                             \
      T, NAME, 64, ATTN_L32, 32, 33, 34, 35, 36, 37, ATTN_R32(c, 0))         \
  ATTN_MULTIPLY(                                                             \
      T, NAME, 128, ATTN_L64, 64, 65, 66, 67, 68, 69, ATTN_R32(c, 0),        \
      ATTN_R32(c, 32))
ATTN_MULTIPLY_BOTH(__nv_bfloat16, "bf16")
ATTN_MULTIPLY_BOTH(__half, "f16")
// clang-format on

// ---- tiles between registers and shared memory ------------------------------

// Four matrices of 8 x 8, one in a register: lane l has two neighbors of row
// l / 4, and gives the address of row l % 8 of matrix l / 8. If kTransposed it
// has two of column l / 4.
template <bool kTransposed>
__device__ __forceinline__ void read(uint32_t* a, uint32_t from) {
  if constexpr (kTransposed) {
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
        : "r"(from)
        : "memory");
  } else {
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
        : "r"(from)
        : "memory");
  }
}

__device__ __forceinline__ void write(uint32_t to, const uint32_t* a) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
          to),
      "r"(a[0]),
      "r"(a[1]),
      "r"(a[2]),
      "r"(a[3])
      : "memory");
}

// Rounds two numbers to T.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// Returns one of two numbers: i = 0 is the low one.
template <typename T>
__device__ __forceinline__ float unpack(uint32_t pair, int i) {
  if constexpr (std::is_same_v<T, __half>) {
    const auto bits = static_cast<uint16_t>(i ? pair >> 16 : pair);
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
    return number;
  } else {
    return __uint_as_float(i ? pair & 0xFFFF0000 : pair << 16);
  }
}

// tanh(x) with a relative error of 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
  asm("tanh.approx.f32 %0, %0;" : "+f"(x));
  return x;
}

} // namespace at::native::attn_sweep
