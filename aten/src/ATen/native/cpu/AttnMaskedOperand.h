#pragma once

#include <ATen/OpMathType.h>
#include <ATen/native/cpu/AttnCopy.h>

#include <cmath>
#include <vector>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Returns whether all elements are finite: 0 times any other is NaN.
template <typename S>
bool all_finite(const Matrix<const S>& x) {
  using T = at::opmath_type<S>;
  constexpr int64_t w = pair_size<T>;
  const auto dense = x.col_stride == 1 ? x : x.t();
  const Pair<T> zero(T(0));
  auto a = zero, b = zero;
  for (const auto i : c10::irange(dense.rows)) {
    const S* row = &dense.at(i, 0);
    int64_t j = 0;
    if (dense.col_stride != 1) {
      for (; j < dense.cols; ++j) {
        a[0] = a[0] + vec::Vectorized<T>(T(0) * T(row[j * dense.col_stride]));
      }
    }
    for (; j + 2 * w <= dense.cols; j += 2 * w) {
      a = vec::fmadd(zero, load<T>(row + j), a);
      b = vec::fmadd(zero, load<T>(row + j + w), b);
    }
    for (; j < dense.cols; j += w) {
      a = vec::fmadd(zero, load<T>(row + j, dense.cols - j), a);
    }
  }
  T sums[w];
  store(sums, a + b);
  return std::all_of(sums, sums + w, [](T sum) { return sum == 0; });
}

// The right operand x of a product with a tile, or with its transpose. A masked
// element of the tile is 0, but 0 times infinity or NaN is NaN. So if a row of
// x is masked for some rows of the product, zeros take the place of what is not
// finite in it. What these lack is added afterwards to the rows that are not
// masked. So the others have the same bits whatever is masked.
template <typename S>
class MaskedOperand {
 public:
  // The product has `rows` rows: those of the tile, or its columns.
  MaskedOperand(
      const Matrix<const S>& x, int64_t rows, const Form& form, bool transposed)
      : given_(x), finite_(x), transposed_(transposed) {
    const auto begin = transposed ? 0 : form.kept(0, x.rows);
    const auto end = transposed ? form.first_row(rows - 1, x.rows) : x.rows;
    if (begin == end || all_finite(x.block(begin, 0, end - begin, x.cols))) {
      return;
    }
    copy_.resize(x.rows * x.cols);
    finite_ = {copy_.data(), x.rows, x.cols, x.cols, 1};
    for (const auto p : c10::irange(x.rows)) {
      const bool is_masked = begin <= p && p < end;
      bool is_finite = true;
      for (const auto j : c10::irange(x.cols)) {
        const bool copies = !is_masked || std::isfinite(T(x.at(p, j)));
        copy_[p * x.cols + j] = copies ? x.at(p, j) : S(0);
        is_finite = is_finite && copies;
      }
      if (!is_finite) {
        changed_.push_back(p);
      }
    }
  }

  const Matrix<const S>& finite() const {
    return finite_;
  }

  // Adds what finite() lacks to rows of the product, which are those of `left`:
  // the tile, of this form, or its transpose.
  template <typename A, typename O>
  void add_rest(const Matrix<const A>& left, const Form& form, O* out) const {
    const auto rows = left.rows;
    for (const auto p : changed_) {
      const auto begin = transposed_ ? 0 : form.first_row(p, rows);
      const auto end = transposed_ ? form.kept(p, rows) : rows;
      for (auto i = begin; i < end; ++i) {
        const T factor(left.at(i, p));
        O* sums = out + i * given_.cols;
        for (const auto j : c10::irange(given_.cols)) {
          const T y(given_.at(p, j));
          if (!std::isfinite(y)) {
            sums[j] = static_cast<O>(T(sums[j]) + factor * y);
          }
        }
      }
    }
  }

 private:
  using T = at::opmath_type<S>;

  Matrix<const S> given_, finite_;
  bool transposed_;
  std::vector<S> copy_;
  std::vector<int64_t> changed_; // rows
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
