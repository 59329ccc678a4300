#pragma once

#include <ATen/native/cpu/AttnForward.h>
#include <ATen/native/cpu/AttnScores.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Computes the forward of a task by FMA. See Note [Tiles of attn].
template <typename S>
class FmaForward {
 public:
  using T = at::opmath_type<S>;
  static constexpr int64_t ROW_STEP = FmaProducts<T>::MR;

  // Offsets in the scratch memory, in elements of T.
  struct Layout {
    int64_t chunk; // rows of the tile
    ScratchLayout scratch;
    typename Scores<S>::Layout scores;
    int64_t tile, v_panels, acc, size;

    // A task has `rows` of the m rows.
    Layout(int64_t rows, int64_t m, int64_t n, int64_t d, int64_t e)
        : chunk(std::min(at::round_up(rows, MR), MC)),
          scores(scratch, m, chunk, std::min(n, NC), d, true, 0) {
      n = std::min(n, NC);
      tile = scratch.add(tile_size<T>(chunk, n));
      v_panels = scratch.add(Fma::packed_size(n, e));
      acc = scratch.add(std::is_same_v<T, S> ? 0 : Fma::sums_size(e));
      size = scratch.size();
    }
  };

  FmaForward(const Layout& layout, T* scratch)
      : layout_(layout),
        scores_(layout.scores, scratch),
        tile_(scratch + layout.tile),
        v_panels_(scratch + layout.v_panels),
        acc_(scratch + layout.acc) {}

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
    bool next = false;
    for (int64_t i = 0; i < q.rows; i += layout_.chunk) {
      const auto rows = std::min(layout_.chunk, q.rows - i);
      const auto chunk_form = form.block(i, 0);
      if (chunk_form.kept(rows - 1, k.rows) == 0) {
        std::fill_n(out + i * v.cols, accumulate ? 0 : rows * v.cols, O(0));
        continue;
      }
      const auto attn_rows = attn.block(i, 0, rows, attn.cols);
      ld_ = tile_ld<T>(k.rows);
      clear_edges(tile_, rows, k.rows, ld_);
      scores_.product(next, q.block(i, 0, rows, q.cols), k, tile_, ld_);
      make_attn<S>(
          rows, k.rows, chunk_form, false, tile_, ld_, attn_rows, stream);
      add_output(accumulate, !next, rows, q.rows, v, out + i * v.cols);
      next = true;
    }
  }

 private:
  using Fma = FmaProducts<T>;
  static constexpr auto MR = Fma::MR;
  static constexpr int64_t MC = 96; // 48 and 192 take as long (Zen 5)
  static_assert(MC % MR == 0);

  // out (+)= tile v, for `rows` of the task's `all_rows` rows
  template <typename O>
  void add_output(
      bool accumulate,
      bool pack,
      int64_t rows,
      int64_t all_rows,
      const Matrix<const S>& v,
      O* out) {
    const typename Fma::Left tile{tile_, ld_};
    if (Fma::product_in_place(acc_, accumulate, rows, tile, v, out, v.cols)) {
      return;
    }
    if (pack) {
      v_right_ = Fma::right(v_panels_, v, all_rows);
    }
    Fma::product_by(
        acc_, accumulate, rows, v.cols, tile, v_right_, out, v.cols);
  }

  Layout layout_;
  Scores<S> scores_;
  T *tile_, *v_panels_, *acc_;
  int64_t ld_ = 0;
  typename Fma::Right v_right_{};
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
