#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/macros/Export.h>

#include <array>
#include <vector>

namespace at::native {

// Raises an error unless q, k and v are of one dtype that has products and
// tanh, on one device, and of the sizes q (*, m, d), k (*, n, d), v (*, n, e),
// where * is any number of batch dimensions, the same for all three. The sizes
// are those of one sample, which under vmap are not the tensors' own. `op` is
// the operator's name. If `grouped`, dimensions * of both k and v may be 1.
TORCH_API void check_attn_inputs(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    c10::SymIntArrayRef q_sizes,
    c10::SymIntArrayRef k_sizes,
    c10::SymIntArrayRef v_sizes,
    const char* op = "attn",
    bool grouped = false);

// The same for the arguments of _attn_backward. Raises an error for attn too,
// or a gradient given, that is not as attn's result is.
TORCH_API void check_attn_backward_inputs(
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn);

// Check the arguments of attn_output, and of its backward, in the same way.
TORCH_API void check_attn_output_inputs(
    const Tensor& q, const Tensor& k, const Tensor& v);
TORCH_API void check_attn_output_backward_inputs(
    const Tensor& grad_output,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v);

// Checks the arguments of attn_output's second derivatives, in the same way.
// `op` is the operator's name, and `names` are those of the last four. What is
// undefined is not checked.
TORCH_API void check_attn_output_tangents(
    const char* op,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& q_tangent,
    const Tensor& k_tangent,
    const Tensor& v_tangent,
    const Tensor& grad_output = {},
    std::array<const char*, 4> names = {
        "q_tangent", "k_tangent", "v_tangent", "grad_output"});

// A tensor and its mixed derivatives along N directions, 2^N in all: element S
// is the one along the directions i whose bits 1 << i are in S. What is zero is
// undefined.
using AttnJet = std::vector<Tensor>;

// Checks the arguments of _attn_output_triple_backward, in the same way.
TORCH_API void check_attn_output_triple_backward_inputs(
    const AttnJet& grad_output,
    const AttnJet& q,
    const AttnJet& k,
    const AttnJet& v);

// Returns the derivatives along all directions of attn_output, and of the
// gradients of <grad_output, attn_output> by q, k and v. It is composed of
// calls that have derivatives themselves.
TORCH_API std::array<Tensor, 4> attn_output_derivatives(
    const AttnJet& grad_output,
    const AttnJet& q,
    const AttnJet& k,
    const AttnJet& v,
    bool is_causal,
    double scale,
    std::array<bool, 4> output_mask);

} // namespace at::native
