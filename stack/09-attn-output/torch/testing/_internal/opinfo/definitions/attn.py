# mypy: ignore-errors

import unittest
from functools import partial

import numpy as np

import torch
from torch.testing import make_tensor
from torch.testing._internal.common_dtype import floating_and_complex_types_and
from torch.testing._internal.opinfo.core import (
    DecorateInfo,
    ErrorInput,
    OpInfo,
    SampleInput,
)


# (*, m, d, n, e): q is (*, m, d), k is (*, n, d), v is (*, n, e)
SIZES = (
    (3, 2, 4, 5),  # all sizes differ
    (4, 3, 4, 3),  # self-attention
    (1, 1, 1, 1),
    (5, 4, 1, 2),  # one key
    (1, 3, 6, 2),  # one query
    (0, 2, 3, 4),  # no query
    (2, 3, 0, 4),  # no key: output is zero
    (2, 0, 3, 4),  # empty heads: attn is zero
    (2, 3, 4, 0),  # empty values
    (2, 3, 2, 4, 5),  # a batch
    (2, 1, 3, 2, 4, 2),  # two batch dimensions
    (0, 3, 2, 4, 5),  # an empty batch
)


def sample_inputs_attn(op_info, device, dtype, requires_grad, **kwargs):
    make = partial(
        make_tensor,
        device=device,
        dtype=dtype,
        requires_grad=requires_grad,
        # The scores stay where tanh is neither linear nor saturated.
        low=-1,
        high=1,
    )
    for *batch, m, d, n, e in SIZES:
        yield SampleInput(make(*batch, m, d), make(*batch, n, d), make(*batch, n, e))
    # Operands that are not contiguous.
    transposed = make(3, 4).detach().mT.requires_grad_(requires_grad)
    yield SampleInput(
        make(2, 3, noncontiguous=True), transposed, make(4, 2, noncontiguous=True)
    )
    batch_last = make(4, 3, 2).detach().movedim(-1, 0).requires_grad_(requires_grad)
    yield SampleInput(make(2, 2, 3), batch_last, make(2, 4, 2, noncontiguous=True))


def error_inputs_attn(op_info, device, **kwargs):
    make = partial(make_tensor, device=device, dtype=torch.float32)
    q, k, v = make(2, 3), make(4, 3), make(4, 5)

    for args in ((make(3), k, v), (q, make(()), v), (q, k, make(4))):
        yield ErrorInput(
            SampleInput(args[0], args=args[1:]),
            error_regex="attn: q, k and v must have at least 2 dimensions",
        )
    for args in ((make(1, 2, 3), k, v), (q, make(1, 4, 3), v), (q, k, make(1, 4, 5))):
        yield ErrorInput(
            SampleInput(args[0], args=args[1:]),
            error_regex="attn: q, k and v must have the same number of dimensions",
        )
    # Batch dimensions are not broadcast.
    for sizes in ((1, 2, 2), (2, 1, 2), (2, 2, 1)):
        args = tuple(make(b, *x.shape) for b, x in zip(sizes, (q, k, v)))
        yield ErrorInput(
            SampleInput(args[0], args=args[1:]),
            error_regex="must have the same batch dimensions",
        )
    yield ErrorInput(
        SampleInput(q, args=(make(4, 2), v)),
        error_regex=r"attn: q \(\*, m, d\) and k \(\*, n, d\) must have the same d",
    )
    yield ErrorInput(
        SampleInput(q, args=(k, make(3, 5))),
        error_regex=r"attn: k \(\*, n, d\) and v \(\*, n, e\) must have the same n",
    )
    yield ErrorInput(
        SampleInput(q, args=(k.double(), v)),
        error_regex="attn: q, k and v must have the same dtype",
    )
    for dtype in (torch.int64, torch.bool, torch.chalf, torch.float8_e4m3fn):
        yield ErrorInput(
            SampleInput(q.to(dtype), args=(k.to(dtype), v.to(dtype))),
            error_regex="attn: q, k and v must be floating point or complex",
        )
    if torch.device(device).type != "cpu":
        yield ErrorInput(
            SampleInput(q, args=(k.cpu(), v)),
            error_regex="attn: q, k and v must be on the same device",
        )


# What attn_output takes besides, and sizes of a batch that samples share.
OPTIONS = ({}, {"is_causal": True}, {"scale": 0.5}, {"is_causal": True, "scale": -2.0})
SHARED = (
    ((2, 3), (2, 1)),  # heads in groups
    ((2, 3), (1, 3)),
    ((2, 1, 2), (1, 1, 1)),
)


def sample_inputs_attn_output(op_info, device, dtype, requires_grad, **kwargs):
    for options in OPTIONS:
        for sample in sample_inputs_attn(op_info, device, dtype, requires_grad):
            yield SampleInput(sample.input, args=sample.args, kwargs=options)
    make = partial(make_tensor, device=device, dtype=dtype, requires_grad=requires_grad)
    for (batch, shared), options in zip(SHARED, OPTIONS[1:]):
        q, k, v = make(*batch, 3, 2), make(*shared, 4, 2), make(*shared, 4, 5)
        yield SampleInput(q, args=(k, v), kwargs=options)


def error_inputs_attn_output(op_info, device, **kwargs):
    for error in error_inputs_attn(op_info, device, **kwargs):
        if "batch dimensions" not in error.error_regex:
            error.error_regex = error.error_regex.replace("attn:", "attn_output:")
            yield error
    make = partial(make_tensor, device=device, dtype=torch.float32)
    for sizes in ((2, 1, 2), (2, 2, 1), (1, 2, 2), (4, 2, 2)):
        shapes = zip(sizes, ((2, 3), (4, 3), (4, 5)))
        q, k, v = (make(b, *shape) for b, shape in shapes)
        yield ErrorInput(
            SampleInput(q, args=(k, v)),
            error_regex="must have the same batch dimensions .*, or k and v 1 in place",
        )


def reference_attn_output(q, k, v, *, is_causal=False, scale=1.0):
    attn = np.tanh(scale * (q @ np.swapaxes(k, -1, -2)))
    return (np.tril(attn) if is_causal else attn) @ v


def reference_attn(q, k, v):
    attn = np.tanh(q @ np.swapaxes(k, -1, -2))
    return attn @ v, attn


op_db: list[OpInfo] = [
    OpInfo(
        "attn",
        ref=reference_attn,
        dtypes=floating_and_complex_types_and(torch.half, torch.bfloat16),
        supports_out=False,
        supports_forward_ad=True,
        supports_fwgrad_bwgrad=True,
        check_batched_forward_grad=True,
        sample_inputs_func=sample_inputs_attn,
        error_inputs_func=error_inputs_attn,
    ),
    OpInfo(
        "attn_output",
        ref=reference_attn_output,
        dtypes=floating_and_complex_types_and(torch.half, torch.bfloat16),
        supports_out=False,
        supports_autograd=False,  # it has no derivative formulas
        sample_inputs_func=sample_inputs_attn_output,
        error_inputs_func=error_inputs_attn_output,
        skips=(
            # attn_output has no batch rule: vmap falls back to a loop
            DecorateInfo(
                unittest.expectedFailure,
                "TestVmapOperatorsOpInfo",
                "test_op_has_batch_rule",
            ),
        ),
    ),
]
