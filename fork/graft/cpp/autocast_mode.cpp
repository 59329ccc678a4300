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
#define GRAFT_KERNEL(POLICY, OP, ...)              \
  if constexpr (graft::is_ours(#OP)) {             \
    KERNEL(device_type, OP, ##__VA_ARGS__, POLICY) \
  }
#define GRAFT_LOWER(...) GRAFT_KERNEL(lower_precision_fp, __VA_ARGS__)
#define GRAFT_FP32(...) GRAFT_KERNEL(fp32, __VA_ARGS__)
#define GRAFT_PROMOTE(...) GRAFT_KERNEL(promote, __VA_ARGS__)
#define GRAFT_LISTS                         \
  AT_FORALL_LOWER_PRECISION_FP(GRAFT_LOWER) \
  AT_FORALL_FP32(GRAFT_FP32)                \
  AT_FORALL_PROMOTE(GRAFT_PROMOTE)

TORCH_LIBRARY_IMPL(aten, Autocast, m) {
  constexpr auto device_type = c10::DeviceType::CUDA;
  GRAFT_LISTS
}

TORCH_LIBRARY_IMPL(aten, AutocastXPU, m) {
  constexpr auto device_type = c10::DeviceType::XPU;
  GRAFT_LISTS
}

} // namespace at::autocast
