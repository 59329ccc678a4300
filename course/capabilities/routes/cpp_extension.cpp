// The operator in C++: a kernel, a fake kernel, and a Function for the key
// Autograd.
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tanh.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Two attn_cpu(const Tensor& q, const Tensor& k, const Tensor& v) {
  auto attn = at::tanh(at::matmul(q, k.mT()));
  return {at::matmul(attn, v), attn};
}

Two attn_meta(const Tensor& q, const Tensor& k, const Tensor& v) {
  auto rows = q.sym_sizes().vec(), columns = rows;
  rows.back() = v.sym_size(-1);
  columns.back() = k.sym_size(-2);
  return {q.new_empty_symint(rows), q.new_empty_symint(columns)};
}

struct Attn : torch::autograd::Function<Attn> {
  static variable_list forward(
      AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("capabilities::attn", "")
                         .typed<decltype(attn_cpu)>();
    auto [output, attn] = op.call(q, k, v);
    ctx->save_for_backward({q, k, v, attn});
    return {output, attn};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &q = saved[0], &k = saved[1], &v = saved[2], &attn = saved[3];
    auto scores = (at::matmul(grads[0], v.mT()) + grads[1]) * (1 - attn * attn);
    return {
        at::matmul(scores, k),
        at::matmul(scores.mT(), q),
        at::matmul(attn.mT(), grads[0])};
  }
};

Two attn_autograd(const Tensor& q, const Tensor& k, const Tensor& v) {
  auto results = Attn::apply(q, k, v);
  return {results[0], results[1]};
}

} // namespace

TORCH_LIBRARY(capabilities, m) {
  m.def("attn(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)");
  m.impl("attn", c10::DispatchKey::CPU, TORCH_FN(attn_cpu));
  m.impl("attn", c10::DispatchKey::Meta, TORCH_FN(attn_meta));
  m.impl("attn", c10::DispatchKey::Autograd, TORCH_FN(attn_autograd));
}
