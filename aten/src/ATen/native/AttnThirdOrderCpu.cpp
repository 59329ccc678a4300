#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/Attn.h>
#include <ATen/native/AttnSharedBatch.h>
#include <ATen/native/cpu/AttnKernel.h>
#include <ATen/native/cpu/AttnThirdOrderKernel.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_attn_output_backward_native.h>
#include <ATen/ops/_attn_output_double_backward_native.h>
#include <ATen/ops/_attn_output_jvp_native.h>
#include <ATen/ops/_attn_output_triple_backward_native.h>
#include <ATen/ops/empty.h>
#endif

#include <array>
#include <cstddef>
#include <optional>
#include <tuple>
#include <utility>

namespace at::native {

DEFINE_DISPATCH(attn_third_order_stub);

namespace {

using Results = std::array<Tensor, 4>;

// Adds y to x, of which any may be undefined, that is zero.
void add_each(Results& x, const Results& y) {
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i].defined() && y[i].defined()) {
      x[i].add_(y[i]);
    } else if (y[i].defined()) {
      x[i] = y[i];
    }
  }
}

} // namespace

// The third order of attn_output, by the CPU's kernel, which never has all of
// attn, or composed. If u has a tangent of v alone, attn_output is linear in
// it: what is left are second derivatives with that tangent in place of v. So
// it is for w, and with w's tangent of grad_output in place of that.
std::tuple<Tensor, Tensor, Tensor, Tensor> _attn_output_triple_backward_cpu(
    const std::optional<Tensor>& grad_output,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const std::optional<Tensor>& u_q,
    const std::optional<Tensor>& u_k,
    const std::optional<Tensor>& u_v,
    const std::optional<Tensor>& w_grad_output,
    const std::optional<Tensor>& w_q,
    const std::optional<Tensor>& w_k,
    const std::optional<Tensor>& w_v,
    bool is_causal,
    double scale,
    std::array<bool, 4> output_mask) {
  if (!has_attn_kernel(q, v) || q.numel() * v.numel() == 0) {
    return native::_attn_output_triple_backward(
        grad_output,
        q,
        k,
        v,
        u_q,
        u_k,
        u_v,
        w_grad_output,
        w_q,
        w_k,
        w_v,
        is_causal,
        scale,
        output_mask);
  }
  const auto given = [](const std::optional<Tensor>& x) {
    return x.value_or(Tensor());
  };
  const AttnTangents u{given(u_q), given(u_k), given(u_v), given(grad_output)};
  const AttnTangents w{
      given(w_q), given(w_k), given(w_v), given(w_grad_output)};
  check_attn_output_triple_backward_inputs(
      {u.grad_output, {}, w.grad_output, {}},
      {q, u.q, w.q, {}},
      {k, u.k, w.k, {}},
      {v, u.v, w.v, {}});
  const auto [needs_output, needs_q, needs_k, needs_v] = output_mask;
  const bool has_u = u.q.defined() || u.k.defined();
  const bool has_w = w.q.defined() || w.k.defined();

  if (!has_u || !has_w) {
    Results sum;
    // Adds the second derivatives along tangents of q and k, for values `x`.
    const auto add_second_order = [&](const Tensor& x, const AttnTangents& t) {
      if (!x.defined() || !(t.q.defined() || t.k.defined())) {
        return;
      }
      if (u.grad_output.defined()) {
        auto [output, grad_q, grad_k, grad_v] =
            native::_attn_output_double_backward_cpu(
                u.grad_output,
                q,
                k,
                x,
                t.q,
                t.k,
                {},
                is_causal,
                scale,
                {needs_output, needs_q, needs_k, false});
        add_each(sum, {output, grad_q, grad_k, grad_v});
      } else if (needs_output) {
        add_each(
            sum,
            {native::_attn_output_jvp_cpu(
                q, k, x, t.q, t.k, {}, is_causal, scale)});
      }
    };
    add_second_order(u.v, has_u ? AttnTangents{} : w);
    add_second_order(w.v, has_w ? AttnTangents{} : u);
    if (w.grad_output.defined() && has_u) {
      add_each(
          sum,
          std::apply(
              [](const auto&... x) { return Results{x...}; },
              native::_attn_output_double_backward_cpu(
                  w.grad_output,
                  q,
                  k,
                  v,
                  u_q,
                  u_k,
                  u_v,
                  is_causal,
                  scale,
                  {false, needs_q, needs_k, needs_v})));
    } else if (w.grad_output.defined() && u.v.defined()) {
      auto [grad_q, grad_k, grad_v] = native::_attn_output_backward_cpu(
          w.grad_output,
          q,
          k,
          u.v,
          is_causal,
          scale,
          {needs_q, needs_k, false});
      add_each(sum, {Tensor(), grad_q, grad_k, grad_v});
    }
    return std::tuple_cat(sum);
  }

  const bool has_grad = u.grad_output.defined() || w.grad_output.defined();
  const auto empty_like = [](bool wanted, const Tensor& x) {
    return wanted ? at::empty(x.sizes(), x.options()) : Tensor();
  };
  AttnSecondOrder results{
      Tensor(),
      empty_like(needs_q && has_grad, q),
      empty_like(needs_k && has_grad, k),
      empty_like(needs_v && has_grad, v)};
  if (needs_output) {
    c10::DimVector sizes(q.sizes());
    sizes.back() = v.size(-1);
    results.output_tangent = at::empty(sizes, q.options());
  }
  const AttnSharedBatch order(q, k);
  const auto ordered = [&](const AttnTangents& x) {
    return AttnTangents{
        order(x.q), order(x.k), order(x.v), order(x.grad_output)};
  };
  attn_third_order_stub(
      kCPU,
      AttnSecondOrder{
          order(results.output_tangent),
          order(results.grad_q),
          order(results.grad_k),
          order(results.grad_v)},
      ordered(u),
      ordered(w),
      order(q),
      order(k),
      order(v),
      is_causal,
      scale,
      order.group());
  return std::make_tuple(
      std::move(results.output_tangent),
      std::move(results.grad_q),
      std::move(results.grad_k),
      std::move(results.grad_v));
}

} // namespace at::native
