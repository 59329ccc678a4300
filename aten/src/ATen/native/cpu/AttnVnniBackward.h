#pragma once

#include <ATen/native/cpu/AttnMaskedOperand.h>
#include <ATen/native/cpu/AttnVnni.h>

#if defined(CPU_CAPABILITY_AVX512)

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Computes the backward of a tile by VnniProducts.
template <typename Micro>
class VnniBackward {
 public:
  using T = float;
  using S = typename Micro::Element;
  static constexpr int64_t ROW_STEP = 32;
  static constexpr int64_t LONGEST = 1;
  // brgemm is twice as fast as FMA, so a task needs a larger tile: with 96 rows
  // and columns the backward of 384 x 384, d = 64, takes a sixth longer.
  static constexpr int64_t MIN_TILE = 192;

  // Offsets in the scratch memory, in elements of T, for tiles of at most
  // `rows` rows and `cols` columns of attn.
  struct Layout {
    ScratchLayout scratch;
    int64_t acc, left, right, tile, attn, size;

    Layout(const BackwardArgs<S>& args, int64_t rows, int64_t cols) {
      const auto width = std::max(args.sizes.d, args.sizes.e);
      acc = scratch.add(MC * BRGEMM_LD);
      left = scratch.add(
          std::max(
              Products::left_size(rows, width),
              Products::left_size(cols, rows)));
      right = scratch.add(
          std::max(
              Products::right_size(width, cols),
              Products::right_size(std::max(rows, cols), width)));
      tile = scratch.add(Products::left_size(rows, cols));
      attn = scratch.add(args.attn ? 0 : Products::left_size(rows, cols));
      size = scratch.size();
    }
  };

  VnniBackward(const Layout& layout, T* scratch)
      : acc_(scratch + layout.acc),
        left_(reinterpret_cast<S*>(scratch + layout.left)),
        right_(reinterpret_cast<S*>(scratch + layout.right)),
        tile_{reinterpret_cast<S*>(scratch + layout.tile), 0, 0},
        attn_{reinterpret_cast<S*>(scratch + layout.attn), 0, 0} {}

  void start(const Tile<S>& matrices, bool with_scores) {
    matrices_ = matrices;
    if (matrices.attn.data == nullptr) {
      make_attn();
    }
    if (!with_scores) {
      return;
    }
    const auto& [q, k, v, attn, grad_output, grad_attn, form] = matrices_;
    tile_ = {tile_.data, attn.rows, attn.cols};
    if (grad_output.data == nullptr) {
      return finish_rows<false>(0, attn.rows);
    }
    const auto a = Products::left(left_, grad_output);
    const auto b = Products::columns(right_, v);
    for (int64_t row = 0; row < attn.rows; row += MC) {
      Products::multiply(a, row, b, acc_);
      finish_rows<true>(row, std::min(attn.rows, row + MC));
    }
  }

  // Adds to one of BackwardArgs' gradients: S̄ k, S̄ᵀ q or attnᵀ grad_output.
  template <typename O>
  void add(size_t gradient, bool accumulate, O* total) {
    const auto& [q, k, v, attn, grad_output, grad_attn, form] = matrices_;
    const auto tile = gradient == 2 ? attn : matrix(tile_);
    const auto& x = gradient == 0 ? k : gradient == 1 ? q : grad_output;
    add_product(accumulate, gradient == 0, tile, x, total);
  }

 protected:
  using Products = VnniProducts<Micro>;
  using Left = typename Products::Left;
  using Vec = typename Products::Vec;
  static constexpr auto MC = Products::MC, W = Products::W;
  static constexpr int64_t AHEAD = 6; // lines are prefetched 6 rows ahead

  // attn = tanh(scale q kᵀ), or 0 where it is masked: with the forward's bits
  void make_attn() {
    const auto& [q, k, v, attn, grad_output, grad_attn, form] = matrices_;
    const auto a = Products::left(left_, q);
    const auto b = Products::columns(right_, k);
    attn_ = {attn_.data, q.rows, k.rows};
    for (int64_t row = 0; row < q.rows; row += MC) {
      Products::multiply(a, row, b, acc_);
      for (auto i = row; i < std::min(q.rows, row + MC); ++i) {
        const T* scores = acc_ + (i - row) * BRGEMM_LD;
        Products::for_vectors(
            k.rows,
            [&](int64_t col, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
              const auto x = Products::attn_of(scores + col, count, form);
              x.store(attn_.at(i, col));
            });
        mask_row(attn_.at(i, 0), i, k.rows, form, false);
      }
    }
    matrices_.attn = {attn_.data, q.rows, k.rows, attn_.row_stride, 1};
  }

  static Matrix<const S> matrix(const Left& tile) {
    return {tile.data, tile.rows, tile.cols, tile.row_stride, 1};
  }

  // total (+)= a x, or aᵀ x, where a is a tile
  template <typename O>
  void add_product(
      bool accumulate,
      bool of_rows,
      const Matrix<const S>& a,
      const Matrix<const S>& x,
      O* total) {
    const auto b = of_rows ? a : a.t();
    const auto left = of_rows ? Left{const_cast<S*>(a.data), a.rows, a.cols}
                              : Products::left(left_, b);
    const MaskedOperand<S> operand(x, b.rows, matrices_.form, !of_rows);
    const auto right = Products::right(right_, operand.finite());
    Products::add_product(accumulate, left, right, acc_, total);
    operand.add_rest(b, matrices_.form, total);
  }

  // Computes rows of the tile; if there is a product, at most MC of it in acc_.
  template <bool has_product>
  void finish_rows(int64_t begin, int64_t end) {
    const auto& attn = matrices_.attn;
    const auto& grad_attn = matrices_.grad_attn;
    const Pair<T> scale(static_cast<T>(matrices_.form.scale));
    for (int64_t i = begin; i < end; ++i) {
      // Rows of attn are far apart in memory.
      const S* ahead = attn.data + (i + AHEAD) * attn.row_stride;
      for (int64_t col = 0; i + AHEAD < attn.rows && col < attn.cols;
           col += W) {
        prefetch_line(ahead + col);
      }
      Products::for_vectors(
          attn.cols,
          [&](int64_t col, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
            Pair<T> sum(0);
            if constexpr (has_product) {
              sum = load<T>(acc_ + (i - begin) * BRGEMM_LD + col, count);
            }
            if (grad_attn.data != nullptr) {
              sum =
                  sum + as_float(Products::load_row(grad_attn, i, col, count));
            }
            const auto y = as_float(Products::load_row(attn, i, col, count));
            Micro::round(tanh_backward(sum, y) * scale).store(tile_.at(i, col));
          });
      mask_row(tile_.at(i, 0), i, attn.cols, matrices_.form, false);
    }
  }

  static Pair<T> as_float(const Vec& x) {
    auto [lo, hi] = vec::convert_to_float<S>(x);
    return {lo, hi};
  }

  T* acc_;
  S *left_, *right_;
  Left tile_, attn_;
  Tile<S> matrices_{};
  typename Micro::Context context_;
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu

#endif
