#pragma once

#include <ATen/native/DispatchStub.h>

namespace at {
class Tensor;
}

namespace at::native {

struct AttnGradients;

// Fills those gradients that are wanted. q, k, v, attn and the gradients given
// have any strides.
using attn_backward_fn = void (*)(
    const AttnGradients& grads,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn);

DECLARE_DISPATCH(attn_backward_fn, attn_backward_stub)

} // namespace at::native
