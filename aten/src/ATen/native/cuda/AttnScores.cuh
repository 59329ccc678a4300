#pragma once

// Loads attn and its gradient for the backward and computes S̄ from them.

#include <ATen/native/cuda/AttnBackwardMma.cuh>
#include <ATen/native/cuda/AttnTiles.cuh>

#include <cstdint>
#include <cstring>

namespace at::native::attn_tiles {

// Loads `count` elements into 16 bytes and fills the rest with zeros.
template <typename T>
__device__ inline uint4 gather(const T* from, int64_t stride, int count) {
  constexpr int per = 16 / sizeof(T);
  T x[per];
#pragma unroll
  for (int i = 0; i < per; ++i) {
    x[i] = i < count ? from[i * stride] : T{};
  }
  uint4 all;
  memcpy(&all, x, sizeof(all));
  return all;
}

// Loads tiles of attn or its gradient as Loader does. Their rows need not be
// aligned or contiguous.
template <typename T, typename Layout, int width, int threads>
struct ScoreLoader {
  using Aligned = Loader<T, Layout, width, threads>;
  const Scores<const T>& scores;
  int n; // columns left
  Aligned aligned;

  __device__ ScoreLoader(const T* data, const Scores<const T>& scores_, int n_)
      : scores(scores_), n(n_), aligned(data, scores_.row, n_) {}

  __device__ void load(uint32_t tile, int first, int m) const {
    if (scores.aligned) {
      aligned.load(tile, first, m);
      return;
    }
    const int c = threadIdx.x % Aligned::chunks * Aligned::per;
    const T* at = aligned.from + first * scores.row + c * (scores.column - 1);
#pragma unroll 1
    for (int down = 0; down < Layout::rows; down += Aligned::step) {
      const int left = aligned.row + down < m ? n - c : 0;
      store_shared(
          Layout::place_from(tile + aligned.to, down, 0),
          gather(at + down * scores.row, scores.column, left));
    }
  }
};

template <typename T>
struct ScoreGradient {
  // Loads 16 bytes of attn, or its gradient, from column c of n, in a thread's
  // two rows of each of `m_tiles` tiles. m rows are left. Each element is read
  // once.
  template <int m_tiles>
  static __device__ void load(
      uint4 (&to)[m_tiles][2],
      const T* row,
      const Scores<const T>& scores,
      int m,
      int c,
      int n) {
    const auto each = [&](const auto& load) {
#pragma unroll
      for (int i = 0; i < 2 * m_tiles; ++i) {
        to[i / 2][i % 2] = load(row + 8 * i * scores.row, 8 * i < m ? n : 0);
      }
    };
    if (scores.aligned) {
      each([&](const T* at, int n) {
        return c < n ? __ldcs(reinterpret_cast<const uint4*>(at + c))
                     : make_uint4(0, 0, 0, 0);
      });
    } else {
      each([&](const T* at, int n) {
        return gather(at + c * scores.column, scores.column, n - c);
      });
    }
  }

  // (s + grad_attn) ∘ (1 - attn²) for two elements.
  static __device__ uint32_t
  make(float s0, float s1, uint32_t attn, uint32_t grad_attn) {
    const float2 a = unpack<T>(attn), g = unpack<T>(grad_attn);
    return pack<T>((s0 + g.x) * (1 - a.x * a.x), (s1 + g.y) * (1 - a.y * a.y));
  }
};

} // namespace at::native::attn_tiles
