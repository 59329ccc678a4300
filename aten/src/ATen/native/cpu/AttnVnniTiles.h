#pragma once

#include <ATen/native/cpu/AttnTile.h>
#include <ATen/native/cpu/AttnVnni.h>

#if defined(CPU_CAPABILITY_AVX512)

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Tiles in bfloat16 or half, and their products by VnniProducts. See Note
// [Tiles of attn].
template <typename Micro>
class VnniTiles {
 public:
  using S = typename Micro::Element;
  using T = float;
  using Tile = Matrix<S>;
  static constexpr int64_t ROW_STEP = 32;
  static constexpr int64_t LONGEST = 1;
  // brgemm is twice as fast as FMA, so a task needs a larger tile: with 96 rows
  // and columns the backward of 384 x 384, d = 64, takes a sixth longer.
  static constexpr int64_t MIN_TILE = 192;
  static constexpr bool COPIES = false;

  // Offsets in the scratch memory, in elements of T.
  struct Layout {
    TileShape shape;
    int64_t tile_size, sums[2], left[2], right[2];

    Layout(ScratchLayout& scratch, const TileShape& x, Use use)
        : shape(x), tile_size(Products::left_size(x.rows, x.cols)) {
      const auto width = std::max(x.d, x.e);
      const auto left_size = Products::left_size(x.rows, width);
      const auto right_size = std::max(
          Products::right_size(width, x.cols),
          Products::right_size(std::max(x.rows, x.cols), width));
      const bool twice = use == Use::twice, one = use == Use::once;
      sums[0] = scratch.add(MC * LD);
      sums[1] = scratch.add(twice ? MC * LD : 0);
      left[0] =
          scratch.add(std::max(left_size, Products::left_size(x.cols, x.rows)));
      left[1] = scratch.add(twice ? left_size : 0);
      right[0] = scratch.add(right_size);
      right[1] = one ? right[0] : scratch.add(right_size);
    }
  };

  VnniTiles(const Layout& layout, T* scratch)
      : sums_{scratch + layout.sums[0], scratch + layout.sums[1]} {
    for (const auto i : c10::irange(2)) {
      left_[i] = reinterpret_cast<S*>(scratch + layout.left[i]);
      right_[i] = reinterpret_cast<S*>(scratch + layout.right[i]);
    }
  }

  // Returns the rows of a tile of the forward.
  static int64_t forward_rows(int64_t /*rows*/, int64_t /*m*/, int64_t /*n*/) {
    return MC;
  }
  static constexpr bool transposed() {
    return false;
  }

  Tile tile(T* memory, int64_t rows, int64_t cols) const {
    const Left own{reinterpret_cast<S*>(memory), rows, cols};
    return {own.data, rows, cols, own.row_stride, 1};
  }
  Matrix<const S> rows_of(const Matrix<const S>& tile) const {
    return tile;
  }
  Matrix<const S> given(T* /*memory*/, const Matrix<const S>& x) const {
    return x;
  }

  static C10_ALWAYS_INLINE Pair<T> load(
      const Matrix<const S>& tile, int64_t i, int64_t j, int64_t count) {
    constexpr int64_t AHEAD = 6; // rows: those of a given attn are far apart
    prefetch_line(&tile.at(i + AHEAD, j));
    auto [lo, hi] =
        vec::convert_to_float<S>(Products::load_row(tile, i, j, count));
    return {lo, hi};
  }
  static C10_ALWAYS_INLINE void store(
      const Tile& tile, int64_t i, int64_t j, const Pair<T>& x) {
    Micro::round(x).store(&tile.at(i, j));
  }

