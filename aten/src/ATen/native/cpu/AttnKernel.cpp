#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/native/cpu/AttnKernel.h>

#include <ATen/Dispatch.h>
#include <ATen/native/AttnGradients.h>
#include <ATen/native/cpu/AttnKernels.h>
#include <ATen/native/cpu/AttnTensors.h>

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
//   AttnKernel.cpp    what ATen calls
//   AttnTensors.h     tensors to pointers, sizes and strides; ATen's Runtime
//   AttnKernels.h     which kernel for which dtype and sizes
//   AttnForward.h     the tasks of the forward, some rows each
//   AttnSchedule.h    Runtime; tasks in order, ordered sums, scratch memory
//   AttnFmaForward.h  a task by FMA, for any shape; others are in AttnKernels.h
//   AttnScores.h      q kᵀ for a tile
//   AttnFma.h         the micro-kernel, and products made of it
//   AttnTanh.h        tanh of vectors in registers
//   AttnCopy.h        packing, transposes
//   AttnVec.h         loads and stores by vectors
//   AttnMatrix.h      pointers, sizes and strides
//
// To add a micro-kernel, write FmaProducts::kernel for other registers. To add
// a kind of kernel, write a class like FmaForward and add a line to
// AttnKernels.h. The class has a Layout, which says what scratch memory it
// needs for tiles of some size. It is constructed for each task, from a layout
// and memory. It defines
//   T         the precision of the sums
//   ROW_STEP  the rows of a task are a multiple of it
// and has
//   forward   attn = tanh(q kᵀ), out (+)= attn v, for a block of columns
//
// Note [Tiles of attn's backward]
// As in Note [Tiles of attn], from the outside in:
//   AttnBackward.h       the tasks of the backward, a tile each
//   AttnFmaBackward.h    a task by FMA, for any shape
//   AttnMaskedOperand.h  what a tile that is masked in part is multiplied with
//
// A kind of kernel has a second class, like FmaBackward, with
//   T, ROW_STEP   as for the forward
//   LONGEST       a tile of few rows or columns is up to this many times longer
//   MIN_TILE      a tile has at least this many rows and columns, if attn does
//   start         S̄ = (grad_output vᵀ + grad_attn) (1 - attn²), and attn
//   add           total (+)= S̄ k, S̄ᵀ q or attnᵀ grad_output

namespace at::native {

namespace {

void attn_kernel(
    const Tensor& output,
    const Tensor& attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale) {
  const auto sizes = attn_cpu::sizes_of(q, v, is_causal);
  if (sizes.batch == 0) { // no attn: a sum without terms
    output.zero_();
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      kBFloat16, kHalf, q.scalar_type(), "attn", [&] {
        using S = scalar_t;
        const attn_cpu::ForwardArgs<S> args{
            sizes,
            attn_cpu::batch_of<S>(output),
            attn_cpu::batch_of<S>(attn),
            attn_cpu::batch_of<const S>(q),
            attn_cpu::batch_of<const S>(k),
            attn_cpu::batch_of<const S>(v),
            attn_cpu::form_of(is_causal, scale)};
        attn_cpu::forward(args, attn_cpu::aten_runtime());
      });
}

void attn_backward_kernel(
    const AttnGradients& grads,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    bool is_causal,
    double scale,
    int64_t group) {
  const auto sizes = attn_cpu::sizes_of(q, v, is_causal);
  const auto set_zero = [](const Tensor& grad, int64_t begin) {
    if (grad.defined() && begin < grad.size(-2)) {
      grad.slice(-2, begin).zero_();
    }
  };
  set_zero(grads.grad_q, sizes.batch == 0 ? 0 : sizes.m);
  set_zero(grads.grad_k, sizes.batch == 0 ? 0 : sizes.n);
  set_zero(grads.grad_v, sizes.batch == 0 ? 0 : sizes.n);
  if (sizes.batch == 0) {
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      kBFloat16, kHalf, q.scalar_type(), "_attn_backward", [&] {
        using S = scalar_t;
        const attn_cpu::BackwardArgs<S> args{
            sizes,
            attn_cpu::batch_of<S>(grads.grad_q),
            attn_cpu::batch_of<S>(grads.grad_k),
            attn_cpu::batch_of<S>(grads.grad_v),
            attn_cpu::batch_of<const S>(grads.grad_output),
            attn_cpu::batch_of<const S>(grads.grad_attn),
            attn_cpu::batch_of<const S>(q),
            attn_cpu::batch_of<const S>(k),
            attn_cpu::batch_of<const S>(v),
            attn_cpu::batch_of<const S>(attn),
            attn_cpu::form_of(is_causal, scale),
            group};
        attn_cpu::backward(args, attn_cpu::aten_runtime());
      });
}

} // namespace

ALSO_REGISTER_AVX512_DISPATCH(attn_stub, &attn_kernel)
ALSO_REGISTER_AVX512_DISPATCH(attn_backward_stub, &attn_backward_kernel)

} // namespace at::native
