#pragma once

#include <ATen/native/cpu/AttnDot.h>
#include <ATen/native/cpu/AttnFma.h>
#include <ATen/native/cpu/AttnSchedule.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// C (M x N) (+)= A (M x K) B (K x N) for a tile A and a B of few columns, which
// fill at most half a vector. Computes Cᵀ = Bᵀ Aᵀ, whose vectors are full, and
// transposes it.
template <typename T>
class FewColumns {
 public:
  using Fma = FmaProducts<T>;
  static constexpr int64_t MAX_COLS = std::min(Fma::LANES / 2, Fma::MR);

  static bool fits(int64_t cols) {
    return cols <= MAX_COLS;
  }

  // Offsets in the scratch memory, in elements of T, for an A of at most `size`
  // rows and columns.
  struct Layout {
    int64_t b_t, c_t, c;

    Layout(ScratchLayout& scratch, int64_t size)
        : b_t(scratch.add(Fma::MR * size)),
          c_t(scratch.add(tile_size<T>(MAX_COLS, size))),
          c(scratch.add(MAX_COLS * size)) {}
  };

  FewColumns(const Layout& layout, T* scratch)
      : b_t_(scratch + layout.b_t),
        c_t_(scratch + layout.c_t),
        c_(scratch + layout.c) {}

  // A C of lower precision is overwritten, never added to.
  template <typename S, typename O>
  void product(
      bool accumulate,
      int64_t rows,
      const typename Fma::Left& a,
      const Matrix<const S>& b,
      O* c) {
    const auto terms = b.rows, cols = b.cols;
    const auto ld = tile_ld<T>(rows);
    const auto b_t = Fma::left(b_t_, b.t());
    if (a.transposed) {
      const typename Fma::Right right{a.data, a.ld, terms, false};
      Fma::product(false, cols, rows, b_t, right, c_t_, ld);
    } else {
      const Matrix<const T> a_rows{a.data, rows, terms, a.ld, 1};
      Dot<T>::product(cols, b_t.data, b_t.ld, a_rows, false, c_t_, ld);
    }
    const T* result = c_t_;
    if (cols > 1) {
      transpose(c_t_, ld, c_, cols, cols, rows);
      result = c_;
    }
    if constexpr (std::is_same_v<T, O>) {
      add_sum(accumulate, c, result, rows * cols);
    } else {
      convert(c, result, rows * cols);
    }
  }

 private:
  T *b_t_, *c_t_, *c_;
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
