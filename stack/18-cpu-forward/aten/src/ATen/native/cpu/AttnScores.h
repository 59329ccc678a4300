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
    bool keeps; // whether the panels of all of B are kept
    int64_t kc; // how many terms are summed at once
    int64_t a_panel, panels;

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
      a_panel = scratch.add(Fma::MR * kc);
      panels = scratch.add(
          std::max(
              least,
              Fma::packed_size(keeps ? terms : kc, std::max(rows, cols))));
    }
  };

  Scores(const Layout& layout, T* scratch)
      : layout_(layout),
        a_panel_(scratch + layout.a_panel),
        panels_(scratch + layout.panels) {}

  // This memory is free between products, unless panels are kept.
  T* panels() const {
    return panels_;
  }

  // C = A Bᵀ. If `next`, B is the same as in the last product. Rows of C are
  // written in order, each up to a multiple of a vector.
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
      Fma::product_by_a_panels(p > 0, left, packed, b.rows, a_panel_, c, ldc);
    }
  }

 private:
  using Fma = FmaProducts<T>;

  Layout layout_;
  T *a_panel_, *panels_;
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
