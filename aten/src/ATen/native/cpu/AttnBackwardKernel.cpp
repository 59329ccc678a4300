#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/native/cpu/AttnBackwardKernel.h>

#include <ATen/Dispatch.h>
#include <ATen/native/AttnGradients.h>
#include <ATen/native/cpu/AttnBackward.h>
#include <ATen/native/cpu/AttnKernels.h>
#include <ATen/native/cpu/AttnTensors.h>

// Note [Tiles of attn's backward]
// As in Note [Tiles of attn], from the outside in:
//   AttnBackwardKernel.cpp  what ATen calls
//   AttnBackward.h          the tasks of the backward, a tile each
//   AttnFmaBackward.h       a task by FMA, for any shape
//
// A kind of kernel has a second class, like FmaBackward, with
//   T, ROW_STEP   as for the forward
//   LONGEST       how many times as long a tile of few rows or columns may be
//   MIN_TILE      how many rows and columns a tile has at least, if attn has
//                 them
//   sums_columns  whether a total of grad_k or grad_v is of T even if a single
//                 tile adds to it
//   start         S̄ = (grad_output vᵀ + grad_attn) (1 - attn²), and attn
//   add_grad_q, add_grad_k, add_grad_v
//                 total (+)= S̄ k, S̄ᵀ q, attnᵀ grad_output
//   finish_block  writes the total of a block of grad_k or grad_v to where it
//                 belongs

namespace at::native {

namespace {

void attn_backward_kernel(
    const AttnGradients& grads,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn) {
  const auto sizes = sizes_of(q, v, attn);
  if (sizes.batch == 0) {
    for (const auto& grad : {grads.grad_q, grads.grad_k, grads.grad_v}) {
      if (grad.defined()) {
        grad.zero_();
      }
    }
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      kBFloat16, kHalf, q.scalar_type(), "_attn_backward", [&] {
        using S = scalar_t;
        const AttnBackwardArgs<S> args{
            sizes,
            batch_of<S>(grads.grad_q),
            batch_of<S>(grads.grad_k),
            batch_of<S>(grads.grad_v),
            batch_of<const S>(grads.grad_output),
            batch_of<const S>(grads.grad_attn),
            batch_of<const S>(q),
            batch_of<const S>(k),
            batch_of<const S>(v),
            batch_of<const S>(attn)};
        with_attn_kernels<S>(sizes, [&](auto kernels) {
          using Tiles = typename decltype(kernels)::Backward;
          attn_backward_by<S, Tiles>(args, AttnParallel());
        });
      });
}

} // namespace

ALSO_REGISTER_AVX512_DISPATCH(attn_backward_stub, &attn_backward_kernel)

} // namespace at::native
