#pragma once

#include <ATen/native/cpu/AttnFma.h>
#include <ATen/native/cpu/AttnSchedule.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// C (M x N) = A (M x K) Bᵀ, with B (N x K): q kᵀ, or grad_output vᵀ, of a tile.
template <typename S>
class Scores {
 public:
  using T = at::opmath_type<S>;

  // Offsets in the scratch memory, in elements of T.
  struct Layout {
    bool keeps; // the panels of all of B
    int64_t kc; // terms that are summed at once
    int64_t strip, panels;

    // For A of at most `rows` rows. Of a B that several A are multiplied with,
    // the panels are kept. `least` is how large their memory is at least.
    Layout(
        ScratchLayout& scratch,
        int64_t /*m*/,
        int64_t rows,
        int64_t cols,
        int64_t terms,
        bool several,
        int64_t least)
        : keeps(several), kc(std::min(KC, terms)) {
      strip = scratch.add(Fma::MR * kc);
      panels = scratch.add(
          std::max(
              least,
              Fma::packed_size(keeps ? terms : kc, std::max(rows, cols))));
    }
  };

  Scores(const Layout& layout, T* scratch)
      : layout_(layout),
        strip_(scratch + layout.strip),
        panels_(scratch + layout.panels) {}

  // Memory that is free between products if no panels are kept.
  T* panels() const {
    return panels_;
  }

  // C = A Bᵀ; `next` if B is that of the product before. Rows of C are written
  // one after the other, and may be up to a multiple of a vector.
  void product(
      bool next,
      const Matrix<const S>& a,
      const Matrix<const S>& b,
      T* c,
      int64_t ldc) {
    for (int64_t i = 0; a.cols == 0 && i < a.rows; ++i) {
      std::fill_n(c + i * ldc, b.rows, T(0));
    }
    for (int64_t p = 0; p < a.cols; p += layout_.kc) {
      const auto terms = std::min(layout_.kc, a.cols - p);
      const auto left = a.block(0, p, a.rows, terms);
      const auto right = b.block(0, p, b.rows, terms);
      T* panels = panels_;
      if (layout_.keeps) {
        panels += p * at::round_up(b.rows, Fma::LANES);
      }
      if (!next || !layout_.keeps) {
        Fma::pack(panels, right.t());
      }
      const typename Fma::Right packed{panels, 0, terms, true};
      Fma::product_of_strips(p > 0, left, packed, b.rows, strip_, c, ldc);
    }
  }

 private:
  using Fma = FmaProducts<T>;

  Layout layout_;
  T *strip_, *panels_;
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
