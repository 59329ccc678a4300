#pragma once

#include <ATen/native/cpu/AttnBackwardArgs.h>

#include <cstddef>
#include <cstdint>

// The operators and the kernels know of each other what is declared here. The
// kernels are compiled with ATen's headers, which the stable ABI forbids, and
// the operators without. Only plain structs and functions are between them.

namespace torch_attn {

using namespace at::native::attn_cpu;

// AttnSchedule.h's Runtime needs these four functions. operators.cpp defines
// them on the stable ABI.
int64_t max_threads();
void run(
    int64_t threads,
    void (*task)(void* context, int64_t thread),
    void* context);
void* allocate(size_t bytes);
void release(void* memory);

// ATTN_MAX_WIDTH of AttnKernel.h: the kernels take no more columns.
int64_t max_width();

// The tangents of q, k, v and grad_output. What is zero has no data.
template <typename S>
struct Tangents {
  MatrixBatch<const S> q, k, v, grad_output;
};

// AttnKernels.h's forward and backward with that Runtime, for half, bfloat16,
// float and double, and the same derivatives along tangents u of q, k and v, as
// AttnSecondOrderTile.h has them, or along u and w, as AttnThirdOrderTile.h.
template <typename S>
void forward(const ForwardArgs<S>& args);
template <typename S>
void backward(const BackwardArgs<S>& args);
template <typename S>
void second_order(
    const MatrixBatch<S>& output_tangent,
    const BackwardArgs<S>& args,
    const Tangents<S>& u);
template <typename S>
void third_order(
    const MatrixBatch<S>& output_tangent,
    const BackwardArgs<S>& args,
    const Tangents<S>& u,
    const Tangents<S>& w);

} // namespace torch_attn
