#pragma once

#include <ATen/OpMathType.h>
#include <ATen/native/cpu/AttnCopy.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Returns whether all elements are finite. If the exponent of an element has
// only ones, adding one to it carries into the sign, whose bit was cleared.
template <typename S>
C10_NOINLINE bool all_finite(const Matrix<const S>& x) {
  constexpr int64_t step = sizeof(uint64_t) / sizeof(S);
  const auto bits_of = [](S value) {
    S values[step];
    std::fill_n(values, step, value);
    uint64_t bits = 0;
    std::memcpy(&bits, values, sizeof(bits));
    return bits;
  };
  const auto exponents = bits_of(std::numeric_limits<S>::infinity());
  const auto signs = bits_of(S(-0.));
  const auto rows = x.col_stride == 1 ? x : x.t();
  const bool is_dense = rows.col_stride == 1;
  const bool flat = is_dense && rows.row_stride == rows.cols;
  const auto cols = flat ? rows.rows * rows.cols : rows.cols;
  uint64_t found = 0;
  for (const auto i : c10::irange(flat ? 1 : rows.rows)) {
    const S* row = rows.data + i * rows.row_stride;
    int64_t j = 0;
    for (; is_dense && j + step <= cols; j += step) {
      uint64_t bits = 0;
      std::memcpy(&bits, row + j, sizeof(bits));
      found |= (bits & exponents) + (signs - exponents);
    }
    for (; j < cols; ++j) {
      found |=
          (bits_of(row[j * rows.col_stride]) & exponents) + (signs - exponents);
    }
  }
  return (found & signs) == 0;
}

// The right operand x of a product with a tile, or with its transpose. A masked
// element of the tile is 0, but 0 times infinity or NaN is NaN. So if a row of
// x is masked for some rows of the product, zeros take the place of what is not
// finite in it. What these lack is added afterwards to the rows that are not
// masked. So the others have the same bits whatever is masked.
// Nothing is inlined: GCC 12 would inline less of the products, which then take
// up to a fifth longer in float (Zen 3).
template <typename S>
class MaskedOperand {
 public:
  // The product has `rows` rows: those of the tile, or its columns.
  C10_NOINLINE MaskedOperand(
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
  C10_NOINLINE void add_rest(
      const Matrix<const A>& left, const Form& form, O* out) const {
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
