#pragma once

#include <ATen/native/cpu/AttnBackwardArgs.h>
#include <ATen/native/cpu/AttnMaskedOperand.h>
#include <ATen/native/cpu/AttnSchedule.h>
#include <ATen/native/cpu/AttnTile.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Computes the backward of a tile. See Note [Tiles of attn].
template <typename Tiles>
class BackwardTile {
 public:
  using S = typename Tiles::S;
  using T = typename Tiles::T;
  static constexpr int64_t ROW_STEP = Tiles::ROW_STEP, LONGEST = Tiles::LONGEST,
                           MIN_TILE = Tiles::MIN_TILE;

  // Offsets in the scratch memory, in elements of T, for tiles of at most
  // `rows` rows and `cols` columns of attn.
  struct Layout {
    ScratchLayout scratch;
    typename Tiles::Layout tiles;
    int64_t scores, attn, grad_attn, size;

    Layout(
        const BackwardArgs<S>& args,
        int64_t rows,
        int64_t cols,
        Use use = Use::once)
        : tiles(
              scratch,
              {args.sizes.m,
               args.sizes.n,
               rows,
               cols,
               args.sizes.d,
               args.sizes.e},
              use) {
      const auto tile_if = [&](bool needed) {
        return scratch.add(needed ? tiles.tile_size : 0);
      };
      scores = tile_if(true);
      attn = tile_if(Tiles::COPIES || !args.attn);
      grad_attn = tile_if(Tiles::COPIES && args.grad_attn);
      size = scratch.size();
    }
  };

  BackwardTile(const Layout& layout, T* scratch)
      : tiles_(layout.tiles, scratch), layout_(layout), scratch_(scratch) {}

  // Makes attn and, if `with_scores`, S̄ = scale (grad_output vᵀ + grad_attn)
  // (1 - attn²), which is 0 where attn is masked.
  void start(const Tile<S>& inputs, bool with_scores) {
    x_ = inputs;
    all_cols_ = x_.k.rows;
    const auto kept = x_.form.kept(x_.q.rows - 1, all_cols_);
    x_.k.rows = x_.v.rows = kept; // the rest are masked in all rows
    x_.attn.cols = x_.grad_attn.cols = kept;
    scores_ = tile_at(layout_.scores);
    attn_ =
        x_.attn.data != nullptr
            ? tiles_.given(scratch_ + layout_.attn, x_.attn)
            : make_attn(
                  tiles_, false, x_.q, x_.k, x_.form, tile_at(layout_.attn));
    if (!with_scores) {
      return;
    }
    const bool has_grad = x_.grad_attn.data != nullptr;
    Matrix<const E> grad_attn{};
    if (has_grad) {
      grad_attn = tiles_.given(scratch_ + layout_.grad_attn, x_.grad_attn);
    }
    const Pair<T> scale(static_cast<T>(x_.form.scale));
    tiles_.scores(
        x_.grad_output,
        x_.v,
        scores_,
        [&, attn = attn_, scores = scores_](
            int64_t i, int64_t j, int64_t count, Pair<T> sum)
            C10_ALWAYS_INLINE_ATTRIBUTE {
              if (has_grad) {
                sum = sum + Tiles::load(grad_attn, i, j, count);
              }
              const auto y = Tiles::load(attn, i, j, count);
              Tiles::store(scores, i, j, tanh_backward(sum, y) * scale);
            });
    mask(scores_);
  }

  // Adds to one of BackwardArgs' gradients: S̄ k, S̄ᵀ q or attnᵀ grad_output.
  template <typename O>
  void add(size_t gradient, bool accumulate, O* total) {
    if (gradient == 0) {
      add_product(accumulate, true, scores_, x_.k, total);
    } else if (gradient == 1) {
      add_product(accumulate, false, scores_, x_.q, total);
    } else {
      add_product(accumulate, false, attn_, x_.grad_output, total);
    }
  }

 protected:
  using Own = typename Tiles::Tile;
  using E = std::remove_pointer_t<decltype(Own::data)>;

  Own tile_at(int64_t offset) const {
    return tiles_.tile(scratch_ + offset, x_.q.rows, x_.k.rows);
  }
  void mask(const Own& tile) const {
    mask_tile(tile, x_.form, tiles_.transposed());
  }

  // total (+)= tile x, or tileᵀ x, whose rows that belong to masked columns are
  // zero
  template <typename O>
  void add_product(
      bool accumulate,
      bool of_rows,
      const Matrix<const E>& tile,
      const Matrix<const S>& x,
      O* total) {
    const auto rows = of_rows ? x_.q.rows : x_.k.rows;
    const MaskedOperand<S> operand(x, rows, x_.form, !of_rows);
    tiles_.add(false, accumulate, of_rows, tile, operand.finite(), rows, total);
    const auto in_rows = tiles_.rows_of(tile);
    operand.add_rest(of_rows ? in_rows : in_rows.t(), x_.form, total);
    if (!of_rows && !accumulate) {
      std::fill_n(total + rows * x.cols, (all_cols_ - rows) * x.cols, O(0));
    }
  }

  Tiles tiles_;
  const Layout& layout_;
  T* scratch_;
  Tile<S> x_{}; // k, v and attn up to the last column that is not masked
  int64_t all_cols_ = 0;
  Own scores_{};
  Matrix<const E> attn_{};
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
