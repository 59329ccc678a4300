#pragma once

#include <ATen/native/cpu/AttnScores.h>

#include <array>

namespace at::native {
inline namespace CPU_CAPABILITY {

// The forward of a task by FMA. See Note [Tiles of attn].
template <typename S>
class FmaForward {
 public:
  using T = at::opmath_type<S>;
  static constexpr int64_t ROW_STEP = AttnFma<T>::MR;
  static constexpr bool any_width = true;

  // Of scratch memory, in elements of T.
  struct Layout {
    int64_t chunk; // rows of the tile
    bool few_rows; // of attn
    bool all_of_v; // is packed at once
    ScratchLayout scratch;
    typename AttnScores<S>::Layout scores;
    int64_t tile, v_panels, acc, size;

    // Of all m rows some are a task's.
    Layout(int64_t rows, int64_t m, int64_t n, int64_t d, int64_t e)
        : chunk(
              std::min(
                  at::round_up(rows, MR),
                  std::max(d, e) <= PACKED ? MC : ROWS)),
          few_rows(m <= MR / 2),
          all_of_v(e <= PACKED),
          scores(scratch, m, chunk, std::min(n, ATTN_BLOCK), d, true, 0) {
      n = std::min(n, ATTN_BLOCK);
      tile = scratch.add(tile_size<T>(chunk, n));
      v_panels = scratch.add(Fma::packed_size(n, all_of_v ? e : ATTN_BLOCK));
      acc = scratch.add(
          std::is_same_v<T, S> && !few_rows ? 0
                                            : chunk * std::min(ATTN_BLOCK, e));
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
      bool first,
      const Matrix<const S>& q,
      const Matrix<const S>& k,
      const Matrix<const S>& v,
      const Matrix<S>& attn,
      bool stream,
      O* out) {
    ld_ = tile_ld<T>(k.rows, q.cols);
    for (int64_t i = 0; i < q.rows; i += layout_.chunk) {
      const auto rows = std::min(layout_.chunk, q.rows - i);
      clear_edges(tile_, rows, attn.cols, ld_);
      scores_.product(i > 0, q.block(i, 0, rows, q.cols), k, tile_, ld_);
      finish(attn.block(i, 0, rows, attn.cols), stream);
      add_output(first, i == 0, rows, q.rows, v, out + i * v.cols);
    }
  }

  // out (+)= attn v, of an attn that was made before
  void output(
      bool first,
      const Matrix<const S>& attn,
      const Matrix<const S>& v,
      T* out) {
    ld_ = tile_ld<T>(attn.cols, 0);
    for (int64_t i = 0; i < attn.rows; i += layout_.chunk) {
      const auto rows = std::min(layout_.chunk, attn.rows - i);
      copy_rows(tile_, ld_, attn.block(i, 0, rows, attn.cols));
      clear_edges(tile_, rows, attn.cols, ld_);
      add_output(first, i == 0, rows, attn.rows, v, out + i * v.cols);
    }
  }

 private:
  using Fma = AttnFma<T>;
  static constexpr auto MR = Fma::MR;
  static constexpr int64_t MC = 96;
  static_assert(MC % MR == 0);
  // If k or v are too wide to be packed at once, their parts are packed anew
  // for each so many rows.
  static constexpr int64_t ROWS = 4 * MC;
  static constexpr int64_t PACKED = 1024;

  // attn = tile = tanh(tile)
  void finish(const Matrix<S>& attn, bool stream) {
    const bool flat = attn.cols == ld_ && attn.row_stride == ld_;
    const auto rows = flat ? 1 : attn.rows;
    const auto cols = flat ? attn.rows * ld_ : attn.cols;
    for (const auto i : c10::irange(rows)) {
      S* dst = attn.data + i * attn.row_stride;
      T* tile = tile_ + i * ld_;
      for (int64_t j = 0; j < cols; j += pair_size<T>) {
        const auto x = attn_tanh_for<S>(load<T>(tile + j), cols - j);
        store(dst + j, x, cols - j, stream);
        store(tile + j, round_to<S>(x), cols - j);
      }
    }
  }

  // out (+)= tile v, for some of so many rows
  template <typename O>
  void add_output(
      bool first,
      bool pack,
      int64_t rows,
      int64_t all_rows,
      const Matrix<const S>& v,
      O* out) {
    const bool all = layout_.all_of_v;
    for (int64_t p = 0; p < v.cols; p += ATTN_BLOCK) {
      const auto cols = std::min(ATTN_BLOCK, v.cols - p);
      auto& right = v_right_[all ? p / ATTN_BLOCK : 0];
      if (pack || !all) {
        right = Fma::right(
            v_panels_ + (all ? p * v.rows : 0),
            v.block(0, p, v.rows, cols),
            all_rows,
            layout_.few_rows);
      }
      Fma::product_by(
          acc_, first, rows, cols, {tile_, ld_}, right, out + p, v.cols);
    }
  }

  Layout layout_;
  AttnScores<S> scores_;
  T *tile_, *v_panels_, *acc_;
  int64_t ld_ = 0;
  std::array<typename Fma::Right, PACKED / ATTN_BLOCK + 1> v_right_{};
};

} // namespace CPU_CAPABILITY
} // namespace at::native
