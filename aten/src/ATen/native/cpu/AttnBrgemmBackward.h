#pragma once

#include <ATen/native/cpu/AttnBrgemm.h>

#if defined(CPU_CAPABILITY_AVX512)

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Computes the backward of a tile by brgemm. grad_k and grad_v are computed
// transposed, so that the tile, as the right operand, need not be.
template <typename S>
class BrgemmBackward {
 public:
  using T = float;
  static constexpr int64_t ROW_STEP = 32;
  static constexpr int64_t LONGEST = 1;
  // brgemm multiplies twice as fast as FMA, so a task needs a larger tile: with
  // 96 rows and columns the backward of 384 x 384, d = 64, takes a sixth
  // longer.
  static constexpr int64_t MIN_TILE = 192;
  static constexpr bool sums_columns = true;

  // Offsets in the scratch memory, in elements of T, for tiles of at most
  // `tile_rows` rows and `cols` columns.
  struct Layout {
    int64_t acc, k_vnni, v_vnni, rows, q_transposed, grad_output_transposed;
    int64_t tile, tile_vnni, attn_vnni, size;

    Layout(int64_t tile_rows, int64_t cols, int64_t d, int64_t e) {
      ScratchLayout layout;
      acc = layout.add(MC * BRGEMM_LD);
      k_vnni = layout.add(Brgemm::right_size(cols, d));
      v_vnni = layout.add(Brgemm::right_size(e, cols));
      rows = layout.add(Brgemm::left_size(tile_rows, e));
      q_transposed = layout.add(Brgemm::left_size(d, tile_rows));
      grad_output_transposed = layout.add(Brgemm::left_size(e, tile_rows));
      tile = layout.add(Brgemm::left_size(tile_rows, cols));
      tile_vnni = layout.add(Brgemm::right_size(tile_rows, cols));
      attn_vnni = layout.add(Brgemm::right_size(tile_rows, cols));
      size = layout.size();
    }
  };

  BrgemmBackward(const Layout& layout, T* scratch)
      : acc_(scratch + layout.acc),
        k_vnni_(reinterpret_cast<S*>(scratch + layout.k_vnni)),
        v_vnni_(reinterpret_cast<S*>(scratch + layout.v_vnni)),
        rows_(reinterpret_cast<S*>(scratch + layout.rows)),
        q_transposed_(reinterpret_cast<S*>(scratch + layout.q_transposed)),
        grad_output_transposed_(
            reinterpret_cast<S*>(scratch + layout.grad_output_transposed)),
        tile_{reinterpret_cast<S*>(scratch + layout.tile)},
        tile_vnni_{reinterpret_cast<S*>(scratch + layout.tile_vnni)},
        attn_vnni_{reinterpret_cast<S*>(scratch + layout.attn_vnni)} {}

  void start(const Tile<S>& matrices, bool with_scores) {
    const auto& [q, k, v, attn, grad_output, grad_attn] = matrices;
    k_ = k;
    q_ = Brgemm::left(q_transposed_, q.t());
    if (grad_output.data != nullptr) {
      grad_output_t_ = Brgemm::left(grad_output_transposed_, grad_output.t());
    }
    for (auto* x : {&tile_vnni_, &attn_vnni_}) {
      *x = {x->data, attn.rows, attn.cols};
      x->clear_after();
    }
    tile_ = {tile_.data, attn.rows, attn.cols};
    const bool has_product = with_scores && grad_output.data != nullptr;
    typename Brgemm::Left a{};
    typename Brgemm::Right b{};
    if (has_product) {
      a = Brgemm::left(rows_, grad_output);
      b = Brgemm::right(v_vnni_, v.t());
    }
    for (int64_t row = 0; row < attn.rows; row += MC) {
      if (has_product) {
        Brgemm::multiply(a, row, b, acc_);
        finish_rows<true, true>(row, grad_attn, attn);
      } else if (with_scores) {
        finish_rows<true, false>(row, grad_attn, attn);
      } else {
        finish_rows<false, false>(row, grad_attn, attn);
      }
    }
  }

