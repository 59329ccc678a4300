#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Attn.h>
#include <ATen/native/cpu/AttnKernel.h>
#include <c10/core/CPUAllocator.h>

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

#include <algorithm>
#include <array>
#include <new>
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

namespace {

// Large memory in huge pages, for one fault for each small page takes longer
// than computing what is in it. It is mapped for the tensor alone: the advice
// cannot be taken back, so memory of malloc's would have it for the next owner.
// From this size on malloc too maps each block by itself, unless it is told
// otherwise.
class HugePages final : public c10::Allocator {
 public:
  static constexpr size_t MIN_SIZE = size_t(32) << 20;

  c10::DataPtr allocate(size_t size) override {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (size >= MIN_SIZE) {
      if (char* data = map(size)) {
        c10::profiledCPUMemoryReporter().New(data, size);
        return {data, data, &free, c10::Device(c10::DeviceType::CPU)};
      }
    }
#endif
    return c10::GetCPUAllocator()->allocate(size);
  }
  void copy_data(void* dst, const void* src, size_t size) const override {
    default_copy_data(dst, src, size);
  }

#if defined(__linux__) && defined(MADV_HUGEPAGE)
 private:
  static constexpr size_t HUGE = size_t(2) << 20;

  static size_t page() {
    return static_cast<size_t>(sysconf(_SC_PAGESIZE));
  }

  // A small page with the size of the whole mapping, then the memory, which
  // begins with a huge page.
  static char* map(size_t size) {
    const auto before = page();
    const auto used = before + (size + before - 1) / before * before;
    void* const mapping = mmap(
        nullptr,
        used + HUGE,
        PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS,
        -1,
        0);
    if (mapping == MAP_FAILED) {
      return nullptr; // malloc may have some left, and else has the message
    }
    auto* const begin = static_cast<char*>(mapping);
    const auto end_of_first = reinterpret_cast<uintptr_t>(begin) + before;
    const auto skipped = (HUGE - end_of_first % HUGE) % HUGE;
    char* const first = begin + skipped;
    if (skipped > 0) {
      munmap(begin, skipped);
    }
    if (skipped < HUGE) {
      munmap(first + used, HUGE - skipped);
    }
    new (first) size_t(used);
    madvise(first + before, used - before, MADV_HUGEPAGE); // or not
    return first + before;
  }

  static void free(void* data) {
    c10::profiledCPUMemoryReporter().Delete(data);
    char* const first = static_cast<char*>(data) - page();
    munmap(first, *reinterpret_cast<size_t*>(first));
  }
#endif
};

// As at::empty, but a large one on a CPU is in huge pages.
Tensor empty_attn(IntArrayRef sizes, const TensorOptions& options) {
  // A program may have an allocator of its own.
  if (!options.device().is_cpu() ||
      c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) {
    return at::empty(sizes, options);
  }
  static HugePages huge_pages;
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  return at::detail::empty_generic(
      sizes, &huge_pages, keys, dtype, std::nullopt);
}

} // namespace

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
  auto attn = empty_attn(sizes, q.options());
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
