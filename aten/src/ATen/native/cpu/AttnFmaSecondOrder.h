#pragma once

#include <ATen/native/cpu/AttnFmaBackward.h>
#include <ATen/native/cpu/AttnSecondOrder.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Computes the tiles of SecondOrderArgs by FMA: those of the backward, and
// their tangents.
template <typename S>
class FmaSecondOrder : FmaBackward<S> {
  using Base = FmaBackward<S>;

 public:
  using T = typename Base::T;
  using Base::LONGEST, Base::MIN_TILE, Base::ROW_STEP;

  struct Layout : Base::Layout {
    typename Scores<S>::Layout tangents;
    int64_t tangent, sum;

    Layout(const SecondOrderArgs<S>& args, int64_t rows, int64_t cols)
        : Base::Layout(args, rows, cols),
          tangents(
              this->scratch,
              this->transposed ? cols : args.sizes.m,
              this->transposed ? cols : rows,
              this->transposed ? rows : cols,
              args.sizes.d,
              false,
              0) {
      tangent = this->scratch.add(
          this->transposed ? tile_size<T>(cols, rows)
                           : tile_size<T>(rows, cols));
      sum = this->scratch.add(
          std::max(rows, cols) * std::max(args.sizes.d, args.sizes.e));
      this->size = this->scratch.size();
    }
  };

  FmaSecondOrder(const Layout& layout, T* scratch)
      : Base(layout, scratch),
        tangents_(layout.tangents, scratch),
        attn_tangent_(scratch + layout.tangent),
        sum_(scratch + layout.sum) {}

  void start(const SecondOrderTile<S>& matrices, bool with_scores) {
    Base::start(matrices, false); // attn
    matrices_ = matrices;
    const auto kept = [&](Matrix<const S>& x) {
      x.rows = std::min(x.rows, cols_);
    };
    kept(matrices_.v);
    kept(matrices_.k_tangent);
    kept(matrices_.v_tangent);
    make_scores_tangent();
    if (with_scores) {
      make(grads_, grad_output_, matrices_.v, scores_tile());
      if (matrices_.v_tangent.data != nullptr) {
        make(grads_, grad_output_, matrices_.v_tangent, tile_);
      }
    }
    finish(with_scores, matrices.form);
  }

  // Adds to one of SecondOrderArgs' gradients.
  template <typename O>
  void add(size_t gradient, bool accumulate, O* total) {
    const auto& x = matrices_;
    if (gradient == 0) {
      add_two(true, tile_, k_, scores_tile(), x.k_tangent, accumulate, total);
    } else if (gradient == 1) {
      add_two(false, tile_, q_, scores_tile(), x.q_tangent, accumulate, total);
    } else if (gradient == 2) {
      add_two(
          false, attn_tangent_, grad_output_, nullptr, {}, accumulate, total);
    } else {
      add_two(
          true, attn_tangent_, x.v, attn_tile_, x.v_tangent, accumulate, total);
    }
  }

 private:
  using Base::attn_tile_, Base::cols_, Base::grad_output_, Base::grads_,
      Base::k_, Base::ld_, Base::q_, Base::rows_, Base::tile_,
      Base::transposed_;

  // S̄; tile_ is its tangent
  T* scores_tile() const {
    return this->grad_tile_;
  }

  // attn_tangent_ = q' kᵀ + q k'ᵀ
  void make_scores_tangent() {
    const auto &q_t = matrices_.q_tangent, &k_t = matrices_.k_tangent;
    if (q_t.data != nullptr) {
      make(tangents_, q_t, k_, attn_tangent_);
    }
    if (k_t.data == nullptr) {
      return;
    }
    if (q_t.data == nullptr) {
      return make(tangents_, q_, k_t, attn_tangent_);
    }
    make(tangents_, q_, k_t, tile_);
    add_sum(true, attn_tangent_, tile_, (transposed_ ? cols_ : rows_) * ld_);
  }

  // tile = a bᵀ
  void make(
      Scores<S>& scores,
      const Matrix<const S>& a,
      const Matrix<const S>& b,
      T* tile) {
    const auto& [rows, cols] = transposed_ ? std::pair{b, a} : std::pair{a, b};
    clear_edges(tile, rows.rows, cols.rows, ld_);
    scores.product(false, rows, cols, tile, ld_);
  }

  // With the tiles P = grad_output vᵀ and P' = grad_output v'ᵀ:
  //   attn' = scale (1 - attn²) scores'
  //   S̄ = scale (1 - attn²) P
  //   S̄' = scale (1 - attn²) P' - 2 scale attn attn' P
  // or 0 where attn is masked.
  void finish(bool with_scores, const Form& form) {
    const auto rows = transposed_ ? cols_ : rows_;
    const auto cols = transposed_ ? rows_ : cols_;
    const bool has_v = matrices_.v_tangent.data != nullptr;
    const Pair<T> scale(static_cast<T>(form.scale));
    const Pair<T> twice(static_cast<T>(-2 * form.scale));
    for (const auto i : c10::irange(rows)) {
      const auto row = i * ld_;
      T* attn_tangent = attn_tangent_ + row;
      T* scores = scores_tile() + row;
      T* scores_tangent = tile_ + row;
      for (int64_t j = 0; j < cols; j += pair_size<T>) {
        const auto count = cols - j;
        const auto y = load<T>(attn_tile_ + row + j, count);
        const auto slope = tanh_backward(scale, y);
        const auto attn_t = slope * load<T>(attn_tangent + j, count);
        store(attn_tangent + j, attn_t);
        if (!with_scores) {
          continue;
        }
        const auto p = load<T>(scores + j, count);
        auto scores_t = twice * y * attn_t * p;
        if (has_v) {
          scores_t = scores_t + slope * load<T>(scores_tangent + j, count);
        }
        store(scores + j, slope * p);
        store(scores_tangent + j, scores_t);
      }
      for (T* x : {attn_tangent, scores, scores_tangent}) {
        mask_row(x, i, cols, form, transposed_);
      }
    }
  }

  // total (+)= a x + b y, or aᵀ x + bᵀ y, where y may be missing
  template <typename O>
  void add_two(
      bool of_rows,
      const T* a,
      const Matrix<const S>& x,
      const T* b,
      const Matrix<const S>& y,
      bool accumulate,
      O* total) {
    const auto rows = of_rows ? rows_ : this->all_cols_;
    add_products<T>(
        y.data != nullptr,
        accumulate,
        rows * x.cols,
        sum_,
        total,
        [&](bool second, bool adds, auto* out) {
          this->add_product(adds, of_rows, second ? b : a, second ? y : x, out);
        });
  }

  Scores<S> tangents_;
  T *attn_tangent_, *sum_;
  SecondOrderTile<S> matrices_{};
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
