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

DECLARE_DISPATCH(attn_fn, attn_stub)

} // namespace at::native
