#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/Attn.h>
#include <ATen/native/cpu/AttnKernel.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_attn_backward_native.h>
#include <ATen/ops/attn_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tanh_backward.h>
#endif

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <array>
#include <optional>
#include <tuple>

namespace at::native {

DEFINE_DISPATCH(attn_stub);
DEFINE_DISPATCH(attn_backward_stub);

// attn = tanh(q kᵀ), output = attn v
std::tuple<Tensor, Tensor> attn(
    const Tensor& q, const Tensor& k, const Tensor& v) {
  check_attn_inputs(q, k, v, q.sym_sizes(), k.sym_sizes(), v.sym_sizes());
  auto attn = at::matmul(q, k.mT()).tanh_();
  auto output = at::matmul(attn, v);
  return std::make_tuple(std::move(output), std::move(attn));
}

// Asks for huge pages for a tensor that is large: malloc gives such memory back
// and gets it anew, and one fault for each small page takes longer than
// computing what is in it.
static void use_huge_pages(const Tensor& x) {
#if defined(__linux__)
  if (x.nbytes() >= (size_t(4) << 20)) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<uintptr_t>(x.const_data_ptr());
    const auto first = (begin + page - 1) / page * page;
    const auto size = (begin + x.nbytes() - first) / page * page;
    madvise(reinterpret_cast<void*>(first), size, MADV_HUGEPAGE); // or not
  }
#endif
}

// The same, fused. Complex inputs are left to the composed maths.
std::tuple<Tensor, Tensor> attn_fused(
    const Tensor& q, const Tensor& k, const Tensor& v) {
  if (!isFloatingType(q.scalar_type())) {
    return native::attn(q, k, v);
  }
  check_attn_inputs(q, k, v, q.sym_sizes(), k.sym_sizes(), v.sym_sizes());
  DimVector sizes(q.sizes());
  sizes.back() = v.size(-1);
  auto output = at::empty(sizes, q.options());
  sizes.back() = k.size(-2);
  auto attn = at::empty(sizes, q.options());
  if (attn.is_cpu()) {
    use_huge_pages(attn);
  }
  attn_stub(q.device().type(), output, attn, q, k, v);
  return std::make_tuple(std::move(output), std::move(attn));
}

// Backward of attn for the gradients of both its outputs, G_o of output and G_a
// of attn, either of which may be undefined, that is zero. With S̄ = (G_o vᴴ +
// G_a) ∘ conj(1 - attn²):
//   grad_q = S̄ conj(k), grad_k = S̄ᵀ conj(q), grad_v = attnᴴ G_o
// A gradient that output_mask leaves out, or that is zero, comes back
// undefined.
std::tuple<Tensor, Tensor, Tensor> _attn_backward(
    const std::optional<Tensor>& grad_output_opt,
    const std::optional<Tensor>& grad_attn_opt,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 3> output_mask) {
  check_attn_inputs(q, k, v, q.sym_sizes(), k.sym_sizes(), v.sym_sizes());
  const Tensor grad_output = grad_output_opt.value_or(Tensor());
  const Tensor grad_attn = grad_attn_opt.value_or(Tensor());
  Tensor grad_q, grad_k, grad_v;

  if ((output_mask[0] || output_mask[1]) &&
      (grad_output.defined() || grad_attn.defined())) {
    Tensor grad_scores;
    if (grad_output.defined()) {
      grad_scores = at::matmul(grad_output, v.mH());
      if (grad_attn.defined()) {
        grad_scores.add_(grad_attn);
      }
      at::tanh_backward_out(grad_scores, grad_scores, attn);
    } else {
      grad_scores = at::tanh_backward(grad_attn, attn);
    }
    if (output_mask[0]) {
      grad_q = at::matmul(grad_scores, k.conj());
    }
    if (output_mask[1]) {
      grad_k = at::matmul(grad_scores.mT(), q.conj());
    }
  }
  if (output_mask[2] && grad_output.defined()) {
    grad_v = at::matmul(attn.mH(), grad_output);
  }
  return std::make_tuple(
      std::move(grad_q), std::move(grad_k), std::move(grad_v));
}

// A result of attn, or its gradient: q's sizes but for the last one.
static void check_attn_result(
    const char* name, const Tensor& x, const Tensor& q, int64_t cols) {
  if (!x.defined()) {
    return;
  }
  DimVector sizes(q.sizes());
  sizes.back() = cols;
  TORCH_CHECK(
      x.scalar_type() == q.scalar_type() && x.device() == q.device() &&
          x.sizes() == sizes,
      "_attn_backward: ",
      name,
      " must be ",
      q.scalar_type(),
      " of sizes ",
      sizes,
      " on ",
      q.device(),
      ", but got ",
      x.scalar_type(),
      " of sizes ",
      x.sizes(),
      " on ",
      x.device());
}

// The same, fused, without a temporary as large as attn.
std::tuple<Tensor, Tensor, Tensor> _attn_backward_fused(
    const std::optional<Tensor>& grad_output_opt,
    const std::optional<Tensor>& grad_attn_opt,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 3> output_mask) {
  if (!isFloatingType(q.scalar_type())) {
    return native::_attn_backward(
        grad_output_opt, grad_attn_opt, q, k, v, attn, output_mask);
  }
  const Tensor grad_output = grad_output_opt.value_or(Tensor());
  const Tensor grad_attn = grad_attn_opt.value_or(Tensor());
  check_attn_inputs(q, k, v, q.sym_sizes(), k.sym_sizes(), v.sym_sizes());
  check_attn_result("attn", attn, q, k.size(-2));
  check_attn_result("grad_attn", grad_attn, q, k.size(-2));
  check_attn_result("grad_output", grad_output, q, v.size(-1));

  Tensor grad_q, grad_k, grad_v;
  if (grad_output.defined() || grad_attn.defined()) {
    if (output_mask[0]) {
      grad_q = at::empty(q.sizes(), q.options());
    }
    if (output_mask[1]) {
      grad_k = at::empty(k.sizes(), k.options());
    }
  }
  if (output_mask[2] && grad_output.defined()) {
    grad_v = at::empty(v.sizes(), v.options());
  }
  if (grad_q.defined() || grad_k.defined() || grad_v.defined()) {
    attn_backward_stub(
        q.device().type(),
        grad_q,
        grad_k,
        grad_v,
        grad_output,
        grad_attn,
        q,
        k,
        v,
        attn);
  }
  return std::make_tuple(
      std::move(grad_q), std::move(grad_k), std::move(grad_v));
}

} // namespace at::native
