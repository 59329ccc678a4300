"""Lesson 10: the shape, dtype and device of all inner products, without computing one."""

import torch


def pairwise_fake(x, y):
    dtype = torch.promote_types(x.dtype, torch.float)
    return x.new_empty(*x.shape[:-1], y.shape[-2], dtype=dtype)


def on_the_cpu(x, y):
    return torch.empty(
        *x.shape[:-1], y.shape[-2], dtype=torch.promote_types(x.dtype, torch.float)
    )


def of_the_inputs_dtype(x, y):
    return x.new_empty(*x.shape[:-1], y.shape[-2])


def for_matrices(x, y):
    return x.new_empty(
        x.shape[0], y.shape[0], dtype=torch.promote_types(x.dtype, torch.float)
    )


solution = pairwise_fake
MISTAKES = {
    on_the_cpu: "The device is cpu, not meta.",
    of_the_inputs_dtype: "The dtype is torch.bfloat16, not torch.float32.",
    for_matrices: "The shape is",
}
