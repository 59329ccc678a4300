#pragma once

#include <ATen/native/cpu/AttnMatrix.h>

#include <array>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// The inputs of a tile's backward. A gradient that is zero, and an attn that is
// not stored, have no data.
template <typename S>
struct Tile {
  Matrix<const S> q, k, v, attn, grad_output, grad_attn;
  Form form;
};

// A gradient, or none if it is not wanted: it has a row for each row of attn,
// or for each column.
template <typename S>
struct Gradient {
  MatrixBatch<S> grad;
  bool of_rows;
};

// The gradients that are wanted are contiguous. Those not wanted, and given
// gradients that are zero, have no data. If attn has no data, it is computed
// again. Each `group` successive samples share k, v and their gradients.
template <typename S>
struct BackwardArgs {
  Sizes sizes;
  MatrixBatch<S> grad_q, grad_k, grad_v;
  MatrixBatch<const S> grad_output, grad_attn, q, k, v, attn;
  Form form = {};
  int64_t group = 1;

  std::array<Gradient<S>, 3> gradients() const {
    return {{{grad_q, true}, {grad_k, false}, {grad_v, false}}};
  }
  // Returns whether the gradient of the scores is needed.
  bool has_scores() const {
    return grad_q || grad_k;
  }
  // Returns what a tile of sample b needs, which begins at attn[i][j].
  Tile<S> tile(
      int64_t b, int64_t i, int64_t j, int64_t rows, int64_t cols) const {
    return {
        q[b].block(i, 0, rows, sizes.d),
        k[b].block(j, 0, cols, sizes.d),
        v[b].block(j, 0, cols, sizes.e),
        attn[b].block(i, j, rows, cols),
        grad_output[b].block(i, 0, rows, grad_output ? sizes.e : 0),
        grad_attn[b].block(i, j, rows, cols),
        form.block(i, j)};
  }
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
