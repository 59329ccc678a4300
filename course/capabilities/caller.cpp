// A program without Python: calls the operator that it is named, and asks for a
// gradient.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tanh.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/autograd.h>

#include <iostream>

namespace {

at::Tensor input(int64_t rows, int64_t columns) {
  return at::linspace(-1, 1, rows * columns, at::kDouble)
      .view({rows, columns})
      .requires_grad_();
}

at::Tensor gradient(const at::Tensor& result, const at::Tensor& of) {
  return torch::autograd::grad(
      {result.sum()}, {of}, {}, /*retain_graph=*/true)[0];
}

int say(const char* what, int status) {
  std::cout << what << std::endl;
  return status;
}

} // namespace

// The operator's name, then the library that has it, if it is not torch's own.
// The status is 0 if all is right, 1 if the operator cannot be called, 2 if it
// can, and the result is wrong.
int main(int count, char** words) {
  if (count > 2 && dlopen(words[2], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    return say(dlerror(), 1);
  }
  auto op = c10::Dispatcher::singleton().findSchema({words[1], ""});
  if (!op) {
    return say("without Python there is no such operator", 1);
  }
  const auto q = input(2, 3), k = input(5, 3), v = input(5, 4);
  torch::jit::Stack stack{q, k, v};
  try {
    op->callBoxed(stack);
  } catch (const std::exception& error) {
    return say(error.what(), 1);
  }
  const auto output = stack[0].toTensor(),
             wanted = at::matmul(at::tanh(at::matmul(q, k.mT())), v);
  if (!at::allclose(output, wanted)) {
    return say("the output is wrong", 2);
  }
  if (!output.requires_grad()) {
    return say("the output has no graph", 2);
  }
  for (const auto& x : {q, k, v}) {
    if (!at::allclose(gradient(output, x), gradient(wanted, x))) {
      return say("a gradient is wrong", 2);
    }
  }
  return 0;
}
