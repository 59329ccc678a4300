#pragma once

#include <ATen/native/cpu/AttnForward.h>

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

  // out (+)= a x
  template <typename A, typename O>
  static void multiply(
      const Matrix<const A>& a,
      const Matrix<const S>& x,
      O* out,
      bool accumulate = false) {
    for (const auto i : c10::irange(a.rows)) {
      for (const auto j : c10::irange(x.cols)) {
        T sum(0);
        for (const auto p : c10::irange(a.cols)) {
          sum = multiply_add(
              static_cast<T>(a.at(i, p)), static_cast<T>(x.at(p, j)), sum);
        }
        if (accumulate) { // only to totals, which are of T
          sum += static_cast<T>(*out);
        }
        *out++ = static_cast<O>(sum);
      }
    }
  }
};

// attn = tanh(scale q kᵀ), 0 beyond the diagonal
template <typename S>
void make_tiny_attn(
    const Matrix<const S>& q,
    const Matrix<const S>& k,
    const Form& form,
    S* attn) {
  using T = at::opmath_type<S>;
  const auto size = q.rows * k.rows;
  alignas(64) T scores[TinyProducts<S>::MAX_SIZE + pair_size<T>];
  TinyProducts<S>::multiply(q, k.t(), scores);
  std::fill_n(scores + size, pair_size<T>, T(0)); // the last load reads these
  const Pair<T> scale(static_cast<T>(form.scale));
  for (int64_t i = 0; i < size; i += pair_size<T>) {
    const auto count = size - i;
    const auto x = attn_tanh_for<S>(load<T>(scores + i) * scale, count);
    store(attn + i, x, count);
  }
  for (const auto i : c10::irange(q.rows)) {
    mask_row(attn + i * k.rows, i, k.rows, form, false);
  }
}

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
      const Form& form,
      bool /*stream*/,
      O* out) {
    S own[TinyProducts<S>::MAX_SIZE];
    S* made = attn.data != nullptr ? attn.data : own;
    make_tiny_attn(q, k, form, made);
    const Matrix<const S> made_attn{made, q.rows, k.rows, k.rows, 1};
    TinyProducts<S>::multiply(made_attn, v, out);
  }
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
    Layout(const Sizes&, int64_t, int64_t, bool) {}
  };

  TinyBackward(const Layout& /*layout*/, T* /*scratch*/) {}

  void start(const Tile<S>& tile, bool with_scores) {
    tile_ = tile;
    auto& attn = tile_.attn;
    if (attn.data == nullptr) {
      make_tiny_attn(tile.q, tile.k, tile.form, attn_);
      attn = {attn_, tile.q.rows, tile.k.rows, tile.k.rows, 1};
    }
    if (!with_scores) {
      return;
    }
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
        *x *= TinyProducts<S>::multiply_add(-y, y, T(1));
        *x++ *= static_cast<T>(tile.form.scale);
      }
      mask_row(scores_ + i * attn.cols, i, attn.cols, tile.form, false);
    }
  }

  template <typename O>
  void add_grad_q(bool /*accumulate*/, O* grad) {
    TinyProducts<S>::multiply(scores(), tile_.k, grad);
  }
  template <typename O>
  void add_grad_k(bool accumulate, O* grad) {
    TinyProducts<S>::multiply(scores().t(), tile_.q, grad, accumulate);
  }
  template <typename O>
  void add_grad_v(bool accumulate, O* grad) {
    const auto attn_t = tile_.attn.t();
    TinyProducts<S>::multiply(attn_t, tile_.grad_output, grad, accumulate);
  }

 private:
  Matrix<const T> scores() const {
    const auto rows = tile_.attn.rows, cols = tile_.attn.cols;
    return {scores_, rows, cols, cols, 1};
  }

  T scores_[TinyProducts<S>::MAX_SIZE];
  S attn_[TinyProducts<S>::MAX_SIZE];
  Tile<S> tile_{};
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
