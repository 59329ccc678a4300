#pragma once

#include <ATen/native/cpu/AttnBackwardArgs.h>
#include <ATen/native/cpu/AttnCopy.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// The inputs of a tile, and their tangents. One that is zero has no data.
template <typename S>
struct SecondOrderTile : Tile<S> {
  Matrix<const S> q_tangent, k_tangent, v_tangent;
};

// With attn' and S̄' the tangents of attn and S̄ for those of q, k and v:
//   output' = attn' v + attn v'
// and the gradients of <grad_output, output'>, which are the tangents of those
// of <grad_output, output>:
//   grad_q = S̄' k + S̄ k', grad_k = S̄'ᵀ q + S̄ᵀ q', grad_v = attn'ᵀ grad_output
// A tangent that is zero is missing; q' and k' aren't both.
template <typename S>
struct SecondOrderArgs : BackwardArgs<S> {
  MatrixBatch<S> output_tangent;
  MatrixBatch<const S> q_tangent, k_tangent, v_tangent;

  std::array<Gradient<S>, 4> gradients() const {
    return {
        {{this->grad_q, true},
         {this->grad_k, false},
         {this->grad_v, false},
         {output_tangent, true}}};
  }
  SecondOrderTile<S> tile(
      int64_t b, int64_t i, int64_t j, int64_t rows, int64_t cols) const {
    const auto block = [&](const auto& x, int64_t row, int64_t count) {
      return x ? x[b].block(row, 0, count, x[b].cols) : Matrix<const S>{};
    };
    return {
        BackwardArgs<S>::tile(b, i, j, rows, cols),
        block(q_tangent, i, rows),
        block(k_tangent, j, cols),
        block(v_tangent, j, cols)};
  }
};

// Makes one product, or the sum of two, and adds it to the `size` elements of
// total. multiply(second, accumulate, out) writes a product to out, or adds it.
// A sum is made before it is added: see Note [Tiles of attn].
template <typename T, typename O, typename F>
void add_products(
    bool two,
    bool accumulate,
    int64_t size,
    T* sum,
    O* total,
    const F& multiply) {
  if (!two) {
    return multiply(false, accumulate, total);
  }
  if constexpr (std::is_same_v<T, O>) {
    if (!accumulate) {
      multiply(false, false, total);
      return multiply(true, true, total);
    }
  }
  multiply(false, false, sum);
  multiply(true, true, sum);
  add_sum(accumulate, total, sum, size);
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
