// The surroundings that FunctionsManual.edit.cpp has in upstream's
// torch/csrc/autograd/FunctionsManual.cpp.
#include <torch/csrc/autograd/FunctionsManual.h>

#include <ATen/ATen.h>

namespace torch::autograd::generated::details {

using at::Tensor;

#include GRAFT_EDIT

} // namespace torch::autograd::generated::details
