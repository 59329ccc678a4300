#pragma once

#include <ATen/native/cpu/AttnMaskedOperand.h>
#include <ATen/native/cpu/AttnVnni.h>

#if defined(CPU_CAPABILITY_AVX512)

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Computes the forward of a task by VnniProducts. See Note [Tiles of attn].
template <typename Micro>
class VnniForward {
 public:
  using T = float;
  using S = typename Micro::Element;
  static constexpr int64_t ROW_STEP = 32;

  // Offsets in the scratch memory, in elements of T.
  struct Layout {
    int64_t acc, k_vnni, v_vnni, rows, tile, size;

    Layout(int64_t /*rows*/, int64_t /*m*/, int64_t n, int64_t d, int64_t e) {
      n = std::min(n, NC);
      ScratchLayout layout;
      acc = layout.add(MC * BRGEMM_LD);
      k_vnni = layout.add(Products::right_size(d, n));
      v_vnni = layout.add(Products::right_size(n, e));
      rows = layout.add(Products::left_size(MC, d));
      tile = layout.add(Products::left_size(MC, n));
      size = layout.size();
    }
  };

  VnniForward(const Layout& layout, T* scratch)
      : acc_(scratch + layout.acc),
        k_vnni_(reinterpret_cast<S*>(scratch + layout.k_vnni)),
        v_vnni_(reinterpret_cast<S*>(scratch + layout.v_vnni)),
        rows_(reinterpret_cast<S*>(scratch + layout.rows)),
        tile_(reinterpret_cast<S*>(scratch + layout.tile)) {}

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
    const auto keys = Products::columns(k_vnni_, k);
    const MaskedOperand<S> operand(v, q.rows, form, false);
    const auto values = Products::right(v_vnni_, operand.finite());
    for (int64_t i = 0; i < q.rows; i += MC) {
      const auto rows = std::min(MC, q.rows - i);
      const auto rows_form = form.block(i, 0);
      if (rows_form.kept(rows - 1, k.rows) == 0) {
        std::fill_n(out + i * v.cols, accumulate ? 0 : rows * v.cols, O(0));
        continue;
      }
      const auto left = Products::left(rows_, q.block(i, 0, rows, q.cols));
      // If attn is dense, but its rows are no whole vectors, it is computed in
      // the order of memory: at n = 2 and d = 8 in 0.6 of the time.
      const auto block = attn.block(i, 0, rows, attn.cols);
      const bool stores = block.data != nullptr;
      const bool dense = stores && Products::by_pairs && block.cols % W != 0 &&
                         block.cols == block.row_stride;
      const auto ld = dense ? block.cols : BRGEMM_LD;
      Products::multiply(left, 0, keys, acc_, ld);
      typename Products::Left tile{tile_, rows, block.cols};
      for (const auto r : c10::irange(dense ? 1 : rows)) {
        S* dst = block.data + r * block.row_stride;
        Products::for_vectors(
            dense ? rows * block.cols : block.cols,
            [&](int64_t col, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
              const T* scores = acc_ + r * ld + col;
              const auto x = Products::attn_of(scores, count, form);
              if (!dense) {
                x.store(tile.at(r, col));
              }
              if (stream) {
                _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + col), x);
              } else if (stores) {
                x.store(dst + col, count);
              }
            });
        if (!stores) {
          mask_row(tile.at(r, 0), r, block.cols, rows_form, false);
        }
      }
      if (dense) {
        tile = Products::left(tile_, block);
      }
      O* sums = out + i * v.cols;
      Products::add_product(accumulate, tile, values, acc_, sums);
      const Matrix<const S> made{tile_, rows, v.rows, tile.row_stride, 1};
      operand.add_rest(made, rows_form, sums);
    }
    fence_streamed(stream);
  }

 private:
  using Products = VnniProducts<Micro>;
  static constexpr auto MC = Products::MC, W = Products::W;

  T* acc_;
  S *k_vnni_, *v_vnni_, *rows_, *tile_;
  typename Micro::Context context_;
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu

#endif
