#pragma once

#include <ATen/native/cpu/AttnForward.h>
#include <ATen/native/cpu/AttnMaskedOperand.h>
#include <ATen/native/cpu/AttnOneRow.h>
#include <ATen/native/cpu/AttnScores.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Computes the backward of a tile by FMA. See Note [Tiles of attn].
template <typename S>
class FmaBackward {
 public:
  using T = at::opmath_type<S>;
  static constexpr int64_t ROW_STEP = FmaProducts<T>::MR;
  static constexpr int64_t LONGEST = 8;
  // With 48 rows, packing and adding for each tile take up to a third of the
  // time (96 x 96, d = 300).
  static constexpr int64_t MIN_TILE = 96;

  // Offsets in the scratch memory, in elements of T, for tiles of at most
  // `rows` rows and `cols` columns of attn.
  struct Layout {
    ScratchLayout scratch;
    ScratchLayout again; // grad_output vᵀ and q kᵀ use the same memory
    typename Scores<S>::Layout grads, scores;
    int64_t tile, attn_tile, grad_tile, products, size;

    Layout(const BackwardArgs<S>& args, int64_t rows, int64_t cols)
        : Layout(args.sizes, rows, cols, !args.attn) {}

   private:
    Layout(const Sizes& sizes, int64_t rows, int64_t cols, bool makes_attn)
        : grads(
              scratch,
              std::min(rows, sizes.m),
              rows,
              cols,
              sizes.e,
              false,
              Fma::packed_size(
                  std::max(rows, cols),
                  std::min(NC, std::max(sizes.d, sizes.e)))),
          // It makes the same sums as the forward's.
          scores(again, sizes.m, rows, cols, sizes.d, false, 0) {
      if (makes_attn) {
        scratch.extend_to(again);
      }
      const auto elements = tile_size<T>(rows, cols);
      tile = scratch.add(elements);
      attn_tile = scratch.add(elements);
      grad_tile = scratch.add(elements);
      products =
          scratch.add(Fma::sums_size(std::min(NC, std::max(sizes.d, sizes.e))));
      size = scratch.size();
    }
  };

  FmaBackward(const Layout& layout, T* scratch)
      : grads_(layout.grads, scratch),
        scores_(layout.scores, scratch),
        tile_(scratch + layout.tile),
        attn_tile_(scratch + layout.attn_tile),
        grad_tile_(scratch + layout.grad_tile),
        products_(scratch + layout.products) {}

  void start(const Tile<S>& matrices, bool with_scores) {
    const auto& [q, k, v, attn, grad_output, grad_attn, form] = matrices;
    form_ = form;
    rows_ = q.rows;
    all_cols_ = k.rows;
    cols_ = form.kept(rows_ - 1, all_cols_); // the rest are masked
    q_ = q;
    k_ = k.block(0, 0, cols_, k.cols);
    grad_output_ = grad_output;
    ld_ = tile_ld<T>(cols_);
    if (attn.data != nullptr) {
      copy_rows(attn_tile_, ld_, attn);
    } else {
      scores_.product(false, q, k_, attn_tile_, ld_);
      make_attn<S>(rows_, cols_, form, false, attn_tile_, ld_);
    }
    clear_edges(attn_tile_, rows_, cols_, ld_);
    clear_edges(tile_, rows_, cols_, ld_);
    if (!with_scores) {
      return;
    }
    const bool has_grad = grad_attn.data != nullptr;
    if (has_grad) {
      copy_rows(grad_tile_, ld_, grad_attn);
    }
    const auto v_rows = v.block(0, 0, cols_, v.cols);
    grads_.product(false, grad_output, v_rows, tile_, ld_);
    finish(has_grad, form);
  }

  // Adds to one of BackwardArgs' gradients: S̄ k, S̄ᵀ q or attnᵀ grad_output.
  template <typename O>
  void add(size_t gradient, bool accumulate, O* total) {
    if (gradient == 0) {
      add_product(accumulate, true, tile_, k_, total);
    } else if (gradient == 1) {
      add_product(accumulate, false, tile_, q_, total);
    } else {
      add_product(accumulate, false, attn_tile_, grad_output_, total);
    }
  }

 protected:
  using Fma = FmaProducts<T>;

  // tile = scale (tile + grad_attn) (1 - attn²), or 0 where it is masked
  void finish(bool has_grad, const Form& form) {
    const Pair<T> scale(static_cast<T>(form.scale));
    for (const auto i : c10::irange(rows_)) {
      T* tile = tile_ + i * ld_;
      for (int64_t j = 0; j < cols_; j += pair_size<T>) {
        const auto count = cols_ - j;
        auto x = load<T>(tile + j, count);
        if (has_grad) {
          x = x + load<T>(grad_tile_ + i * ld_ + j, count);
        }
        const auto y = load<T>(attn_tile_ + i * ld_ + j, count);
        store(tile + j, tanh_backward(x, y) * scale);
      }
      mask_row(tile, i, cols_, form, false);
    }
  }

  // total (+)= tile x, or tileᵀ x, whose rows that belong to masked columns are
  // zero
  template <typename O>
  void add_product(
      bool accumulate,
      bool of_rows,
      const T* tile,
      const Matrix<const S>& x,
      O* total) {
    const auto rows = of_rows ? rows_ : cols_;
    const typename Fma::Left left{tile, ld_, !of_rows};
    const MaskedOperand<S> operand(x, rows, form_, !of_rows);
    add_to(accumulate, rows, left, operand.finite(), total);
    operand.add_rest(left.matrix(rows, x.rows), form_, total);
    if (!of_rows && !accumulate) {
      std::fill_n(total + cols_ * x.cols, (all_cols_ - cols_) * x.cols, O(0));
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
    for (int64_t p = 0; p < x.cols; p += NC) {
      const auto cols = std::min(NC, x.cols - p);
      const auto part = x.block(0, p, x.rows, cols);
      T* panels = grads_.panels();
      if (rows == 1 &&
          product_of_row(panels, products_, accumulate, a, part, out + p)) {
        continue;
      }
      if (Fma::product_in_place(
              products_, accumulate, rows, a, part, out + p, x.cols)) {
        continue;
      }
      const auto right = Fma::right(panels, part, rows);
      Fma::product_by(
          products_, accumulate, rows, cols, a, right, out + p, x.cols);
    }
  }

  Scores<S> grads_, scores_;
  T *tile_, *attn_tile_, *grad_tile_, *products_;
  int64_t rows_ = 0, cols_ = 0, all_cols_ = 0, ld_ = 0;
  Matrix<const S> q_{}, k_{}, grad_output_{};
  Form form_{};
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
