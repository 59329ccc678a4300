#pragma once

#include <ATen/native/cpu/AttnTiles.h>

#include <cmath>

namespace at::native {
inline namespace CPU_CAPABILITY {

// Tiles by plain loops: a whole attn that is too small for vectors and for
// packing. See Note [Tiles of attn].
template <typename S>
class LoopTiles {
 public:
  using T = at::opmath_type<S>;
  static constexpr int64_t ROW_STEP = 1;

  static bool fits(int64_t m, int64_t n, int64_t d, int64_t e) {
    return m * n <= MAX_SIZE && m * n * (d + e) <= 4 * MAX_SIZE;
  }
  static int64_t forward_scratch(int64_t, int64_t, int64_t, int64_t) {
    return 0;
  }
  static int64_t backward_scratch(int64_t, int64_t, int64_t, int64_t) {
    return 0;
  }

  LoopTiles(T* /*scratch*/, int64_t, int64_t, int64_t) {}
  LoopTiles(T* /*scratch*/, int64_t, int64_t, int64_t, int64_t) {}

  void forward(
      bool /*first*/,
      const Matrix<const S>& q,
      const Matrix<const S>& k,
      const Matrix<const S>& v,
      const Matrix<S>& attn,
      bool /*stream*/,
      T* out) {
    const auto size = q.rows * k.rows;
    multiply(q, k.t(), attn_);
    std::fill_n(attn_ + size, pair_size<T>, T(0)); // read as well
    for (int64_t i = 0; i < size; i += pair_size<T>) {
      const auto count = size - i;
      store(attn.data + i, attn_tanh_for<S>(load<T>(attn_ + i)), count);
    }
    multiply(constant(attn), v, out);
  }

  void start_tile(
      bool with_scores,
      const Matrix<const S>& q,
      const Matrix<const S>& v,
      const Matrix<const S>& attn,
      const Matrix<const S>& grad_output,
      const Matrix<const S>& grad_attn) {
    q_ = q;
    grad_output_ = grad_output;
    attn_matrix_ = attn;
    if (!with_scores) {
      return;
    }
    if (grad_output_.data != nullptr) {
      multiply(grad_output_, v.t(), scores_);
    } else {
      std::fill_n(scores_, attn.rows * attn.cols, T(0));
    }
    T* x = scores_;
    for (const auto i : c10::irange(attn.rows)) {
      for (const auto j : c10::irange(attn.cols)) {
        if (grad_attn.data != nullptr) {
          *x += static_cast<T>(grad_attn.at(i, j));
        }
        const T y = static_cast<T>(attn.at(i, j));
        *x++ *= multiply_add(-y, y, T(1));
      }
    }
  }

  void add_grad_q(bool /*first*/, const Matrix<const S>& k, S* grad) {
    multiply(tile(), k, grad);
  }
  void add_grad_k(bool /*first*/, S* grad) {
    multiply(tile().t(), q_, grad);
  }
  void add_grad_v(bool /*first*/, S* grad) {
    multiply(attn_matrix_.t(), grad_output_, grad);
  }

 private:
  static constexpr int64_t MAX_SIZE = 64;

  static Matrix<const S> constant(const Matrix<S>& x) {
    return {x.data, x.rows, x.cols, x.row_stride, x.col_stride};
  }
  Matrix<const T> tile() const {
    const auto rows = attn_matrix_.rows, cols = attn_matrix_.cols;
    return {scores_, rows, cols, cols, 1};
  }

  // x y + z, with one rounding or two: not as the compiler likes for some
  // strides.
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

  alignas(64) T attn_[MAX_SIZE + pair_size<T>];
  T scores_[MAX_SIZE];
  Matrix<const S> q_{}, grad_output_{}, attn_matrix_{};
};

} // namespace CPU_CAPABILITY
} // namespace at::native
