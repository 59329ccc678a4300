#pragma once

#include <ATen/native/cpu/AttnFewColumns.h>
#include <ATen/native/cpu/AttnForward.h>
#include <ATen/native/cpu/AttnMaskedOperand.h>
#include <ATen/native/cpu/AttnOneRow.h>
#include <ATen/native/cpu/AttnScores.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Computes the forward of a task by FMA. See Note [Tiles of attn]. If attn has
// few columns, the tile is transposed, so that its vectors are full.
template <typename S>
class FmaForward {
 public:
  using T = at::opmath_type<S>;
  using Few = FewColumns<T>;
  static constexpr int64_t ROW_STEP = FmaProducts<T>::MR;

  // Offsets in the scratch memory, in elements of T.
  struct Layout {
    bool transposed; // whether the tile is
    int64_t chunk;   // the rows of attn in a tile
    ScratchLayout scratch;
    typename Scores<S>::Layout scores;
    typename Few::Layout few;
    int64_t tile, v_panels, acc, attn, size;

    // A task has `rows` of the m rows.
    Layout(int64_t rows, int64_t m, int64_t n, int64_t d, int64_t e)
        : transposed(Few::fits(n) && m > n),
          chunk(std::min(at::round_up(rows, MR), transposed ? NC : MC)),
          scores(
              transposed ? typename Scores<S>::Layout(
                               scratch, n, n, std::min(m, NC), d, false, 0)
                         : typename Scores<S>::Layout(
                               scratch, m, chunk, std::min(n, NC), d, true, 0)),
          few(scratch, std::max(chunk, std::min(n, NC))) {
      n = std::min(n, NC);
      tile = scratch.add(
          transposed ? tile_size<T>(n, chunk) : tile_size<T>(chunk, n));
      v_panels = scratch.add(Fma::packed_size(n, e));
      acc = scratch.add(Fma::sums_size(e));
      attn = scratch.add(transposed ? chunk * n : 0);
      size = scratch.size();
    }
  };

  FmaForward(const Layout& layout, T* scratch)
      : layout_(layout),
        scores_(layout.scores, scratch),
        few_(layout.few, scratch),
        tile_(scratch + layout.tile),
        v_panels_(scratch + layout.v_panels),
        acc_(scratch + layout.acc),
        attn_(scratch + layout.attn) {}

  template <typename O>
  void forward(
      bool accumulate,
      const Matrix<const S>& q,
      const Matrix<const S>& k,
      const Matrix<const S>& v,
      const Matrix<S>& attn,
      const Form& form,
      bool stream,
      O* out) {
    const MaskedOperand<S> values(v, q.rows, form, false);
    bool next = false;
    for (int64_t i = 0; i < q.rows; i += layout_.chunk) {
      const auto rows = std::min(layout_.chunk, q.rows - i);
      const auto chunk_form = form.block(i, 0);
      if (chunk_form.kept(rows - 1, k.rows) == 0) {
        std::fill_n(out + i * v.cols, accumulate ? 0 : rows * v.cols, O(0));
        continue;
      }
      const auto q_rows = q.block(i, 0, rows, q.cols);
      const auto attn_rows = attn.block(i, 0, rows, attn.cols);
      if (layout_.transposed) {
        make_scores(false, k, q_rows);
        make_attn<S>(k.rows, rows, chunk_form, true, tile_, ld_);
        store_transposed(attn_rows);
      } else {
        make_scores(next, q_rows, k);
        make_attn<S>(
            rows, k.rows, chunk_form, false, tile_, ld_, attn_rows, stream);
      }
      const typename Fma::Left left{tile_, ld_, layout_.transposed};
      O* sums = out + i * v.cols;
      add_output(accumulate, !next, rows, q.rows, left, values.finite(), sums);
      values.add_rest(left.matrix(rows, v.rows), chunk_form, sums);
      next = true;
    }
  }

 private:
  using Fma = FmaProducts<T>;
  static constexpr auto MR = Fma::MR;
  static constexpr int64_t MC = 96; // 48 and 192 take as long (Zen 5)
  static_assert(MC % MR == 0);

  // tile = a bᵀ. If `next`, b is the same as for the last tile.
  void make_scores(
      bool next, const Matrix<const S>& a, const Matrix<const S>& b) {
    ld_ = tile_ld<T>(b.rows);
    clear_edges(tile_, a.rows, b.rows, ld_);
    scores_.product(next, a, b, tile_, ld_);
  }

  // attn = tileᵀ, if attn is stored
  void store_transposed(const Matrix<S>& attn) {
    if (attn.data == nullptr) {
      return;
    }
    const auto rows = attn.rows, cols = attn.cols;
    const T* result = tile_;
    if (cols > 1) {
      transpose(tile_, ld_, attn_, cols, cols, rows);
      result = attn_;
    }
    convert(attn.data, result, rows * cols);
  }

  // out (+)= attn v, for `rows` of the task's `all_rows` rows
  template <typename O>
  void add_output(
      bool accumulate,
      bool pack,
      int64_t rows,
      int64_t all_rows,
      const typename Fma::Left& attn,
      const Matrix<const S>& v,
      O* out) {
    if (Few::fits(v.cols)) {
      few_.product(accumulate, rows, attn, v, out);
      return;
    }
    if (all_rows == 1 &&
        product_of_row(v_panels_, acc_, accumulate, attn, v, out)) {
      return;
    }
    if (Fma::product_in_place(acc_, accumulate, rows, attn, v, out, v.cols)) {
      return;
    }
    if (pack) {
      v_right_ = Fma::right(v_panels_, v, all_rows);
    }
    Fma::product_by(
        acc_, accumulate, rows, v.cols, attn, v_right_, out, v.cols);
  }

  Layout layout_;
  Scores<S> scores_;
  Few few_;
  T *tile_, *v_panels_, *acc_, *attn_;
  int64_t ld_ = 0;
  typename Fma::Right v_right_{};
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
