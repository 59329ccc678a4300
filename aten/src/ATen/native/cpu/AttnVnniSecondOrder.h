#pragma once

#include <ATen/native/cpu/AttnSecondOrder.h>
#include <ATen/native/cpu/AttnVnniBackward.h>

#if defined(CPU_CAPABILITY_AVX512)

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Computes the tiles of SecondOrderArgs by VnniProducts: those of the backward,
// and their tangents.
template <typename Micro>
class VnniSecondOrder : VnniBackward<Micro> {
  using Base = VnniBackward<Micro>;
  using Products = typename Base::Products;

 public:
  using T = typename Base::T;
  using S = typename Base::S;
  using Base::LONGEST, Base::MIN_TILE, Base::ROW_STEP;

  struct Layout : Base::Layout {
    int64_t acc2, left2, right2, scores, attn_tangent, sum;

    Layout(const SecondOrderArgs<S>& args, int64_t rows, int64_t cols)
        : Base::Layout(args, rows, cols) {
      auto& layout = this->scratch;
      const auto width = std::max(args.sizes.d, args.sizes.e);
      acc2 = layout.add(Base::MC * BRGEMM_LD);
      left2 = layout.add(Products::left_size(rows, width));
      right2 = layout.add(Products::right_size(width, cols));
      scores = layout.add(Products::left_size(rows, cols));
      attn_tangent = layout.add(Products::left_size(rows, cols));
      sum = layout.add(std::max(rows, cols) * width);
      this->size = layout.size();
    }
  };

  VnniSecondOrder(const Layout& layout, T* scratch)
      : Base(layout, scratch),
        acc2_(scratch + layout.acc2),
        sum_(scratch + layout.sum),
        left2_(reinterpret_cast<S*>(scratch + layout.left2)),
        right2_(reinterpret_cast<S*>(scratch + layout.right2)),
        scores_{reinterpret_cast<S*>(scratch + layout.scores), 0, 0},
        attn_tangent_{
            reinterpret_cast<S*>(scratch + layout.attn_tangent), 0, 0} {}

  void start(const SecondOrderTile<S>& matrices, bool with_scores) {
    Base::start(matrices, false); // attn
    inputs_ = matrices;
    const auto& x = inputs_;
    for (auto* tile : {&tile_, &scores_, &attn_tangent_}) {
      *tile = {tile->data, x.q.rows, x.k.rows};
    }
    // attn' = scale (1 - attn²) (q' kᵀ + q k'ᵀ), or 0 where attn is masked
    const Pair<T> zero(0);
    sum_rows(
        x.q_tangent,
        x.k,
        x.q,
        x.k_tangent,
        [&](int64_t i, int64_t col, int64_t count, Pair<T> a, Pair<T> b) {
          const auto sum = (x.q_tangent.data == nullptr ? zero : a) +
                           (x.k_tangent.data == nullptr ? zero : b);
          Micro::round(slope(i, col, count) * sum)
              .store(attn_tangent_.at(i, col));
        });
    mask(attn_tangent_);
    if (!with_scores) {
      return;
    }
    // With P = grad_output vᵀ and P' = grad_output v'ᵀ:
    //   S̄ = scale (1 - attn²) P
    //   S̄' = scale (1 - attn²) P' - 2 scale attn attn' P
    // or 0 where attn is masked.
    const Pair<T> twice(static_cast<T>(-2 * x.form.scale));
    sum_rows(
        x.grad_output,
        x.v,
        x.grad_output,
        x.v_tangent,
        [&](int64_t i, int64_t col, int64_t count, Pair<T> p, Pair<T> p_t) {
          const auto by_attn = slope(i, col, count);
          const auto attn_t = number(attn_tangent_, i, col, count);
          auto tangent =
              twice * number(this->attn_, i, col, count) * attn_t * p;
          if (x.v_tangent.data != nullptr) {
            tangent = tangent + by_attn * p_t;
          }
          Micro::round(by_attn * p).store(scores_.at(i, col));
          Micro::round(tangent).store(tile_.at(i, col));
        });
    mask(scores_);
    mask(tile_);
  }

  // Adds to one of SecondOrderArgs' gradients.
  template <typename O>
  void add(size_t gradient, bool accumulate, O* total) {
    const auto& x = inputs_;
    const auto add_two = [&](bool of_rows,
                             const Left& a,
                             const Matrix<const S>& b,
                             const Left& c,
                             const Matrix<const S>& d) {
      add_products<T>(
          d.data != nullptr,
          accumulate,
          (of_rows ? x.q.rows : x.k.rows) * b.cols,
          sum_,
          total,
          [&](bool second, bool adds, auto* out) {
            const auto& tile = second ? c : a;
            this->add_product(adds, of_rows, matrix(tile), second ? d : b, out);
          });
    };
    if (gradient == 0) {
      add_two(true, tile_, x.k, scores_, x.k_tangent);
    } else if (gradient == 1) {
      add_two(false, tile_, x.q, scores_, x.q_tangent);
    } else if (gradient == 2) {
      add_two(false, attn_tangent_, x.grad_output, {}, {});
    } else {
      add_two(true, attn_tangent_, x.v, this->attn_, x.v_tangent);
    }
  }

 private:
  using Left = typename Base::Left;
  using Base::matrix;
  using Base::tile_; // S̄'

  // Calls fn(i, col, count, x, y) for the vectors x of a bᵀ and y of c dᵀ. If a
  // or d is missing, x or y has no meaning.
  template <typename F>
  void sum_rows(
      const Matrix<const S>& a,
      const Matrix<const S>& b,
      const Matrix<const S>& c,
      const Matrix<const S>& d,
      const F& fn) {
    const bool first = a.data != nullptr, second = d.data != nullptr;
    const auto left = first ? Products::left(this->left_, a) : Left{};
    const auto left2 = second ? Products::left(left2_, c) : Left{};
    const auto right = Products::columns(this->right_, b);
    const auto right2 = second ? Products::columns(right2_, d) : right;
    const auto rows = tile_.rows, cols = tile_.cols;
    for (int64_t row = 0; row < rows; row += Base::MC) {
      if (first) {
        Products::multiply(left, row, right, this->acc_);
      }
      if (second) {
        Products::multiply(left2, row, right2, acc2_);
      }
      for (auto i = row; i < std::min(rows, row + Base::MC); ++i) {
        const auto at = (i - row) * BRGEMM_LD;
        Products::for_vectors(
            cols, [&](int64_t col, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
              fn(i,
                 col,
                 count,
                 load<T>(this->acc_ + at + col, count),
                 load<T>(acc2_ + at + col, count));
            });
      }
    }
  }

  // scale (1 - attn²)
  C10_ALWAYS_INLINE Pair<T> slope(int64_t i, int64_t col, int64_t count) const {
    const Pair<T> scale(static_cast<T>(inputs_.form.scale));
    return tanh_backward(scale, number(this->attn_, i, col, count));
  }

  static C10_ALWAYS_INLINE Pair<T> number(
      const Left& tile, int64_t i, int64_t col, int64_t count) {
    return Base::as_float(Products::load_row(matrix(tile), i, col, count));
  }

  void mask(const Left& tile) const {
    for (const auto i : c10::irange(tile.rows)) {
      mask_row(tile.at(i, 0), i, tile.cols, inputs_.form, false);
    }
  }

  T *acc2_, *sum_;
  S *left2_, *right2_;
  Left scores_, attn_tangent_;
  SecondOrderTile<S> inputs_{};
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu

#endif
