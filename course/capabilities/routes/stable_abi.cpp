// The kernel against the stable ABI alone, for every release from 2.10 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace {

using torch::stable::Tensor;

Tensor tanh(const Tensor& x) {
  StableIValue stack[] = {torch::stable::detail::from(x)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::tanh", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

std::tuple<Tensor, Tensor> attn(Tensor q, Tensor k, Tensor v) {
  auto weights =
      tanh(torch::stable::matmul(q, torch::stable::transpose(k, -2, -1)));
  return {torch::stable::matmul(weights, v), weights};
}

} // namespace

STABLE_TORCH_LIBRARY(capabilities, m) {
  m.def("attn(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(capabilities, CPU, m) {
  m.impl("attn", TORCH_BOX(&attn));
}
