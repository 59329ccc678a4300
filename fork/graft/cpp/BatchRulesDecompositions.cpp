// The surroundings that BatchRulesDecompositions.edit.cpp has in upstream's
// aten/src/ATen/functorch/BatchRulesDecompositions.cpp.
#include <ATen/NativeFunctions.h>
#include <ATen/Operators.h>
#include <ATen/functorch/BatchRulesHelper.h>
#include <torch/library.h>

namespace at::functorch {

TORCH_LIBRARY_IMPL(aten, FuncTorchBatchedDecomposition, m) {
#include GRAFT_EDIT
}

// A kernel for this alias key does not reach FuncTorchBatched's entry in the
// dispatch table: that is computed when a kernel or a fallback for
// FuncTorchBatched itself comes or goes. Upstream's fallback comes after all
// operators; here it was there before ours. So let kernels come and go.
static const bool refreshed = [] {
  torch::Library m(
      torch::Library::IMPL,
      "aten",
      DispatchKey::FuncTorchBatched,
      __FILE__,
      __LINE__);
#include GRAFT_EDIT
  return true;
}();

} // namespace at::functorch
