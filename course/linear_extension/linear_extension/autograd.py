"""What the operators' kernels do not say: shapes without data, gradients, and batches.

The three products are closed: the gradients of each are made of the others, so that they can be
differentiated as often as one likes.
"""

import torch

ops = torch.ops.linear_extension


def define(name, fake, backward):
    """Registers for an operator the shape of its result, and its gradients."""
    torch.library.register_fake(f"linear_extension::{name}", fake)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    torch.library.register_autograd(
        f"linear_extension::{name}", backward, setup_context=setup_context
    )


def linear_fake(input, weight, bias):
    torch._check(
        input.dim() == 2 and weight.dim() == 2, lambda: "linear: wants matrices"
    )
    torch._check(
        input.shape[1] == weight.shape[1],
        lambda: "linear: input (N, i) and weight (o, i) must have the same i",
    )
    return input.new_empty(input.shape[0], weight.shape[0])


def linear_backward(ctx, grad):
    """G_X = G W, G_W = Gᵀ X, G_b = the sum of G's rows."""
    input, weight = ctx.saved_tensors
    wants = ctx.needs_input_grad
    return (
        ops.linear_backward_input(grad, weight) if wants[0] else None,
        ops.linear_backward_weight(grad, input) if wants[1] else None,
        grad.sum(0) if wants[2] else None,
    )


def backward_input_backward(ctx, outer):
    """Of P = G W, for the gradient H of P: H Wᵀ and Gᵀ H."""
    grad, weight = ctx.saved_tensors
    wants = ctx.needs_input_grad
    return (
        ops.linear(outer, weight, None) if wants[0] else None,
        ops.linear_backward_weight(grad, outer) if wants[1] else None,
    )


def backward_weight_backward(ctx, outer):
    """Of P = Gᵀ X, for the gradient H of P: X Hᵀ and G H."""
    grad, input = ctx.saved_tensors
    wants = ctx.needs_input_grad
    return (
        ops.linear(input, outer, None) if wants[0] else None,
        ops.linear_backward_input(grad, outer) if wants[1] else None,
    )


define("linear", linear_fake, linear_backward)
define(
    "linear_backward_input",
    lambda grad, weight: grad.new_empty(grad.shape[0], weight.shape[1]),
    backward_input_backward,
)
define(
    "linear_backward_weight",
    lambda grad, input: grad.new_empty(grad.shape[1], input.shape[1]),
    backward_weight_backward,
)
