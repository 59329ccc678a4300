#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

// The arguments of the kernels: pointers, sizes and strides.

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// The most columns of a tile, and the most terms that a micro-kernel sums at
// once. With 192 or 384, products of 64 to 576 terms or columns take as long
// within the noise, 3% (Zen 5).
constexpr int64_t NC = 288, KC = 288;

// A matrix of any strides.
template <typename S>
struct Matrix {
  S* data;
  int64_t rows, cols, row_stride, col_stride;

  Matrix block(int64_t row, int64_t col, int64_t rows, int64_t cols) const {
    return {
        data + row * row_stride + col * col_stride,
        rows,
        cols,
        row_stride,
        col_stride};
  }
  S& at(int64_t row, int64_t col) const {
    return data[row * row_stride + col * col_stride];
  }
  Matrix t() const {
    return {data, cols, rows, col_stride, row_stride};
  }
  operator Matrix<const S>() const {
    return {data, rows, cols, row_stride, col_stride};
  }
};

// A batch of matrices. Its dimensions have any sizes and strides, and the last
// two are those of a matrix. A missing tensor gives empty matrices.
template <typename S>
struct MatrixBatch {
  S* data = nullptr;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
  int64_t dim = 0;

  explicit operator bool() const {
    return sizes != nullptr;
  }

  Matrix<S> operator[](int64_t index) const {
    if (sizes == nullptr) {
      return {};
    }
    S* first = data;
    for (auto i = dim - 3; i > 0; --i) {
      first += index % sizes[i] * strides[i];
      index /= sizes[i];
    }
    if (dim > 2) {
      first += index * strides[0];
    }
    return {
        first,
        sizes[dim - 2],
        sizes[dim - 1],
        strides[dim - 2],
        strides[dim - 1]};
  }
};

// q (batch, m, d), k (batch, n, d), v (batch, n, e)
struct Sizes {
  int64_t batch, m, n, d, e;

  // The work, in multiplications: those of both products, 8 for each element
  // that is read or written, and 1000 for each sample.
  double work() const {
    const auto products = static_cast<double>(m) * n * (d + e);
    const auto moved =
        static_cast<double>(m + n) * (d + e) + static_cast<double>(m) * n;
    return batch * (products + 8 * moved + 1000);
  }
};

// How attn is made of the scores: attn[i][j] = tanh(scale scores[i][j]), but 0
// for j > i + diagonal.
struct Form {
  static constexpr int64_t NO_DIAGONAL =
      std::numeric_limits<int64_t>::max() / 2;

  double scale = 1;
  int64_t diagonal = NO_DIAGONAL; // 0: causal

  // Returns the form of the block that begins at attn[row][col].
  Form block(int64_t row, int64_t col) const {
    const bool masks = diagonal != NO_DIAGONAL;
    return {scale, masks ? diagonal + row - col : NO_DIAGONAL};
  }
  // Returns how many of the first `cols` columns of a row are not masked.
  int64_t kept(int64_t row, int64_t cols) const {
    return std::clamp<int64_t>(row + 1 + diagonal, 0, cols);
  }
  // Returns in how many of the first `rows` rows a column is masked.
  int64_t first_row(int64_t col, int64_t rows) const {
    return std::clamp<int64_t>(col - diagonal, 0, rows);
  }
};

// A NaN of any bits becomes the usual one: see round_pair.
inline Form form_of(bool is_causal, double scale) {
  constexpr auto nan = std::numeric_limits<double>::quiet_NaN();
  const int64_t diagonal = is_causal ? 0 : Form::NO_DIAGONAL;
  return {scale == scale ? scale : nan, diagonal};
}

// output and attn are contiguous. If attn has no data, it is not stored.
template <typename S>
struct ForwardArgs {
  Sizes sizes;
  MatrixBatch<S> output, attn;
  MatrixBatch<const S> q, k, v;
  Form form = {};
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
