#pragma once

#include <ATen/native/cpu/AttnCopy.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// The sizes of attn, of its largest tile, and of the rows of k and v.
struct TileShape {
  int64_t m, n, rows, cols, d, e;
};

// A Tiles makes one product of each operand, several products of the same right
// operand, or two products at once.
enum class Use { once, repeated, twice };

// Writes zeros where row i of a tile is masked. `transposed`: it is a column of
// attn.
template <typename T>
void mask_row(
    T* row, int64_t i, int64_t cols, const Form& form, bool transposed) {
  if (form.diagonal == Form::NO_DIAGONAL) {
    return;
  }
  const auto masked = form.first_row(i, cols);
  const auto kept = transposed ? cols : form.kept(i, cols);
  std::fill_n(row, transposed ? masked : 0, T(0));
  std::fill(row + kept, row + cols, T(0));
}

// Writes zeros where a tile is masked.
template <typename E>
void mask_tile(const Matrix<E>& tile, const Form& form, bool transposed) {
  const bool masks = form.diagonal != Form::NO_DIAGONAL;
  for (int64_t i = 0; masks && i < tile.rows; ++i) {
    mask_row(&tile.at(i, 0), i, tile.cols, form, transposed);
  }
}

// Returns attn = tanh(scale q kᵀ), or 0 where it is masked: in `tile`, and in
// `stored` too, if that has data. Then nothing is masked. If `next`, k is the
// same as in the last call.
template <typename Tiles, typename S = typename Tiles::S>
typename Tiles::Tile make_attn(
    Tiles& tiles,
    bool next,
    const Matrix<const S>& q,
    const Matrix<const S>& k,
    const Form& form,
    const typename Tiles::Tile& tile,
    const Matrix<S>& stored = {},
    bool stream = false) {
  using T = typename Tiles::T;
  const Pair<T> scale(static_cast<T>(form.scale));
  const auto attn = tiles.make(
      next,
      q,
      k,
      tile,
      stored,
      stream,
      [&](int64_t count, const Pair<T>& scores) C10_ALWAYS_INLINE_ATTRIBUTE {
        return attn_tanh_for<S>(scores * scale, count);
      });
  mask_tile(attn, form, tiles.transposed());
  return attn;
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
