#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/native/cpu/AttnKernel.h>

#include <ATen/Dispatch.h>
#include <ATen/native/cpu/AttnKernels.h>
#include <ATen/native/cpu/AttnTensors.h>

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

} // namespace

ALSO_REGISTER_AVX512_DISPATCH(attn_stub, &attn_kernel)

} // namespace at::native
