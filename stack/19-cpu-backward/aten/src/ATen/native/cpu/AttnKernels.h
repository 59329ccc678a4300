#pragma once

#include <ATen/native/cpu/AttnBackward.h>
#include <ATen/native/cpu/AttnFmaBackward.h>
#include <ATen/native/cpu/AttnFmaForward.h>

// Note [Tiles of attn]
// attn, its gradient and the gradient of the scores are m x n. Only attn is
// written to memory, once, if it is wanted. The others exist only as tiles,
// blocks of some rows and at most NC columns, in the scratch memory of a
// thread. Every sum over a tile starts from zero, and the sums of tiles are
// added in the order of tiles, whichever threads compute them. So results don't
// depend on the number of threads. Scratch memory is bounded: d and e are at
// most ATTN_MAX_WIDTH.
//
// The kernels know no Tensor. From the outside in:
//   AttnKernel.cpp     what ATen calls, by the stubs of AttnKernel.h
//   AttnKernel.h       the stubs, and which inputs the kernels take
//   AttnTensors.h      tensors to pointers, sizes and strides; ATen's Runtime
//   AttnKernels.h      which kernel for which dtype and sizes
//   AttnForward.h      the tasks of the forward, some rows each
//   AttnSchedule.h     Runtime; tasks in order, ordered sums, scratch memory
//   AttnFmaForward.h   a task by FMA, for any shape
//   AttnScores.h       q kᵀ for a tile
//   AttnFma.h          the micro-kernel, and products made of it
//   AttnTanh.h         tanh of vectors in registers
//   AttnCopy.h         packing, transposes
//   AttnVec.h          loads and stores by vectors
//   AttnMatrix.h       pointers, sizes and strides
//
// To add a micro-kernel, write FmaProducts::kernel for other registers. To add
// a kind of kernel, write a class like FmaForward and choose it below, where
// the first that fits is taken; FMA fits all. The class has a Layout, which
// says what scratch memory it needs for tiles of some size. It is constructed
// for each task, from a layout and memory. It defines
//   T         the precision of the sums
//   ROW_STEP  the rows of a task are a multiple of it
// and has
//   forward   attn = tanh(q kᵀ), out (+)= attn v, for a block of columns
//
// Note [Tiles of attn's backward]
// As in Note [Tiles of attn], from the outside in:
//   AttnBackwardArgs.h   what the backward is given
//   AttnBackward.h       the tasks of the backward, a tile each
//   AttnFmaBackward.h    a task by FMA, for any shape
//   AttnMaskedOperand.h  what a tile that is masked in part is multiplied with
//   AttnOneRow.h         one row of attn times rows of a matrix
//
// A kind of kernel has a second class, like FmaBackward, with
//   T, ROW_STEP   as for the forward
//   LONGEST       a tile of few rows or columns is up to this many times longer
//   MIN_TILE      a tile has at least this many rows and columns, if attn does
//   start         S̄ = (grad_output vᵀ + grad_attn) (1 - attn²), and attn
//   add           total (+)= S̄ k, S̄ᵀ q or attnᵀ grad_output

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// attn = tanh(q kᵀ), output = attn v
template <typename S>
void forward(const ForwardArgs<S>& args, const Runtime& runtime) {
  forward_by<S, FmaForward<S>>(args, runtime);
}

// Computes the gradients of q, k and v.
template <typename S>
void backward(const BackwardArgs<S>& args, const Runtime& runtime) {
  backward_by<S, FmaBackward<S>>(args, runtime);
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
