// The same layer as a torch::autograd::Function: what one writes where Python
// is not at hand.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>

namespace linear_extension {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// An operator of ours, by its schema's types.
template <typename Signature>
auto op(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Signature>();
}

Tensor linear(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& bias) {
  static const auto f =
      op<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&)>(
          "linear_extension::linear");
  return f.call(input, weight, bias);
}

Tensor backward_input(const Tensor& grad, const Tensor& weight) {
  static const auto f = op<Tensor(const Tensor&, const Tensor&)>(
      "linear_extension::linear_backward_input");
  return f.call(grad, weight);
}

Tensor backward_weight(const Tensor& grad, const Tensor& input) {
  static const auto f = op<Tensor(const Tensor&, const Tensor&)>(
      "linear_extension::linear_backward_weight");
  return f.call(grad, input);
}

struct LinearFunction : public torch::autograd::Function<LinearFunction> {
  static Tensor forward(
      AutogradContext* ctx,
      const Tensor& input,
      const Tensor& weight,
      const std::optional<Tensor>& bias) {
    ctx->save_for_backward({input, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    at::AutoDispatchBelowADInplaceOrView
        below; // nothing of the forward is recorded
    return linear(input, weight, bias);
  }

  // G_X = G W, G_W = G^T X, G_b = the sum of G's rows; an undefined tensor is
  // what Python calls None.
  static variable_list backward(
      AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor& grad = grads[0];
    Tensor grad_input, grad_weight, grad_bias;
    if (ctx->needs_input_grad(0)) {
      grad_input = backward_input(grad, saved[1]);
    }
    if (ctx->needs_input_grad(1)) {
      grad_weight = backward_weight(grad, saved[0]);
    }
    // It counts only inputs that are tensors: without a bias there is no third
    // one to ask for.
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) {
      grad_bias = grad.sum(0);
    }
    return {grad_input, grad_weight, grad_bias};
  }
};

Tensor linear_cpp_function(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& bias) {
  return LinearFunction::apply(input, weight, bias);
}

} // namespace

TORCH_LIBRARY_FRAGMENT(linear_extension, m) {
  m.def(
      "linear_cpp_function(Tensor input, Tensor weight, Tensor? bias) -> "
      "Tensor");
}

// Composite: what is below autograd is called inside.
TORCH_LIBRARY_IMPL(linear_extension, CompositeImplicitAutograd, m) {
  m.impl("linear_cpp_function", linear_cpp_function);
}

} // namespace linear_extension
