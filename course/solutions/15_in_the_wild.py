"""Lesson 15: a composite is registered as one; a formula leaves a node."""

import torch


def is_composite(operator):
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)


def first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


def kind(operator, *args):
    if is_composite(operator):
        return "composite"
    floats = [
        a.clone().requires_grad_()
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in args
    ]
    return "none" if first(operator(*floats)).grad_fn is None else "formula"


def by_the_node_alone(operator, *args):
    """A composite's result has a node too: of what it called last."""
    floats = [
        a.clone().requires_grad_()
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in args
    ]
    return "none" if first(operator(*floats)).grad_fn is None else "formula"


def by_the_registration(operator, *args):
    """Whatever is no composite, a formula."""
    return "composite" if is_composite(operator) else "formula"


def changes_the_arguments(operator, *args):
    if is_composite(operator):
        return "composite"
    for a in args:
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            a.requires_grad_()
    return "none" if first(operator(*args)).grad_fn is None else "formula"


solution = kind
MISTAKES = {
    by_the_node_alone: "aten.narrow.default: composite, not formula.",
    by_the_registration: "aten.eq.Tensor: none, not formula.",
    changes_the_arguments: "the caller's tensors changed.",
}
