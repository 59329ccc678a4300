#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/native/cpu/AttnSecondOrderKernel.h>

#include <ATen/Dispatch.h>
#include <ATen/native/cpu/AttnKernels.h>
#include <ATen/native/cpu/AttnSecondOrderTile.h>
#include <ATen/native/cpu/AttnTensors.h>

// Note [Tiles of attn's second derivatives]
// They are made by the driver of the backward, of the tiles of Note [Tiles of
// attn]. From the outside in:
//   AttnSecondOrderKernel.cpp  what ATen calls, by the stub of the next file
//   AttnSecondOrderKernel.h    the stub, and which tensors it takes
//   AttnSecondOrderTile.h      the formulas: what is added to which result

namespace at::native {

namespace {

void attn_second_order_kernel(
    const AttnSecondOrder& results,
    const AttnTangents& tangents,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale,
    int64_t group) {
  const auto sizes = attn_cpu::sizes_of(q, v, is_causal);
  for (const auto& x : {results.grad_k, results.grad_v}) {
    if (x.defined() && sizes.n < x.size(-2)) {
      x.slice(-2, sizes.n).zero_(); // masked for all queries
    }
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      kBFloat16, kHalf, q.scalar_type(), "_attn_output_double_backward", [&] {
        using S = scalar_t;
        const attn_cpu::SecondOrderArgs<S> args{
            {sizes,
             attn_cpu::batch_of<S>(results.grad_q),
             attn_cpu::batch_of<S>(results.grad_k),
             attn_cpu::batch_of<S>(results.grad_v),
             attn_cpu::batch_of<const S>(tangents.grad_output),
             {},
             attn_cpu::batch_of<const S>(q),
             attn_cpu::batch_of<const S>(k),
             attn_cpu::batch_of<const S>(v),
             {},
             attn_cpu::form_of(is_causal, scale),
             group},
            attn_cpu::batch_of<S>(results.output_tangent),
            attn_cpu::batch_of<const S>(tangents.q),
            attn_cpu::batch_of<const S>(tangents.k),
            attn_cpu::batch_of<const S>(tangents.v)};
        attn_cpu::with_tiles<S>(true, sizes, [&](auto tiles) {
          using Tile =
              attn_cpu::SecondOrderTile<typename decltype(tiles)::type>;
          attn_cpu::backward_by<S, Tile>(args, attn_cpu::aten_runtime());
        });
      });
}

} // namespace

ALSO_REGISTER_AVX512_DISPATCH(attn_second_order_stub, &attn_second_order_kernel)

} // namespace at::native
