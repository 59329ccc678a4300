#pragma once

#include <ATen/native/DispatchStub.h>

namespace at {
class Tensor;
}

namespace at::native {

// The most columns of q, k and v that the kernels take, so that their memory is
// bounded. Where products are as wide, fusing them gains little.
constexpr int64_t ATTN_MAX_WIDTH = 1024;

// Whether the kernels take q and v: not if they are complex, or wider.
bool has_attn_kernel(const Tensor& q, const Tensor& v);

// Fills output and attn, which are contiguous, from q, k and v of any strides.
using attn_fn = void (*)(
    const Tensor& output,
    const Tensor& attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v);

DECLARE_DISPATCH(attn_fn, attn_stub)

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
