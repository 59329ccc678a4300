#pragma once

#include <ATen/native/cpu/AttnScores.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Computes the backward of a tile by FMA. See Note [Tiles of attn].
template <typename S>
class FmaBackward {
 public:
  using T = at::opmath_type<S>;
  static constexpr int64_t ROW_STEP = 4;
  static constexpr int64_t LONGEST = 8;
  // With 48 rows, packing and adding for each tile take up to a third of the
  // time (96 x 96, d = 300).
  static constexpr int64_t MIN_TILE = 96;

  // Offsets in the scratch memory, in elements of T, for tiles of at most
  // `rows` rows and `cols` columns.
  struct Layout {
    ScratchLayout scratch;
    typename Scores<S>::Layout scores;
    int64_t tile, attn_tile, grad_tile, products, size;

    Layout(int64_t rows, int64_t cols, int64_t d, int64_t e)
        : scores(
              scratch,
              rows,
              rows,
              cols,
              e,
              false,
              Fma::packed_size(
                  std::max(rows, cols), std::min(NC, std::max(d, e)))) {
      const auto elements = tile_size<T>(rows, cols);
      tile = scratch.add(elements);
      attn_tile = scratch.add(elements);
      grad_tile = scratch.add(elements);
      products = scratch.add(Fma::sums_size(std::min(NC, std::max(d, e))));
      size = scratch.size();
    }
  };

  FmaBackward(const Layout& layout, T* scratch)
      : scores_(layout.scores, scratch),
        tile_(scratch + layout.tile),
        attn_tile_(scratch + layout.attn_tile),
        grad_tile_(scratch + layout.grad_tile),
        products_(scratch + layout.products) {}

  void start(const Tile<S>& matrices, bool with_scores) {
    const auto& [q, k, v, attn, grad_output, grad_attn] = matrices;
    q_ = q;
    k_ = k;
    grad_output_ = grad_output;
    rows_ = attn.rows;
    cols_ = attn.cols;
    ld_ = tile_ld<T>(cols_);
    copy_rows(attn_tile_, ld_, attn);
    clear_edges(attn_tile_, rows_, cols_, ld_);
    clear_edges(tile_, rows_, cols_, ld_);
    if (!with_scores) {
      return;
    }
    const bool has_grad = grad_attn.data != nullptr;
    if (has_grad) {
      copy_rows(grad_tile_, ld_, grad_attn);
    }
    scores_.product(false, grad_output, v, tile_, ld_);
    finish(rows_, cols_, has_grad);
  }

  template <typename O>
  void add_grad_q(bool accumulate, O* total) {
    add_to(accumulate, rows_, {tile_, ld_}, k_, total);
  }
  template <typename O>
  void add_grad_k(bool accumulate, O* total) {
    add_to(accumulate, cols_, {tile_, ld_, true}, q_, total);
  }
  template <typename O>
  void add_grad_v(bool accumulate, O* total) {
    add_to(accumulate, cols_, {attn_tile_, ld_, true}, grad_output_, total);
  }

 private:
  using Fma = FmaProducts<T>;

  // tile = (tile + grad_attn) (1 - attn²)
  void finish(int64_t rows, int64_t cols, bool has_grad) {
    for (const auto i : c10::irange(rows)) {
      T* tile = tile_ + i * ld_;
      for (int64_t j = 0; j < cols; j += pair_size<T>) {
        auto x = load<T>(tile + j);
        if (has_grad) {
          x = x + load<T>(grad_tile_ + i * ld_ + j);
        }
        store(tile + j, tanh_backward(x, load<T>(attn_tile_ + i * ld_ + j)));
      }
    }
  }

  // out (+)= a x, where a is a tile or its transpose. An out of lower precision
  // is overwritten.
  template <typename O>
  void add_to(
      bool accumulate,
      int64_t rows,
      const typename Fma::Left& a,
      const Matrix<const S>& x,
      O* out) {
    const bool few = rows <= Fma::template FEW_ROWS<S>;
    for (int64_t p = 0; p < x.cols; p += NC) {
      const auto cols = std::min(NC, x.cols - p);
      const auto part = x.block(0, p, x.rows, cols);
      if (few && Fma::product_in_place(
                     products_, accumulate, rows, a, part, out + p, x.cols)) {
        continue;
      }
      const auto right = Fma::right(scores_.panels(), part, rows, few);
      Fma::product_by(
          products_, accumulate, rows, cols, a, right, out + p, x.cols);
    }
  }

  Scores<S> scores_;
  T *tile_, *attn_tile_, *grad_tile_, *products_;
  int64_t rows_ = 0, cols_ = 0, ld_ = 0;
  Matrix<const S> q_{}, k_{}, grad_output_{};
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
