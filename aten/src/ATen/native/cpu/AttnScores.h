#pragma once

#include <ATen/native/cpu/AttnDot.h>
#include <ATen/native/cpu/AttnFma.h>
#include <ATen/native/cpu/AttnSchedule.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// C (M x N) = A (M x K) Bᵀ, with B (N x K): q kᵀ, or grad_output vᵀ, of a tile.
// The micro-kernel needs B transposed, which pays off only if A and B have many
// rows. If either has very few rows, and there are many terms, C or Cᵀ is
// computed by dot products. If A has few rows, A is transposed instead of B:
// Cᵀ = B Aᵀ.
template <typename S>
class Scores {
 public:
  using T = at::opmath_type<S>;

  enum class Way { panels, dots, dots_swapped, panels_swapped };

  // Offsets in the scratch memory, in elements of T.
  struct Layout {
    int64_t m, cols;
    bool keeps; // whether the panels of all of B are kept
    int64_t a_panel, panels, swapped;

    // A has at most `rows` of the `m` rows, and the order of sums depends on m.
    // Each product has at most `terms`. If several A are multiplied with the
    // same B, its panels are kept. Their memory has at least `least` elements.
    Layout(
        ScratchLayout& scratch,
        int64_t m,
        int64_t rows,
        int64_t cols,
        int64_t terms,
        bool several,
        int64_t least)
        : m(m), cols(cols), keeps(several) {
      const auto kc = std::min(KC, terms);
      a_panel = scratch.add(std::max(Fma::MR, Dot<S>::MAX_ROWS) * kc);
      panels = scratch.add(
          std::max(
              least,
              Fma::packed_size(keeps ? terms : kc, std::max(rows, cols))));
      swapped = scratch.add(
          may_swap(m, cols) ? at::round_up(cols, Fma::MR) * swapped_ld(rows)
                            : 0);
    }

    // Returns how a product of so many terms is made.
    Way way(int64_t terms) const {
      return way_of(m, cols, terms);
    }
  };

  Scores(const Layout& layout, T* scratch)
      : layout_(layout),
        a_panel_(scratch + layout.a_panel),
        panels_(scratch + layout.panels),
        swapped_(scratch + layout.swapped) {}

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
    const auto way = layout_.way(a.cols);
    for (int64_t p = 0; p < a.cols; p += KC) {
      const auto terms = std::min(KC, a.cols - p);
      const auto left = a.block(0, p, a.rows, terms);
      const auto right = b.block(0, p, b.rows, terms);
      if constexpr (Dot<S>::available) {
        if (way == Way::dots) {
          add_dots(p > 0, left, right, c, ldc);
          continue;
        }
        if (way == Way::dots_swapped) {
          add_dots(p > 0, right, left, swapped_, swapped_ld(a.rows));
          continue;
        }
      }
      if (way == Way::panels_swapped) {
        const auto panels = Fma::pack(panels_, left.t());
        const auto ld = swapped_ld(a.rows);
        Fma::product_by_a_panels(
            p > 0, right, panels, a.rows, a_panel_, swapped_, ld);
        continue;
      }
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
    const bool swaps = way == Way::dots_swapped || way == Way::panels_swapped;
    if (swaps && a.cols > 0) {
      transpose(swapped_, swapped_ld(a.rows), c, ldc, b.rows, a.rows);
    }
  }

 private:
  using Fma = FmaProducts<T>;
  // For 16 rows, transposing B takes up to a quarter longer (AVX2) or 7%
  // (AVX-512), for 96 rows as long (Zen 5).
  static constexpr int64_t FEW_ROWS = 96;

  // Returns whether Cᵀ is computed first for some number of terms.
  static bool may_swap(int64_t m, int64_t cols) {
    return m <= FEW_ROWS || 2 * cols <= Fma::LANES;
  }

  // Must depend on these sizes only, because the order of sums does.
  static Way way_of(int64_t m, int64_t cols, int64_t terms) {
    if (Dot<S>::fits(m, terms)) {
      return Way::dots;
    }
    if (2 * cols <= Fma::LANES && Dot<S>::fits(cols, terms)) {
      return Way::dots_swapped;
    }
    if (m <= FEW_ROWS && terms >= std::max<int64_t>(m, 64)) {
      return Way::panels_swapped;
    }
    return Way::panels;
  }

  static int64_t swapped_ld(int64_t rows) {
    return at::round_up(rows, Fma::LANES) + Fma::LANES;
  }

  // Reads the rows of B in place. Rows that aren't dense are copied, because
  // the order of sums must not depend on strides.
  void add_dots(
      bool accumulate,
      const Matrix<const S>& a,
      const Matrix<const S>& b,
      T* c,
      int64_t ldc) {
    copy_rows(a_panel_, a.cols, a);
    auto dense = b;
    if (b.col_stride != 1) {
      S* copy = reinterpret_cast<S*>(panels_);
      for (const auto i : c10::irange(b.rows)) {
        for (const auto j : c10::irange(b.cols)) {
          copy[i * b.cols + j] = b.at(i, j);
        }
      }
      dense = {copy, b.rows, b.cols, b.cols, 1};
    }
    Dot<S>::product(a.rows, a_panel_, a.cols, dense, accumulate, c, ldc);
  }

  Layout layout_;
  T *a_panel_, *panels_, *swapped_;
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
