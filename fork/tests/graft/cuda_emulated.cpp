// attn's kernels for CUDA, with what launches them, in place of those for a
// CPU.
#include <torch/library.h>

#include "cuda_emulator.h"

#include <Attn.cu>

namespace {

using at::Tensor;
using std::optional;

// As torchgen's wrappers do, attn and attn_backward make the device of their
// first argument the current one, if that is a tensor.
using Guard = optional<c10::cuda::CUDAGuard>;

std::tuple<Tensor, Tensor> attn(
    const Tensor& q, const Tensor& k, const Tensor& v) {
  const Guard guard(q.device());
  at::DimVector sizes(q.sizes());
  sizes.back() = v.size(-1);
  Tensor output = at::empty(sizes, q.options());
  sizes.back() = k.size(-2);
  Tensor attn = at::empty(sizes, q.options());
  at::native::attn_kernel_cuda(output, attn, q, k, v);
  return {output, attn};
}

std::tuple<Tensor, Tensor, Tensor> attn_backward(
    const optional<Tensor>& grad_output,
    const optional<Tensor>& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 3> output_mask) {
  Guard guard;
  if (grad_output && grad_output->defined()) {
    guard.emplace(q.device());
  }
  const Tensor given[] = {
      grad_output.value_or(Tensor()), grad_attn.value_or(Tensor())};
  const bool some = given[0].defined() || given[1].defined();
  const bool wanted[] = {
      output_mask[0] && some,
      output_mask[1] && some,
      output_mask[2] && given[0].defined()};
  const Tensor* of[] = {&q, &k, &v};
  Tensor grads[3];
  for (int i = 0; i < 3; ++i) {
    if (wanted[i]) {
      grads[i] = at::empty(of[i]->sizes(), q.options());
    }
  }
  at::native::attn_backward_kernel_cuda(
      grads[0], grads[1], grads[2], given[0], given[1], q, k, v, attn);
  return {grads[0], grads[1], grads[2]};
}

// The kernels alone, into results that are given.
void forward(
    const Tensor& output,
    const Tensor& attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v) {
  const Guard guard(q.device());
  at::native::attn_kernel_cuda(output, attn, q, k, v);
}

void backward(
    const Tensor& grad_q,
    const Tensor& grad_k,
    const Tensor& grad_v,
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn) {
  const Guard guard(q.device());
  at::native::attn_backward_kernel_cuda(
      grad_q, grad_k, grad_v, grad_output, grad_attn, q, k, v, attn);
}

// How many kernels have been launched; the next ones, on a device of this kind.
int64_t device(int64_t major, int64_t room, int64_t processors) {
  emulator::major = static_cast<int>(major);
  emulator::room = static_cast<int>(room);
  emulator::processors = static_cast<int>(processors);
  return emulator::launches;
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("attn", attn);
  library.impl("_attn_backward", attn_backward);
}

TORCH_LIBRARY(attn_emulated, library) {
  library.def("device", device);
  library.def("forward", forward);
  library.def("backward", backward);
}

} // namespace
