#pragma once

#include <ATen/native/cpu/AttnBackwardTile.h>

#include <algorithm>
#include <array>
#include <initializer_list>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// The inputs of a tile, and their tangents. One that is zero has no data.
template <typename S>
struct TangentTile : Tile<S> {
  Matrix<const S> q_tangent, k_tangent, v_tangent;
};

// With attn' and S̄' the tangents of attn and S̄ for those of q, k and v:
//   output' = attn' v + attn v'
// and the gradients of <grad_output, output'>, which are the tangents of those
// of <grad_output, output>:
//   grad_q = S̄' k + S̄ k', grad_k = S̄'ᵀ q + S̄ᵀ q', grad_v = attn'ᵀ grad_output
// A tangent that is zero is missing; q' and k' aren't both.
template <typename S>
struct SecondOrderArgs : BackwardArgs<S> {
  MatrixBatch<S> output_tangent;
  MatrixBatch<const S> q_tangent, k_tangent, v_tangent;

  std::array<Gradient<S>, 4> gradients() const {
    return {
        {{this->grad_q, true},
         {this->grad_k, false},
         {this->grad_v, false},
         {output_tangent, true}}};
  }
  TangentTile<S> tile(
      int64_t b, int64_t i, int64_t j, int64_t rows, int64_t cols) const {
    const auto block = [&](const auto& x, int64_t row, int64_t count) {
      return x ? x[b].block(row, 0, count, x[b].cols) : Matrix<const S>{};
    };
    return {
        BackwardArgs<S>::tile(b, i, j, rows, cols),
        block(q_tangent, i, rows),
        block(k_tangent, j, cols),
        block(v_tangent, j, cols)};
  }
};

// Computes the tiles of SecondOrderArgs: those of the backward, and their
// tangents.
template <typename Tiles>
class SecondOrderTile : protected BackwardTile<Tiles> {
  using Base = BackwardTile<Tiles>;

 public:
  using S = typename Base::S;
  using T = typename Base::T;
  using Base::LONGEST, Base::MIN_TILE, Base::ROW_STEP;

  struct Layout : Base::Layout {
    int64_t scores_tangent, attn_tangent, sum;

    Layout(const SecondOrderArgs<S>& args, int64_t rows, int64_t cols)
        : Base::Layout(args, rows, cols, Use::twice) {
      auto& scratch = this->scratch;
      scores_tangent = scratch.add(this->tiles.tile_size);
      attn_tangent = scratch.add(this->tiles.tile_size);
      sum = scratch.add(
          std::max(rows, cols) * std::max(args.sizes.d, args.sizes.e));
      this->size = scratch.size();
    }
  };

  SecondOrderTile(const Layout& layout, T* scratch)
      : Base(layout, scratch),
        sum_(scratch + layout.sum),
        scores_tangent_at_(layout.scores_tangent),
        attn_tangent_at_(layout.attn_tangent) {}

