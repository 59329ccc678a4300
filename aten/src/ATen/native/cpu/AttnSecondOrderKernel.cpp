#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/native/cpu/AttnSecondOrderKernel.h>

#include <ATen/Dispatch.h>
#include <ATen/native/cpu/AttnBackward.h>
#include <ATen/native/cpu/AttnFmaSecondOrder.h>
#include <ATen/native/cpu/AttnTensors.h>
#include <ATen/native/cpu/AttnVnniSecondOrder.h>

// Note [Tiles of attn's second derivatives]
// They are made by the driver of Note [Tiles of attn's backward]. From the
// outside in:
//   AttnSecondOrderKernel.cpp  what ATen calls, by the stub of the next file
//   AttnSecondOrderKernel.h    the stub, and which tensors it takes
//   AttnSecondOrder.h          the formulas: what is added to which result
//   AttnFmaSecondOrder.h       a tile by FMA, for any shape
//   AttnVnniSecondOrder.h      a tile in bfloat16 or half, by VnniProducts

namespace at::native {

namespace {

// Chooses the kernel as the backward does. See AttnKernels.h.
template <typename S>
void second_order(
    const attn_cpu::SecondOrderArgs<S>& args,
    const attn_cpu::Runtime& runtime) {
  using namespace attn_cpu;
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<S, at::BFloat16>) {
    if (Pairs::fits_backward(args.sizes) && Pairs::available()) {
      return backward_by<S, VnniSecondOrder<Pairs>>(args, runtime);
    }
  }
  if constexpr (!std::is_same_v<S, at::opmath_type<S>>) {
    if (Brgemm<S>::fits_backward(args.sizes) && Brgemm<S>::available()) {
      return backward_by<S, VnniSecondOrder<Brgemm<S>>>(args, runtime);
    }
  }
#endif
  backward_by<S, FmaSecondOrder<S>>(args, runtime);
}

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
        second_order(args, attn_cpu::aten_runtime());
      });
}

} // namespace

ALSO_REGISTER_AVX512_DISPATCH(attn_second_order_stub, &attn_second_order_kernel)

} // namespace at::native
