#pragma once

#include <ATen/native/cpu/AttnFewColumns.h>
#include <ATen/native/cpu/AttnOneRow.h>
#include <ATen/native/cpu/AttnScores.h>
#include <ATen/native/cpu/AttnTile.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Tiles in the precision T of sums, and their products by FMA, for any shape.
// See Note [Tiles of attn]. If attn has few columns, tiles are transposed, so
// that their vectors are full.
template <typename S_>
class FmaTiles {
 public:
  using S = S_;
  using T = at::opmath_type<S>;
  using Tile = Matrix<T>;
  static constexpr int64_t ROW_STEP = FmaProducts<T>::MR;
  static constexpr int64_t LONGEST = 8;
  // With 48 rows, packing and adding for each tile take up to a third of the
  // time (96 x 96, d = 300).
  static constexpr int64_t MIN_TILE = 96;
  static constexpr bool COPIES = true;

  // Offsets in the scratch memory, in elements of T.
  struct Layout {
    TileShape shape;
    bool transposed, repeated;
    int64_t tile_size;
    typename FewColumns<T>::Layout few;
    typename Scores<S>::Layout scores;
    int64_t panels, sums, copy;

    Layout(ScratchLayout& scratch, const TileShape& x, Use use)
        : shape(x),
          transposed(is_transposed(x.m, x.n)),
          repeated(use == Use::repeated),
          tile_size(
              transposed ? attn_cpu::tile_size<T>(x.cols, x.rows)
                         : attn_cpu::tile_size<T>(x.rows, x.cols)),
          few(scratch, std::max(x.rows, x.cols)),
          scores(
              scratch,
              transposed ? x.n : x.m,
              transposed ? x.cols : x.rows,
              transposed ? x.rows : x.cols,
              repeated ? x.d : std::max(x.d, x.e),
              repeated && !transposed,
              repeated ? 0 : panels_size(x)) {
      panels = repeated ? scratch.add(panels_size(x)) : scores.panels;
      sums = scratch.add(Fma::sums_size(std::min(NC, std::max(x.d, x.e))));
      copy = scratch.add(repeated && transposed ? x.rows * x.cols : 0);
    }

   private:
    // of the right operand of `add`
    int64_t panels_size(const TileShape& x) const {
      return repeated ? Fma::packed_size(x.cols, x.e)
                      : Fma::packed_size(
                            std::max(x.rows, x.cols),
                            std::min(NC, std::max(x.d, x.e)));
    }
  };

  FmaTiles(const Layout& layout, T* scratch)
      : layout_(layout),
        few_(layout.few, scratch),
        scores_(layout.scores, scratch),
        panels_(scratch + layout.panels),
        sums_(scratch + layout.sums),
        copy_(scratch + layout.copy) {}

  // Returns the most rows of a tile of the forward, whose task has `rows` rows.
  static int64_t forward_rows(int64_t rows, int64_t m, int64_t n) {
    constexpr int64_t MC = 96; // 48 and 192 take as long (Zen 5)
    static_assert(MC % Fma::MR == 0);
    const auto most = is_transposed(m, n) ? NC : MC;
    return std::min(at::round_up(rows, Fma::MR), most);
  }
  bool transposed() const {
    return layout_.transposed;
  }

  Tile tile(T* memory, int64_t rows, int64_t cols) const {
    const auto in_row = transposed() ? rows : cols;
    const auto all = transposed() ? cols : rows;
    return {memory, all, in_row, tile_ld<T>(in_row), 1};
  }
  // Returns a tile, which may be transposed, as a block of attn.
  Matrix<const T> rows_of(const Matrix<const T>& tile) const {
    return transposed() ? tile.t() : tile;
  }
  // Returns a copy of x as a tile.
  Matrix<const T> given(T* memory, const Matrix<const S>& x) const {
    const auto to = tile(memory, x.rows, x.cols);
    copy_rows(memory, to.row_stride, transposed() ? x.t() : x);
    clear_edges(memory, to.rows, to.cols, to.row_stride);
    return to;
  }

  static C10_ALWAYS_INLINE Pair<T> load(
      const Matrix<const T>& tile, int64_t i, int64_t j, int64_t count) {
    return attn_cpu::load<T>(tile.data + i * tile.row_stride + j, count);
  }
  // Whole vectors are stored: rows have a gap after them.
  static C10_ALWAYS_INLINE void store(
      const Tile& tile, int64_t i, int64_t j, const Pair<T>& x) {
    attn_cpu::store(tile.data + i * tile.row_stride + j, x);
  }

  // tile = a bᵀ. If `next`, b is the same as in the last product.
  void multiply(
      bool next,
      const Matrix<const S>& a,
      const Matrix<const S>& b,
      const Tile& tile) {
    clear_edges(tile.data, tile.rows, tile.cols, tile.row_stride);
    scores_.product(
        next && !transposed(),
        transposed() ? b : a,
        transposed() ? a : b,
        tile.data,
        tile.row_stride);
  }