  // Makes attn and its tangent and, if `with_scores`, S̄ and its tangent. With
  // the tiles P = grad_output vᵀ and P' = grad_output v'ᵀ:
  //   attn' = scale (1 - attn²) (q' kᵀ + q k'ᵀ)
  //   S̄ = scale (1 - attn²) P
  //   S̄' = scale (1 - attn²) P' - 2 scale attn attn' P
  // or 0 where attn is masked.
  void start(const TangentTile<S>& inputs, bool with_scores) {
    Base::start(inputs, false); // attn
    q_tangent_ = inputs.q_tangent;
    k_tangent_ = kept(inputs.k_tangent);
    v_tangent_ = kept(inputs.v_tangent);
    scores_tangent_ = this->tile_at(scores_tangent_at_);
    attn_tangent_ = this->tile_at(attn_tangent_at_);
    const Pair<T> scale(static_cast<T>(x_.form.scale));
    tiles_.scores(
        q_tangent_,
        x_.k,
        attn_tangent_,
        x_.q,
        k_tangent_,
        scores_tangent_,
        [&, attn = attn_, attn_tangent = attn_tangent_](
            int64_t i,
            int64_t j,
            int64_t count,
            const Pair<T>& a,
            const Pair<T>& b) C10_ALWAYS_INLINE_ATTRIBUTE {
          const auto y = Tiles::load(attn, i, j, count);
          const auto slope = tanh_backward(scale, y);
          Tiles::store(attn_tangent, i, j, slope * (a + b));
        });
    this->mask(attn_tangent_);
    if (!with_scores) {
      return;
    }
    const Pair<T> twice(static_cast<T>(-2 * x_.form.scale));
    const bool has_v = v_tangent_.data != nullptr;
    tiles_.scores(
        x_.grad_output,
        x_.v,
        scores_,
        x_.grad_output,
        v_tangent_,
        scores_tangent_,
        [&,
         attn = attn_,
         attn_tangent = attn_tangent_,
         scores = scores_,
         scores_tangent = scores_tangent_](
            int64_t i,
            int64_t j,
            int64_t count,
            const Pair<T>& p,
            const Pair<T>& p_tangent) C10_ALWAYS_INLINE_ATTRIBUTE {
          const auto y = Tiles::load(attn, i, j, count);
          const auto slope = tanh_backward(scale, y);
          auto tangent = twice * y * Tiles::load(attn_tangent, i, j, count) * p;
          if (has_v) {
            tangent = tangent + slope * p_tangent;
          }
          Tiles::store(scores, i, j, slope * p);
          Tiles::store(scores_tangent, i, j, tangent);
        });
    this->mask(scores_);
    this->mask(scores_tangent_);
  }

  // Adds to one of SecondOrderArgs' gradients.
  template <typename O>
  void add(size_t gradient, bool accumulate, O* total) {
    if (gradient == 0) {
      add_products(
          true,
          {{scores_tangent_, x_.k}, {scores_, k_tangent_}},
          accumulate,
          total);
    } else if (gradient == 1) {
      add_products(
          false,
          {{scores_tangent_, x_.q}, {scores_, q_tangent_}},
          accumulate,
          total);
    } else if (gradient == 2) {
      add_products(false, {{attn_tangent_, x_.grad_output}}, accumulate, total);
    } else {
      add_products(
          true,
          {{attn_tangent_, x_.v}, {attn_, v_tangent_}},
          accumulate,
          total);
    }
  }

 protected:
  using Base::attn_, Base::scores_, Base::tiles_, Base::x_;
  using typename Base::E, typename Base::Own;

  // A product of a tile with a matrix, or none if either has no data.
  struct Product {
    Matrix<const E> tile;
    Matrix<const S> x;
  };

  // total (+)= the sum of the products tile x or, unless `of_rows`, tileᵀ x. It
  // is made before it is added: see Note [Tiles of attn].
  template <typename O>
  void add_products(
      bool of_rows,
      std::initializer_list<Product> products,
      bool accumulate,
      O* total) {
    int64_t count = 0, cols = 0;
    const auto exists = [](const Product& product) {
      return product.tile.data != nullptr && product.x.data != nullptr;
    };
    for (const auto& product : products) {
      count += exists(product);
      cols = std::max(cols, product.x.cols);
    }
    const auto make = [&](bool adds, auto* out) {
      for (const auto& product : products) {
        if (exists(product)) {
          this->add_product(adds, of_rows, product.tile, product.x, out);
          adds = true;
        }
      }
    };
    if (count == 1 || (std::is_same_v<T, O> && !accumulate)) {
      return make(accumulate, total);
    }
    make(false, sum_);
    const auto rows = of_rows ? x_.q.rows : this->all_cols_;
    add_sum(accumulate, total, sum_, rows * cols);
  }

  Matrix<const S> kept(Matrix<const S> x) const {
    x.rows = std::min(x.rows, x_.k.rows);
    return x;
  }

  T* sum_;
  int64_t scores_tangent_at_, attn_tangent_at_;
  Matrix<const S> q_tangent_{}, k_tangent_{}, v_tangent_{};
  Own scores_tangent_{}, attn_tangent_{};
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
