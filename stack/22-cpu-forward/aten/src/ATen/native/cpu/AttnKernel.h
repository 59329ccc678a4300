#pragma once

#include <ATen/native/DispatchStub.h>

namespace at {
class Tensor;
}

namespace at::native {

// The kernels take q, k and v of at most this many columns, which bounds their
// scratch memory. Fusing wider products would gain little.
constexpr int64_t ATTN_MAX_WIDTH = 1024;

// Returns whether the kernels take q and v: if they are real, and not wider.
bool has_attn_kernel(const Tensor& q, const Tensor& v);

// Fills output and attn, which are contiguous, from q, k and v of any strides.
// If attn is undefined, it is not stored.
using attn_fn = void (*)(
    const Tensor& output,
    const Tensor& attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale);

DECLARE_DISPATCH(attn_fn, attn_stub)

} // namespace at::native
