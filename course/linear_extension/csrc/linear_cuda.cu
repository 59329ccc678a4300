// The three products for CUDA, by one kernel: the result's tiles of 16 x 16, a
// block of threads each.
#include "linear.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

namespace linear_extension {
namespace {

constexpr int kTile = 16, kThreads = kTile * kTile;
// Two tiles, in the largest type; a row is a number longer, so that a column is
// in other banks.
constexpr int kRow = kTile + 1, kShared = 2 * kTile * kRow * sizeof(double);

// A matrix as it lies in memory, or its transpose.
template <typename T>
struct Operand {
  const T* data;
  int64_t row, column; // strides
};

template <typename T>
struct Product {
  T* result;       // (rows, columns), contiguous
  Operand<T> a, b; // (rows, inner), (inner, columns)
  const T* bias;   // (columns), or null
  int64_t rows, columns, inner;
};

extern __shared__ double tiles[];

// C[r, c] = sum_k A[r, k] B[k, c] + bias[c]
template <typename T>
__global__ void product_kernel(Product<T> p) {
  T* a = reinterpret_cast<T*>(tiles);
  T* b = a + kTile * kRow;
  const int64_t across = (p.columns + kTile - 1) / kTile;
  const int y = threadIdx.x / kTile, x = threadIdx.x % kTile;
  const int64_t row = blockIdx.x / across * kTile + y,
                column = blockIdx.x % across * kTile + x;
  T sum = 0;
  for (int64_t k = 0; k < p.inner; k += kTile) {
    const bool in_a = row < p.rows && k + x < p.inner,
               in_b = k + y < p.inner && column < p.columns;
    a[y * kRow + x] =
        in_a ? p.a.data[row * p.a.row + (k + x) * p.a.column] : T(0);
    b[y * kRow + x] =
        in_b ? p.b.data[(k + y) * p.b.row + column * p.b.column] : T(0);
    __syncthreads(); // the tiles are there
    for (int i = 0; i < kTile; ++i) {
      sum += a[y * kRow + i] * b[i * kRow + x];
    }
    __syncthreads(); // nobody reads them any more
  }
  if (row < p.rows && column < p.columns) {
    p.result[row * p.columns + column] = sum + (p.bias ? p.bias[column] : T(0));
  }
}

template <typename T>
Operand<T> operand(const at::Tensor& matrix) {
  return {matrix.const_data_ptr<T>(), matrix.stride(0), matrix.stride(1)};
}

// a (rows, inner) times b (inner, columns), each as its strides say: a
// transpose is not copied.
at::Tensor product(
    const at::Tensor& a,
    const at::Tensor& b,
    const std::optional<at::Tensor>& bias = {}) {
  const c10::cuda::CUDAGuard guard(a.device());
  const at::Tensor plus = bias ? bias->contiguous() : at::Tensor();
  at::Tensor result = at::empty({a.size(0), b.size(1)}, a.options());
  const int64_t rows = result.size(0), columns = result.size(1);
  const int64_t blocks =
      (rows + kTile - 1) / kTile * ((columns + kTile - 1) / kTile);
  if (!blocks) {
    return result; // a grid of none cannot be launched
  }
  TORCH_CHECK(
      blocks < (int64_t(1) << 31), "linear: ", result.sizes(), " is too large");
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "linear", [&] {
    const Product<scalar_t> p{
        result.mutable_data_ptr<scalar_t>(),
        operand<scalar_t>(a),
        operand<scalar_t>(b),
        plus.defined() ? plus.const_data_ptr<scalar_t>() : nullptr,
        rows,
        columns,
        a.size(1)};
    auto* kernel = product_kernel<scalar_t>;
    kernel<<<blocks, kThreads, kShared, c10::cuda::getCurrentCUDAStream()>>>(p);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return result;
}

// Y = X W^T + b
at::Tensor linear(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias) {
  check_linear(input, weight, bias);
  return product(input, weight.t(), bias);
}

// G_X = G W
at::Tensor linear_backward_input(
    const at::Tensor& grad, const at::Tensor& weight) {
  check_backward_input(grad, weight);
  return product(grad, weight);
}

// G_W = G^T X
at::Tensor linear_backward_weight(
    const at::Tensor& grad, const at::Tensor& input) {
  check_backward_weight(grad, input);
  return product(grad.t(), input);
}

} // namespace

TORCH_LIBRARY_IMPL(linear_extension, CUDA, m) {
  m.impl("linear", linear);
  m.impl("linear_backward_input", linear_backward_input);
  m.impl("linear_backward_weight", linear_backward_weight);
}

} // namespace linear_extension
