#pragma once

#include <ATen/native/DispatchStub.h>

namespace at {
class Tensor;
}

namespace at::native {

// Fills output and attn, which are contiguous, from q, k and v of any strides.
using attn_fn = void (*)(
    const Tensor& output,
    const Tensor& attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v);

// Fills those of grad_q, grad_k and grad_v that are defined, which are
// contiguous. grad_output or grad_attn may be undefined, that is zero.
using attn_backward_fn = void (*)(
    const Tensor& grad_q,
    const Tensor& grad_k,
    const Tensor& grad_v,
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn);

DECLARE_DISPATCH(attn_fn, attn_stub)
DECLARE_DISPATCH(attn_backward_fn, attn_backward_stub)

} // namespace at::native
