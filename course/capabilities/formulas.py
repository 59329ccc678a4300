"""The function that every route registers, and its derivatives, in tensor operations.

q is (*, m, d), k is (*, n, d), v is (*, n, e); output is (*, m, e), attn is (*, m, n).
"""

import torch


def forward(q, k, v):
    attn = torch.tanh(q @ k.mT)
    return attn @ v, attn


def shapes(q, k, v):
    """What a fake kernel returns: tensors of the right form, without values."""
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(
        *q.shape[:-1], k.shape[-2]
    )


def backward(grad_output, grad_attn, q, k, v, attn):
    grad_scores = (grad_output @ v.mT + grad_attn) * (1 - attn * attn)
    return grad_scores @ k, grad_scores.mT @ q, attn.mT @ grad_output


def tangents(q_t, k_t, v_t, q, k, v, attn):
    attn_t = (q_t @ k.mT + q @ k_t.mT) * (1 - attn * attn)
    return attn_t @ v + attn @ v_t, attn_t


def vmap_rule(operator):
    """The rule for an operator that takes batches: one call, with the batch in front."""

    def rule(info, in_dims, *inputs):
        batched = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(inputs, in_dims, strict=True)
        ]
        return operator(*batched), (0, 0)

    return rule
