// The operators' schemas, and their kernels for a CPU, on raw data pointers.
#include "linear.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace linear_extension {
namespace {

// Multiplications that a thread takes at least, such that starting it pays.
constexpr int64_t kGrain = 1 << 15;

// The same in rows.
int64_t grain(int64_t work_per_row) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, work_per_row));
}

// sum_i x[i] y[i], in eight accumulators, which the compiler makes a vector of.
template <typename T>
T dot(const T* x, const T* y, int64_t n) {
  T sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) {
      sums[j] += x[i + j] * y[i + j];
    }
  }
  for (; i < n; ++i) {
    sums[0] += x[i] * y[i];
  }
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) +
         ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// y[i] += a x[i]
template <typename T>
void add_scaled(T* y, T a, const T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    y[i] += a * x[i];
  }
}

// Y[n, o] = sum_i X[n, i] W[o, i] + b[o]
at::Tensor linear(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias) {
  check_linear(input, weight, bias);
  const at::Tensor x = input.contiguous(), w = weight.contiguous();
  const at::Tensor b = bias ? bias->contiguous() : at::Tensor();
  const int64_t rows = x.size(0), in = x.size(1), out = w.size(0);
  at::Tensor result = at::empty({rows, out}, x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "linear", [&] {
    const scalar_t* from = x.const_data_ptr<scalar_t>();
    const scalar_t* by = w.const_data_ptr<scalar_t>();
    const scalar_t* plus = b.defined() ? b.const_data_ptr<scalar_t>() : nullptr;
    scalar_t* to = result.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, rows, grain(in * out), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        for (int64_t o = 0; o < out; ++o) {
          to[n * out + o] = dot(from + n * in, by + o * in, in) +
                            (plus ? plus[o] : scalar_t(0));
        }
      }
    });
  });
  return result;
}

// G_X[n, i] = sum_o G[n, o] W[o, i]
at::Tensor linear_backward_input(
    const at::Tensor& grad, const at::Tensor& weight) {
  check_backward_input(grad, weight);
  const at::Tensor g = grad.contiguous(), w = weight.contiguous();
  const int64_t rows = g.size(0), out = g.size(1), in = w.size(1);
  at::Tensor result = at::zeros({rows, in}, g.options());
  AT_DISPATCH_FLOATING_TYPES(g.scalar_type(), "linear_backward_input", [&] {
    const scalar_t* from = g.const_data_ptr<scalar_t>();
    const scalar_t* by = w.const_data_ptr<scalar_t>();
    scalar_t* to = result.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, rows, grain(in * out), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        for (int64_t o = 0; o < out; ++o) {
          add_scaled(to + n * in, from[n * out + o], by + o * in, in);
        }
      }
    });
  });
  return result;
}

// G_W[o, i] = sum_n G[n, o] X[n, i]
at::Tensor linear_backward_weight(
    const at::Tensor& grad, const at::Tensor& input) {
  check_backward_weight(grad, input);
  const at::Tensor g = grad.contiguous(), x = input.contiguous();
  const int64_t rows = g.size(0), out = g.size(1), in = x.size(1);
  at::Tensor result = at::zeros({out, in}, g.options());
  AT_DISPATCH_FLOATING_TYPES(g.scalar_type(), "linear_backward_weight", [&] {
    const scalar_t* from = g.const_data_ptr<scalar_t>();
    const scalar_t* by = x.const_data_ptr<scalar_t>();
    scalar_t* to = result.mutable_data_ptr<scalar_t>();
    // Each thread has rows of the result of its own, and goes over all of G and
    // X.
    at::parallel_for(0, out, grain(in * rows), [&](int64_t begin, int64_t end) {
      for (int64_t n = 0; n < rows; ++n) {
        for (int64_t o = begin; o < end; ++o) {
          add_scaled(to + o * in, from[n * out + o], by + n * in, in);
        }
      }
    });
  });
  return result;
}

} // namespace

TORCH_LIBRARY(linear_extension, m) {
  m.def("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
  m.def("linear_backward_input(Tensor grad, Tensor weight) -> Tensor");
  m.def("linear_backward_weight(Tensor grad, Tensor input) -> Tensor");
}

TORCH_LIBRARY_IMPL(linear_extension, CPU, m) {
  m.impl("linear", linear);
  m.impl("linear_backward_input", linear_backward_input);
  m.impl("linear_backward_weight", linear_backward_weight);
}

} // namespace linear_extension