  // tile = fn(count, x) of the vectors x of a bᵀ, and `stored` too. If `next`,
  // b is the same as in the last call. If `stored` is dense, but its rows are
  // no whole vectors, it is computed in the order of memory and returned: at
  // n = 2 and d = 8 in 0.6 of the time.
  template <typename F>
  Tile make(
      bool next,
      const Matrix<const S>& a,
      const Matrix<const S>& b,
      const Tile& tile,
      const Matrix<S>& stored,
      bool stream,
      const F& fn) {
    if (!next) {
      scores_right_ = Products::columns(right_[0], b);
    }
    const auto left = Products::left(left_[0], a);
    const auto cols = tile.cols;
    const bool stores = stored.data != nullptr;
    const bool dense = stores && Products::by_pairs && cols % W != 0 &&
                       stored.row_stride == cols;
    const auto ld = dense ? cols : LD;
    T* sums = sums_[0];
    for (int64_t row = 0; row < a.rows; row += MC) {
      const auto rows = std::min(MC, a.rows - row);
      Products::multiply(left, row, scores_right_, sums, ld);
      for (const auto r : c10::irange(dense ? 1 : rows)) {
        S* to = tile.data + (row + r) * tile.row_stride;
        S* dst = stored.data + (row + r) * stored.row_stride;
        Products::for_vectors(
            dense ? rows * cols : cols,
            [&](int64_t col, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
              const auto x =
                  fn(count, attn_cpu::load<T>(sums + r * ld + col, count));
              const auto y = Micro::round(x);
              if (!dense) {
                y.store(to + col);
              }
              if (stream) {
                store_streamed(dst + col, y);
              } else if (stores) {
                y.store(dst + col, count);
              }
            });
      }
    }
    fence_streamed(stream);
    return dense ? Tile{stored.data, a.rows, cols, cols, 1} : tile;
  }

  // Calls fn(i, j, count, x) for the vectors x of a bᵀ. If a has no columns, x
  // is 0.
  template <typename F>
  void scores(
      const Matrix<const S>& a,
      const Matrix<const S>& b,
      const Tile& tile,
      const F& fn) {
    scores(
        a,
        b,
        tile,
        {},
        {},
        tile,
        [&](int64_t i,
            int64_t j,
            int64_t count,
            const Pair<T>& x,
            const Pair<T>& /*y*/)
            C10_ALWAYS_INLINE_ATTRIBUTE { fn(i, j, count, x); });
  }

  // Calls fn(i, j, count, x, y) for the vectors x of a bᵀ and y of c dᵀ. A
  // product that lacks an operand is 0.
  template <typename F>
  void scores(
      const Matrix<const S>& a,
      const Matrix<const S>& b,
      const Tile& tile,
      const Matrix<const S>& c,
      const Matrix<const S>& d,
      const Tile& /*second*/,
      const F& fn) {
    const bool has_first = a.data != nullptr, has_second = d.data != nullptr;
    Left left{}, left2{};
    Right right{}, right2{};
    if (has_first) {
      left = Products::left(left_[0], a);
      right = Products::columns(right_[0], b);
    }
    if (has_second) {
      left2 = Products::left(left_[1], c);
      right2 = Products::columns(right_[1], d);
    }
    const Pair<T> zero(0);
    const auto [first, second] = sums_;
    for (int64_t row = 0; row < tile.rows; row += MC) {
      if (has_first) {
        Products::multiply(left, row, right, first);
      }
      if (has_second) {
        Products::multiply(left2, row, right2, second);
      }
      for (auto i = row; i < std::min(tile.rows, row + MC); ++i) {
        const auto at = (i - row) * LD;
        Products::for_vectors(
            tile.cols,
            [&, first = first, second = second](
                int64_t j, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
              const auto sum = [&](bool has,
                                   const T* sums) C10_ALWAYS_INLINE_ATTRIBUTE {
                return has ? attn_cpu::load<T>(sums + at + j, count) : zero;
              };
              fn(i, j, count, sum(has_first, first), sum(has_second, second));
            });
      }
    }
  }

  // out (+)= tile x or, unless `of_rows`, tileᵀ x. An out of lower precision is
  // overwritten. If `next`, x is the same as in the last call.
  template <typename O>
  void add(
      bool next,
      bool accumulate,
      bool of_rows,
      const Matrix<const S>& tile,
      const Matrix<const S>& x,
      int64_t /*all_rows*/,
      O* out) {
    const auto left =
        of_rows ? in_place(tile) : Products::left(left_[0], tile.t());
    if (!next) {
      right_of_add_ = Products::right(right_[1], x);
    }
    Products::add_product(accumulate, left, right_of_add_, sums_[0], out);
  }

 private:
  using Products = VnniProducts<Micro>;
  using Left = typename Products::Left;
  using Right = typename Products::Right;
  static constexpr auto MC = Products::MC, LD = Products::LD, W = Products::W;

  // Returns a tile of this class, or a given one by Pairs, as a left operand.
  static Left in_place(const Matrix<const S>& tile) {
    Left left{const_cast<S*>(tile.data), tile.rows, tile.cols}; // only read
    if constexpr (Products::by_pairs) {
      left = Products::left(nullptr, tile);
    }
    return left;
  }

  T* sums_[2];
  S *left_[2], *right_[2];
  Right scores_right_{}, right_of_add_{};
  typename Micro::Context context_;
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu

#endif
