#pragma once

#include <ATen/native/cpu/AttnSecondOrderKernel.h>

namespace at::native {

// Fills what `results` has, differentiated along tangents w, which grad_output
// may have too. u and w each have a tangent of q or of k. The rest is as for
// attn_second_order_stub.
using attn_third_order_fn = void (*)(
    const AttnSecondOrder& results,
    const AttnTangents& u,
    const AttnTangents& w,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale,
    int64_t group);

DECLARE_DISPATCH(attn_third_order_fn, attn_third_order_stub)

} // namespace at::native
