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

// AttnKernels.h's forward and backward with that Runtime, for half, bfloat16,
// float and double.
template <typename S>
void forward(const ForwardArgs<S>& args);
template <typename S>
void backward(const BackwardArgs<S>& args);

} // namespace torch_attn
