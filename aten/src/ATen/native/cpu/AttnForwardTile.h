#pragma once

#include <ATen/native/cpu/AttnMaskedOperand.h>
#include <ATen/native/cpu/AttnSchedule.h>
#include <ATen/native/cpu/AttnTile.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Computes the forward of a task, tile by tile. See Note [Tiles of attn].
template <typename Tiles>
class ForwardTile {
 public:
  using S = typename Tiles::S;
  using T = typename Tiles::T;
  static constexpr int64_t ROW_STEP = Tiles::ROW_STEP;

  // Offsets in the scratch memory, in elements of T.
  struct Layout {
    ScratchLayout scratch;
    typename Tiles::Layout tiles;
    int64_t tile, size;

    // A task has at most `rows` of the m rows.
    Layout(int64_t rows, int64_t m, int64_t n, int64_t d, int64_t e)
        : tiles(
              scratch,
              {m, n, Tiles::forward_rows(rows, m, n), std::min(n, NC), d, e},
              Use::repeated),
          tile(scratch.add(tiles.tile_size)),
          size(scratch.size()) {}
  };

  ForwardTile(const Layout& layout, T* scratch)
      : layout_(layout),
        tiles_(layout.tiles, scratch),
        tile_(scratch + layout.tile) {}

  // attn = tanh(scale q kᵀ), out (+)= attn v, for a block of columns
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
    const auto step = layout_.tiles.shape.rows;
    bool next = false;
    for (int64_t i = 0; i < q.rows; i += step) {
      const auto rows = std::min(step, q.rows - i);
      const auto tile_form = form.block(i, 0);
      O* sums = out + i * v.cols;
      if (tile_form.kept(rows - 1, k.rows) == 0) {
        std::fill_n(sums, accumulate ? 0 : rows * v.cols, O(0));
        continue;
      }
      const auto tile = make_attn(
          tiles_,
          next,
          q.block(i, 0, rows, q.cols),
          k,
          tile_form,
          tiles_.tile(tile_, rows, k.rows),
          attn.block(i, 0, rows, attn.cols),
          stream);
      tiles_.add(next, accumulate, true, tile, values.finite(), q.rows, sums);
      values.add_rest(tiles_.rows_of(tile), tile_form, sums);
      next = true;
    }
  }

 private:
  const Layout& layout_;
  Tiles tiles_;
  T* tile_;
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