  // Replaces x of a tile by fn(count, x), and stores that as `stored` too.
  template <typename F>
  void map(
      const Tile& tile, const Matrix<S>& stored, bool stream, const F& fn) {
    const bool stores = stored.data != nullptr && !transposed();
    for (const auto i : c10::irange(tile.rows)) {
      T* row = tile.data + i * tile.row_stride;
      S* to = stored.data + i * stored.row_stride;
      for (int64_t j = 0; j < tile.cols; j += pair_size<T>) {
        const auto count = tile.cols - j;
        const auto x = fn(count, attn_cpu::load<T>(row + j, count));
        if (stores) {
          attn_cpu::store(to + j, x, count, stream);
        }
        attn_cpu::store(row + j, round_to<S>(x));
      }
    }
    if (stored.data != nullptr && transposed()) {
      store_transposed(tile, stored);
    }
    fence_streamed(stream);
  }

  // tile = fn(count, x) of the vectors x of a bᵀ
  template <typename F>
  Tile make(
      bool next,
      const Matrix<const S>& a,
      const Matrix<const S>& b,
      const Tile& tile,
      const Matrix<S>& stored,
      bool stream,
      const F& fn) {
    multiply(next, a, b, tile);
    map(tile, stored, stream, fn);
    return tile;
  }

  // Calls fn(i, j, count, x) for the vectors x of a bᵀ, each of which is in
  // `tile` until it is stored there. If a has no columns, x is 0.
  template <typename F>
  void scores(
      const Matrix<const S>& a,
      const Matrix<const S>& b,
      const Tile& tile,
      const F& fn) {
    multiply(false, a, b.block(0, 0, b.rows, a.cols), tile);
    for_vectors(
        tile,
        [&](int64_t i, int64_t j, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
          fn(i, j, count, load(tile, i, j, count));
        });
  }

  // Calls fn(i, j, count, x, y) for the vectors x of a bᵀ and y of c dᵀ. A
  // product that lacks an operand is 0.
  template <typename F>
  void scores(
      const Matrix<const S>& a,
      const Matrix<const S>& b,
      const Tile& first,
      const Matrix<const S>& c,
      const Matrix<const S>& d,
      const Tile& second,
      const F& fn) {
    const bool has_first = a.data != nullptr, has_second = d.data != nullptr;
    if (has_first) {
      multiply(false, a, b, first);
    }
    if (has_second) {
      multiply(false, c, d, second);
    }
    const Pair<T> zero(0);
    for_vectors(
        first,
        [&](int64_t i, int64_t j, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
          fn(i,
             j,
             count,
             has_first ? load(first, i, j, count) : zero,
             has_second ? load(second, i, j, count) : zero);
        });
  }

  // out (+)= tile x or, unless `of_rows`, tileᵀ x. An out of lower precision is
  // overwritten. If `next`, x is the same as in the last call; there are
  // `all_rows` rows of out in all calls of one x.
  template <typename O>
  void add(
      bool next,
      bool accumulate,
      bool of_rows,
      const Matrix<const T>& tile,
      const Matrix<const S>& x,
      int64_t all_rows,
      O* out) {
    const auto in_rows = rows_of(tile);
    const auto rows = of_rows ? in_rows.rows : in_rows.cols;
    const typename Fma::Left left{
        tile.data, tile.row_stride, transposed() == of_rows};
    if (FewColumns<T>::fits(x.cols)) {
      few_.product(accumulate, rows, left, x, out);
      return;
    }
    for (int64_t p = 0; p < x.cols; p += NC, out += NC) {
      const auto cols = std::min(NC, x.cols - p);
      const auto part = x.block(0, p, x.rows, cols);
      T* panels =
          panels_ + (layout_.repeated ? Fma::packed_size(x.rows, p) : 0);
      if (all_rows == 1 &&
          product_of_row(panels, sums_, accumulate, left, part, out)) {
        continue;
      }
      if (Fma::product_in_place(
              sums_, accumulate, rows, left, part, out, x.cols)) {
        continue;
      }
      const auto right = Fma::right(panels, part, all_rows, next);
      Fma::product_by(sums_, accumulate, rows, cols, left, right, out, x.cols);
    }
  }

 private:
  using Fma = FmaProducts<T>;

  static bool is_transposed(int64_t m, int64_t n) {
    return FewColumns<T>::fits(n) && m > n;
  }

  template <typename F>
  static C10_ALWAYS_INLINE void for_vectors(const Tile& tile, const F& fn) {
    for (const auto i : c10::irange(tile.rows)) {
      for (int64_t j = 0; j < tile.cols; j += pair_size<T>) {
        fn(i, j, tile.cols - j);
      }
    }
  }

  // attn = tileᵀ
  void store_transposed(const Tile& tile, const Matrix<S>& attn) {
    const T* result = tile.data;
    if (tile.rows > 1) {
      transpose(
          result, tile.row_stride, copy_, attn.cols, attn.cols, attn.rows);
      result = copy_;
    }
    convert(attn.data, result, attn.rows * attn.cols);
  }

  const Layout& layout_;
  FewColumns<T> few_;
  Scores<S> scores_;
  T *panels_, *sums_, *copy_;
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
