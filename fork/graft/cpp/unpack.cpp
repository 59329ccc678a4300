// VariableType::unpack, which generated code calls and libtorch_cpu does not
// export.
#include <torch/csrc/autograd/generated/VariableType.h>

namespace torch::autograd::VariableType {

const at::Tensor& unpack(const at::Tensor& t, const char* name, int pos) {
  TORCH_CHECK(
      t.defined(),
      "argument '",
      name,
      "' (position ",
      pos,
      ") is an undefined tensor");
  return t;
}

} // namespace torch::autograd::VariableType
