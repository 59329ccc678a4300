"""Lesson 3: dy = du.T a v + u.T da v + u.T a dv, and what stands beside each differential."""

import torch


def bilinear_backward(grad, u, a, v):
    u, a, v = u.conj(), a.conj(), v.conj()
    return grad * (a @ v), grad * torch.outer(u, v), grad * (u @ a)


def turned_around(grad, u, a, v):
    """The gradient of a as v u.T."""
    grad_u, grad_a, grad_v = bilinear_backward(grad, u, a, v)
    return grad_u, grad_a.T, grad_v


def not_conjugated(grad, u, a, v):
    return grad * (a @ v), grad * torch.outer(u, v), grad * (u @ a)


def without_the_chain(grad, u, a, v):
    return bilinear_backward(torch.ones_like(grad), u, a, v)


solution = bilinear_backward
MISTAKES = {
    turned_around: "The gradient of a has the shape",
    not_conjugated: "complex: The gradient of u is wrong",
    without_the_chain: "real: The gradient of u is wrong",
}
