// attn's kernels for CUDA, with what launches them, in place of those for a
// CPU.
#include <torch/library.h>

#include "cuda_emulator.h"

#include <ATen/native/cuda/Attn.cu>
#include <ATen/native/cuda/AttnBackward.cu>

namespace {

using at::Tensor;
using std::optional;

// As torchgen's wrappers do, attn and attn_backward make the device of their
// first argument the current one, if that is a tensor.
using Guard = optional<c10::cuda::CUDAGuard>;

std::tuple<Tensor, Tensor> attn(
    const Tensor& q, const Tensor& k, const Tensor& v) {
  const Guard guard(q.device());
  return at::native::attn_cuda(q, k, v);
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
  return at::native::_attn_backward_cuda(
      grad_output, grad_attn, q, k, v, attn, output_mask);
}

// The kernels alone, into results that are given.
void forward(
    const Tensor& output,
    const Tensor& attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v) {
  namespace tiles = at::native::attn_tiles;
  const Guard guard(q.device());
  TORCH_CHECK(tiles::for_dtype_of(q, [&](auto type) {
    return tiles::sweep_rows<decltype(type), false>(
        tiles::with_aligned_rows(q),
        tiles::with_aligned_rows(k),
        tiles::with_aligned_rows(v),
        attn,
        {},
        output);
  }));
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
  namespace tiles = at::native::attn_tiles;
  const Guard guard(q.device());
  const at::native::AttnGradients grads{
      grad_output, grad_attn, grad_q, grad_k, grad_v};
  TORCH_CHECK(tiles::for_dtype_of(q, [&](auto type) {
    return tiles::sweep_backward<decltype(type)>(grads, q, k, v, attn);
  }));
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
