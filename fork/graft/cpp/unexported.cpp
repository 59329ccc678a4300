// What generated code calls and libtorch_cpu does not export.
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/PlumbingHelper.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/generated/VariableType.h>

namespace torch::autograd {

// What the generator makes of `zeros_like(x)` in a formula.
at::Tensor TypeAndSize::zeros() {
  return at::zeros_symint(sym_sizes, options);
}

} // namespace torch::autograd

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

namespace at::functorch {

void vmap_check_escaped(
    const std::optional<DynamicLayer>& layer, const char* what) {
  TORCH_CHECK(
      layer.has_value(),
      what,
      ": no vmap is under way: a tensor made inside of a vmapped function was "
      "used outside of it");
}

} // namespace at::functorch
