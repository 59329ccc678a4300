#pragma once

#include <ATen/native/cpu/AttnCopy.h>

#include <cmath>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Products by plain loops. Samples this small are faster without vectors and
// packing.
template <typename S>
class TinyProducts {
 public:
  using T = at::opmath_type<S>;
  static constexpr int64_t MAX_SIZE = 64; // of attn

  static bool fits(const Sizes& sizes) {
    const auto [batch, m, n, d, e] = sizes;
    return m * n <= MAX_SIZE && m * n * (d + e) <= 4 * MAX_SIZE;
  }

  // Returns x y + z, with one rounding if the machine has FMA, else with two.
  // If the compiler chose, it could choose differently for different strides.
  static T multiply_add(T x, T y, T z) {
#if defined(__FP_FAST_FMA) && defined(__FP_FAST_FMAF)
    return std::fma(x, y, z);
#else
    return x * y + z;
#endif
  }

  // out = a x
  template <typename A, typename O>
  static void multiply(
      const Matrix<const A>& a, const Matrix<const S>& x, O* out) {
    for (const auto i : c10::irange(a.rows)) {
      for (const auto j : c10::irange(x.cols)) {
        T sum(0);
        for (const auto p : c10::irange(a.cols)) {
          sum = multiply_add(
              static_cast<T>(a.at(i, p)), static_cast<T>(x.at(p, j)), sum);
        }
        *out++ = static_cast<O>(sum);
      }
    }
  }
};

// The forward of a tiny sample. See Note [Tiles of attn].
template <typename S>
class TinyForward {
 public:
  using T = at::opmath_type<S>;
  static constexpr int64_t ROW_STEP = 1;

  struct Layout {
    int64_t size = 0;
    Layout(int64_t, int64_t, int64_t, int64_t, int64_t) {}
  };

  TinyForward(const Layout& /*layout*/, T* /*scratch*/) {}

  template <typename O>
  void forward(
      bool /*accumulate*/,
      const Matrix<const S>& q,
      const Matrix<const S>& k,
      const Matrix<const S>& v,
      const Matrix<S>& attn,
      bool /*stream*/,
      O* out) {
    const auto size = q.rows * k.rows;
    TinyProducts<S>::multiply(q, k.t(), attn_);
    std::fill_n(attn_ + size, pair_size<T>, T(0)); // the last load reads these
    for (int64_t i = 0; i < size; i += pair_size<T>) {
      const auto count = size - i;
      const auto x = attn_tanh_for<S>(load<T>(attn_ + i), count);
      store(attn.data + i, x, count);
    }
    TinyProducts<S>::template multiply<S>(attn, v, out);
  }

 private:
  alignas(64) T attn_[TinyProducts<S>::MAX_SIZE + pair_size<T>];
};

// The backward of a tiny sample.
template <typename S>
class TinyBackward {
 public:
  using T = at::opmath_type<S>;
  static constexpr int64_t ROW_STEP = 1;
  static constexpr int64_t LONGEST = 1;
  static constexpr int64_t MIN_TILE = 96;

  struct Layout {
    int64_t size = 0;
    Layout(int64_t, int64_t, int64_t, int64_t) {}
  };

  TinyBackward(const Layout& /*layout*/, T* /*scratch*/) {}

  void start(const Tile<S>& tile, bool with_scores) {
    tile_ = tile;
    if (!with_scores) {
      return;
    }
    const auto& attn = tile.attn;
    if (tile.grad_output.data != nullptr) {
      TinyProducts<S>::multiply(tile.grad_output, tile.v.t(), scores_);
    } else {
      std::fill_n(scores_, attn.rows * attn.cols, T(0));
    }
    T* x = scores_;
    for (const auto i : c10::irange(attn.rows)) {
      for (const auto j : c10::irange(attn.cols)) {
        if (tile.grad_attn.data != nullptr) {
          *x += static_cast<T>(tile.grad_attn.at(i, j));
        }
        const T y = static_cast<T>(attn.at(i, j));
        *x++ *= TinyProducts<S>::multiply_add(-y, y, T(1));
      }
    }
  }

  template <typename O>
  void add_grad_q(bool /*accumulate*/, O* grad) {
    TinyProducts<S>::multiply(scores(), tile_.k, grad);
  }
  template <typename O>
  void add_grad_k(bool /*accumulate*/, O* grad) {
    TinyProducts<S>::multiply(scores().t(), tile_.q, grad);
  }
  template <typename O>
  void add_grad_v(bool /*accumulate*/, O* grad) {
    TinyProducts<S>::multiply(tile_.attn.t(), tile_.grad_output, grad);
  }

 private:
  Matrix<const T> scores() const {
    const auto rows = tile_.attn.rows, cols = tile_.attn.cols;
    return {scores_, rows, cols, cols, 1};
  }

  T scores_[TinyProducts<S>::MAX_SIZE];
  Tile<S> tile_{};
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
