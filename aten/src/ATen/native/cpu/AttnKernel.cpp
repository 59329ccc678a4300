#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/native/cpu/AttnKernel.h>

#include <ATen/Dispatch.h>
#include <ATen/native/AttnGradients.h>
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
