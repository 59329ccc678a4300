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
        skips=(
            # attn is not among autocast's operators, so its kernel runs as it would
            # without, and only the real tensors see what autocast does inside of it
            DecorateInfo(
                unittest.expectedFailure, "TestFakeTensor", "test_fake_autocast"
            ),
            # attn has no batch rule: vmap falls back to a loop
            DecorateInfo(
                unittest.expectedFailure,
                "TestVmapOperatorsOpInfo",
                "test_op_has_batch_rule",
            ),
            DecorateInfo(
                unittest.expectedFailure,
                "TestOperators",
                "test_vmapvjp_has_batch_rule",
            ),
            DecorateInfo(
                unittest.expectedFailure,
                "TestOperators",
                "test_vmapjvpall_has_batch_rule",
            ),
        ),
    ),
]
