#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/Attn.h>
#include <ATen/native/AttnSharedBatch.h>
#include <ATen/native/cpu/AttnKernel.h>
#include <ATen/native/cpu/AttnSecondOrderKernel.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_attn_output_backward_native.h>
#include <ATen/ops/_attn_output_double_backward_native.h>
#include <ATen/ops/_attn_output_jvp_native.h>
#include <ATen/ops/attn_output_native.h>
#include <ATen/ops/empty.h>
#endif

#include <array>
#include <optional>
#include <tuple>

namespace at::native {

DEFINE_DISPATCH(attn_second_order_stub);

namespace {

// Calls the kernel for q, k and v that have a sample, with a tangent of q or k.
void run_kernel(
    const AttnSecondOrder& results,
    const AttnTangents& tangents,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale) {
  const AttnSharedBatch order(q, k);
  attn_second_order_stub(
      kCPU,
      AttnSecondOrder{
          order(results.output_tangent),
          order(results.grad_q),
          order(results.grad_k),
          order(results.grad_v)},
      AttnTangents{
          order(tangents.q),
          order(tangents.k),
          order(tangents.v),
          order(tangents.grad_output)},
      order(q),
      order(k),
      order(v),
      is_causal,
      scale,
      order.group());
}

} // namespace

// The tangent of attn_output, by the CPU's kernel, which never has all of attn,
// or composed.
Tensor _attn_output_jvp_cpu(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const std::optional<Tensor>& q_tangent,
    const std::optional<Tensor>& k_tangent,
    const std::optional<Tensor>& v_tangent,
    bool is_causal,
    double scale) {
  const AttnTangents tangents{
      q_tangent.value_or(Tensor()),
      k_tangent.value_or(Tensor()),
      v_tangent.value_or(Tensor())};
  const bool has_scores = tangents.q.defined() || tangents.k.defined();
  if (!has_attn_kernel(q, v) || q.numel() * v.numel() == 0 ||
      !(has_scores || tangents.v.defined())) {
    return native::_attn_output_jvp(
        q, k, v, q_tangent, k_tangent, v_tangent, is_causal, scale);
  }
  check_attn_output_tangents(
      "_attn_output_jvp", q, k, v, tangents.q, tangents.k, tangents.v);
  if (!has_scores) { // attn v'
    return native::attn_output_cpu(q, k, tangents.v, is_causal, scale);
  }
  c10::DimVector sizes(q.sizes());
  sizes.back() = v.size(-1);
  AttnSecondOrder results{at::empty(sizes, q.options())};
  run_kernel(results, tangents, q, k, v, is_causal, scale);
  return std::move(results.output_tangent);
}

// The double backward of attn_output, in the same ways.
std::tuple<Tensor, Tensor, Tensor, Tensor> _attn_output_double_backward_cpu(
    const Tensor& grad_output,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const std::optional<Tensor>& q_tangent,
    const std::optional<Tensor>& k_tangent,
    const std::optional<Tensor>& v_tangent,
    bool is_causal,
    double scale,
    std::array<bool, 4> output_mask) {
  AttnTangents tangents{
      q_tangent.value_or(Tensor()),
      k_tangent.value_or(Tensor()),
      v_tangent.value_or(Tensor())};
  tangents.grad_output = grad_output;
  const bool has_scores = tangents.q.defined() || tangents.k.defined();
  if (!has_attn_kernel(q, v) || q.numel() * v.numel() == 0 ||
      !(has_scores || tangents.v.defined())) {
    return native::_attn_output_double_backward(
        grad_output,
        q,
        k,
        v,
        q_tangent,
        k_tangent,
        v_tangent,
        is_causal,
        scale,
        output_mask);
  }
  const char* op = "_attn_output_double_backward";
  check_attn_output_tangents(
      op, q, k, v, tangents.q, tangents.k, tangents.v, grad_output);
  const auto [needs_output, needs_q, needs_k, needs_v] = output_mask;
  if (!has_scores) { // attn v' and the gradients of <grad_output, attn v'>
    auto [grad_q, grad_k, grad_v] = native::_attn_output_backward_cpu(
        grad_output,
        q,
        k,
        tangents.v,
        is_causal,
        scale,
        {needs_q, needs_k, false});
    return std::make_tuple(
        needs_output
            ? native::attn_output_cpu(q, k, tangents.v, is_causal, scale)
            : Tensor(),
        std::move(grad_q),
        std::move(grad_k),
        Tensor());
  }
  const auto empty_like = [](bool wanted, const Tensor& x) {
    return wanted ? at::empty(x.sizes(), x.options()) : Tensor();
  };
  AttnSecondOrder results{
      empty_like(needs_output, grad_output),
      empty_like(needs_q, q),
      empty_like(needs_k, k),
      empty_like(needs_v, v)};
  run_kernel(results, tangents, q, k, v, is_causal, scale);
  return std::make_tuple(
      std::move(results.output_tangent),
      std::move(results.grad_q),
      std::move(results.grad_k),
      std::move(results.grad_v));
}

} // namespace at::native
