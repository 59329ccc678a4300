#pragma once

#include <ATen/native/cpu/AttnBrgemm.h>

#if defined(CPU_CAPABILITY_AVX512)

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Computes the forward of a task by brgemm. See Note [Tiles of attn].
template <typename S>
class BrgemmForward {
 public:
  using T = float;
  static constexpr int64_t ROW_STEP = 32;

  // Offsets in the scratch memory, in elements of T.
  struct Layout {
    int64_t acc, k_vnni, v_vnni, rows, tile, size;

    Layout(int64_t /*rows*/, int64_t /*m*/, int64_t n, int64_t d, int64_t e) {
      n = std::min(n, NC);
      ScratchLayout layout;
      acc = layout.add(MC * BRGEMM_LD);
      k_vnni = layout.add(Brgemm::right_size(d, n));
      v_vnni = layout.add(Brgemm::right_size(n, e));
      rows = layout.add(Brgemm::left_size(MC, d));
      tile = layout.add(Brgemm::left_size(MC, n));
      size = layout.size();
    }
  };

  BrgemmForward(const Layout& layout, T* scratch)
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
      bool stream,
      O* out) {
    const auto keys = Brgemm::right(k_vnni_, k.t());
    const auto values = Brgemm::right(v_vnni_, v);
    for (int64_t i = 0; i < q.rows; i += MC) {
      const auto rows = std::min(MC, q.rows - i);
      const auto left = Brgemm::left(rows_, q.block(i, 0, rows, q.cols));
      Brgemm::multiply(left, 0, keys, acc_);
      const typename Brgemm::Left tile{tile_, rows, k.rows};
      for (const auto r : c10::irange(rows)) {
        S* dst = attn.data + (i + r) * attn.row_stride;
        const T* acc = acc_ + r * BRGEMM_LD;
        Brgemm::for_vectors(
            k.rows,
            [&](int64_t col, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
              const auto x = attn_tanh_for<S>(load<T>(acc + col, count), count);
              store(dst + col, x, count, stream);
              store(tile.at(r, col), x);
            });
      }
      Brgemm::add_product(accumulate, tile, values, acc_, out + i * v.cols);
    }
  }

 private:
  using Brgemm = BrgemmProducts<S>;
  static constexpr auto MC = Brgemm::MC;

  T* acc_;
  S *k_vnni_, *v_vnni_, *rows_, *tile_;
  BrgemmContext context_;
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu

#endif
