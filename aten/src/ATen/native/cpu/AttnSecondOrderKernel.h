#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>

namespace at::native {

// The tangents of attn_output's inputs, and the gradient of its output's
// tangent. What is zero, or not there, is undefined.
struct AttnTangents {
  Tensor q, k, v, grad_output;
};

// The results that are wanted are contiguous. The others are undefined.
struct AttnSecondOrder {
  Tensor output_tangent, grad_q, grad_k, grad_v;
};

// Fills the tangent of attn_output, and its gradients by q, k and v. At least
// one of q and k has a tangent. The rest is as for attn_backward_stub.
using attn_second_order_fn = void (*)(
    const AttnSecondOrder& results,
    const AttnTangents& tangents,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale,
    int64_t group);

DECLARE_DISPATCH(attn_second_order_fn, attn_second_order_stub)

} // namespace at::native
