#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/native/cpu/AttnThirdOrderKernel.h>

#include <ATen/Dispatch.h>
#include <ATen/native/cpu/AttnKernels.h>
#include <ATen/native/cpu/AttnTensors.h>
#include <ATen/native/cpu/AttnThirdOrderTile.h>

// Note [Tiles of attn's third order]
// They are made as those of Note [Tiles of attn's second derivatives]. From the
// outside in:
//   AttnThirdOrderKernel.cpp  what ATen calls, by the stub of the next file
//   AttnThirdOrderKernel.h    the stub, and which tensors it takes
//   AttnThirdOrderTile.h      the formulas: what is added to which result

namespace at::native {

namespace {

void attn_third_order_kernel(
    const AttnSecondOrder& results,
    const AttnTangents& u,
    const AttnTangents& w,
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
      kBFloat16, kHalf, q.scalar_type(), "_attn_output_triple_backward", [&] {
        using S = scalar_t;
        const attn_cpu::ThirdOrderArgs<S> args{
            {{sizes,
              attn_cpu::batch_of<S>(results.grad_q),
              attn_cpu::batch_of<S>(results.grad_k),
              attn_cpu::batch_of<S>(results.grad_v),
              attn_cpu::batch_of<const S>(u.grad_output),
              {},
              attn_cpu::batch_of<const S>(q),
              attn_cpu::batch_of<const S>(k),
              attn_cpu::batch_of<const S>(v),
              {},
              attn_cpu::form_of(is_causal, scale),
              group},
             attn_cpu::batch_of<S>(results.output_tangent),
             attn_cpu::batch_of<const S>(u.q),
             attn_cpu::batch_of<const S>(u.k),
             attn_cpu::batch_of<const S>(u.v)},
            attn_cpu::batch_of<const S>(w.grad_output),
            attn_cpu::batch_of<const S>(w.q),
            attn_cpu::batch_of<const S>(w.k),
            attn_cpu::batch_of<const S>(w.v)};
        attn_cpu::with_tiles<S>(true, sizes, [&](auto tiles) {
          using Tile = attn_cpu::ThirdOrderTile<typename decltype(tiles)::type>;
          attn_cpu::backward_by<S, Tile>(args, attn_cpu::aten_runtime());
        });
      });
}

} // namespace

ALSO_REGISTER_AVX512_DISPATCH(attn_third_order_stub, &attn_third_order_kernel)

} // namespace at::native