  template <typename O>
  void add_grad_q(bool accumulate, O* total) {
    const auto keys = Brgemm::right(k_vnni_, k_);
    Brgemm::add_product(accumulate, tile_, keys, acc_, total);
  }
  void add_grad_k(bool accumulate, T* total) {
    Brgemm::add_product(accumulate, q_, tile_vnni_, acc_, total);
  }
  void add_grad_v(bool accumulate, T* total) {
    Brgemm::add_product(accumulate, grad_output_t_, attn_vnni_, acc_, total);
  }
  // dst = totalᵀ
  static void finish_block(const Matrix<S>& dst, const T* total) {
    alignas(64) S block[W * W];
    Brgemm::for_blocks(
        dst.rows,
        dst.cols,
        [&](int64_t i, int64_t j, int64_t rows, int64_t cols) {
          for (int64_t r = 0; r < rows; ++r) {
            prefetch_line(dst.data + (i + r) * dst.cols + j + 2 * W);
          }
          for (const auto c : c10::irange(cols)) {
            const T* row = total + (j + c) * dst.rows + i;
            store(block + c * W, load<T>(row, rows));
          }
          vec::transpose_mxn<S>(
              block,
              W,
              dst.data + i * dst.cols + j,
              dst.cols,
              static_cast<int>(cols),
              static_cast<int>(rows));
        });
  }

 private:
  using Brgemm = BrgemmProducts<S>;
  using Vec = typename Brgemm::Vec;
  static constexpr auto MC = Brgemm::MC, W = Brgemm::W;
  static constexpr int64_t AHEAD = 6; // lines are prefetched 6 rows ahead

  // Computes at most MC rows of the tiles, from the product in acc_ if any.
  template <bool with_scores, bool has_product>
  void finish_rows(
      int64_t begin,
      const Matrix<const S>& grad_attn,
      const Matrix<const S>& attn) {
    const auto end = std::min(attn.rows, begin + MC);
    for (int64_t row = begin; row < end; row += 2) {
      // Rows of attn are far apart in memory.
      for (const auto i : {row + AHEAD, row + AHEAD + 1}) {
        const S* p = attn.data + i * attn.row_stride;
        for (int64_t col = 0; i < attn.rows && col < attn.cols; col += W) {
          prefetch_line(p + col);
        }
      }
      const bool odd = row + 1 < attn.rows; // else the second row is zeros
      Brgemm::for_vectors(
          attn.cols,
          [&](int64_t col, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
            const auto gradient =
                [&](int64_t i, const Vec& y) C10_ALWAYS_INLINE_ATTRIBUTE {
                  Pair<T> sum(0);
                  if constexpr (has_product) {
                    sum = load<T>(acc_ + (i - begin) * BRGEMM_LD + col, count);
                  }
                  if (grad_attn.data != nullptr) {
                    sum = sum + Brgemm::as_float(
                                    Brgemm::load_row(grad_attn, i, col, count));
                  }
                  sum = tanh_backward(sum, Brgemm::as_float(y));
                  const Vec x = round_pair<S>(sum);
                  x.store(tile_.at(i, col));
                  return x;
                };
            const Vec y = Brgemm::load_row(attn, row, col, count);
            const Vec y_odd =
                odd ? Brgemm::load_row(attn, row + 1, col, count) : Vec(0);
            Brgemm::store_vnni(attn_vnni_.at(row, col), y, y_odd);
            if constexpr (with_scores) {
              const Vec x = gradient(row, y);
              const Vec x_odd = odd ? gradient(row + 1, y_odd) : Vec(0);
              Brgemm::store_vnni(tile_vnni_.at(row, col), x, x_odd);
            }
          });
    }
  }

  T* acc_;
  S *k_vnni_, *v_vnni_, *rows_, *q_transposed_, *grad_output_transposed_;
  Matrix<const S> k_{};
  typename Brgemm::Left q_{}, grad_output_t_{}, tile_;
  typename Brgemm::Right tile_vnni_, attn_vnni_;
  BrgemmContext context_;
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu

#endif
