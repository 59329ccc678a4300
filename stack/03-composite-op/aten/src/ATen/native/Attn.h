#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/macros/Export.h>

namespace at::native {

// Raises an error unless q, k and v are of one dtype that has products and
// tanh, on one device, and of the sizes q (*, m, d), k (*, n, d), v (*, n, e),
// where * is any number of batch dimensions, the same for all three. The sizes
// are those of one sample, which under vmap are not the tensors' own.
TORCH_API void check_attn_inputs(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    c10::SymIntArrayRef q_sizes,
    c10::SymIntArrayRef k_sizes,
    c10::SymIntArrayRef v_sizes);

} // namespace at::native
