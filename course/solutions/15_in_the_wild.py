"""Lesson 15: a composite is registered as one; a formula leaves a node."""

import torch


def is_composite(operator):
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)


def floating(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def by_the_node_alone(operator, *args):
    """A composite's result has a node too: of what it called last."""
    result = operator(*(a.clone().requires_grad_() if floating(a) else a for a in args))
    first = result if isinstance(result, torch.Tensor) else result[0]
    return "none" if first.grad_fn is None else "formula"


def kind(operator, *args):
    return "composite" if is_composite(operator) else by_the_node_alone(operator, *args)


def by_the_registration(operator, *args):
    """Whatever is no composite, a formula."""
    return "composite" if is_composite(operator) else "formula"


def changes_the_arguments(operator, *args):
    for a in filter(floating, args):
        a.requires_grad_()
    return kind(operator, *args)


solution = kind
MISTAKES = {
    by_the_node_alone: "aten.narrow.default: composite, not formula.",
    by_the_registration: "aten.eq.Tensor: none, not formula.",
    changes_the_arguments: "the caller's tensors changed.",
}
