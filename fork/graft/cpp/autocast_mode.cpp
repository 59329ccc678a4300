// The surroundings that autocast_mode.edit.cpp has in upstream's
// aten/src/ATen/autocast_mode.cpp.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <ATen/Operators.h>
#include <graft_ops.h>

namespace at::autocast {

// No wheel that the graft knows has MPS.
#undef KERNEL_MPS
#define KERNEL_MPS(...)

TORCH_LIBRARY_IMPL(aten, AutocastCPU, m) {
#include GRAFT_EDIT
}

// The lists of autocast_mode.h, to which autocast_mode.edit.h adds. Upstream
// has registered its own operators already; the rest are ours.
#define GRAFT_KERNEL(DEVICE, POLICY, OP, ...)                  \
  if constexpr (graft::is_ours(#OP)) {                         \
    KERNEL(c10::DeviceType::DEVICE, OP, ##__VA_ARGS__, POLICY) \
  }
#define GRAFT_CUDA_LOWER(...) \
  GRAFT_KERNEL(CUDA, lower_precision_fp, __VA_ARGS__)
#define GRAFT_CUDA_FP32(...) GRAFT_KERNEL(CUDA, fp32, __VA_ARGS__)
#define GRAFT_CUDA_PROMOTE(...) GRAFT_KERNEL(CUDA, promote, __VA_ARGS__)
#define GRAFT_XPU_LOWER(...) GRAFT_KERNEL(XPU, lower_precision_fp, __VA_ARGS__)
#define GRAFT_XPU_FP32(...) GRAFT_KERNEL(XPU, fp32, __VA_ARGS__)
#define GRAFT_XPU_PROMOTE(...) GRAFT_KERNEL(XPU, promote, __VA_ARGS__)

TORCH_LIBRARY_IMPL(aten, Autocast, m){
    // CUDA's
    AT_FORALL_LOWER_PRECISION_FP(GRAFT_CUDA_LOWER)
        AT_FORALL_FP32(GRAFT_CUDA_FP32) AT_FORALL_PROMOTE(GRAFT_CUDA_PROMOTE)}

TORCH_LIBRARY_IMPL(aten, AutocastXPU, m) {
  AT_FORALL_LOWER_PRECISION_FP(GRAFT_XPU_LOWER)
  AT_FORALL_FP32(GRAFT_XPU_FP32)
  AT_FORALL_PROMOTE(GRAFT_XPU_PROMOTE)
}

} // namespace at::autocast
