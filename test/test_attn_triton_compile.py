# Owner(s): ["module: cuda"]

"""Calls of attn's operators, compiled by Triton for GPUs that need not be there.

A driver that has no device stands in for CUDA's. So Triton sees the arguments that it would see
on a GPU, and makes of them the variants that it would launch.
"""

import sys
from functools import partial
from unittest import mock

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.torch_version import TorchVersion


try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
except ImportError:
    print("Triton not available, skipping tests", file=sys.stderr)
    sys.exit(0)

if TorchVersion(triton.__version__) < "3.6":
    print("a newer Triton not available, skipping tests", file=sys.stderr)
    sys.exit(0)

from torch._native.ops.attn import triton_impl, triton_kernels


SHARED = 232448  # bytes that a block of an H100 can have


class Driver:
    """What Triton asks of a driver before it launches a kernel."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Compiled:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel, made):
        self.kernel, self.made, self.arg_names = kernel, made, kernel.arg_names

    def __getitem__(self, grid):
        return partial(self.compile, grid)

    def compile(self, grid, **given):
        plan = given["BM"], given["BN"], given["num_warps"], given["num_stages"]
        self.made.append((plan, self.kernel.warmup(grid=grid, **given)))


def tensors(m, n, d, e, dtype, is_apart):
    """q, k, v, gradients of output and attn, attn; k and v are shared by samples of q.

    Rows lie apart, by no multiple of 16 bytes, if they are to.
    """
    shapes = [(2, 3, m, d), (2, 1, n, d), (2, 1, n, e), (2, 3, m, e), (2, 3, m, n)]
    rows = [
        torch.zeros(*shape[:-1], shape[-1] + is_apart, dtype=dtype) for shape in shapes
    ]
    q, k, v, grad_output, attn = (x[..., : shape[-1]] for x, shape in zip(rows, shapes))
    return q, k, v, grad_output, attn.clone(), attn


def calls(q, k, v, grad_output, grad_attn, attn):
    """Operators, their arguments, and the kernels that they launch."""
    k_each, v_each = (x.expand(*q.shape[:-2], -1, -1) for x in (k, v))
    stored = ("stored_grad_q", "stored_grad_kv")
    given = q, k_each, v_each, attn, [True] * 3
    causal = {"is_causal": True, "scale": 0.5}
    seconds = q, k, None, True, 0.5, [True] * 4
    return (
        ("attn", given[:3], {}, ("attn",)),
        ("_attn_backward", (grad_output, None, *given), {}, stored),
        ("_attn_backward", (grad_output, grad_attn, *given), {}, stored),
        ("attn_output", (q, k, v), causal, ("output",)),
        (
            "_attn_output_backward",
            (grad_output, q, k, v, True, 1.0, [True] * 3),
            {},
            ("grad_q", "grad_kv"),
        ),
        ("_attn_output_jvp", (q, k, v, q, None, v, False, 0.5), {}, ("tangent",)),
        (
            "_attn_output_double_backward",
            (grad_output, q, k, v, *seconds),
            {},
            ("tangent_grad_q", "tangent_grad_kv"),
        ),
        (
            "_attn_output_triple_backward",
            (grad_output, q, k, v, q, None, v, grad_output, q, k, None, *seconds[3:]),
            {},
            ("third_grad_q", "third_grad_kv"),
        ),
    )


class TestAttnTritonCompile(TestCase):
    def setUp(self):
        super().setUp()
        self.made = []
        kernels = {
            name: Compiled(getattr(triton_kernels, name), self.made)
            for name in ("_attn_rows", "_attn_columns", "_attn_third_order")
        }
        device = triton_impl.Device("cuda", 90, SHARED)
        for patch in (
            mock.patch.object(triton_impl, "LEAST_WORK", 0),
            mock.patch.object(triton_impl, "FLOAT", True),
            mock.patch.object(triton_impl, "device_of", lambda _: device),
            mock.patch.multiple(triton_kernels, **kernels),
            mock.patch.object(type(driver), "active", Driver()),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    # The second sizes and strides are divided by nothing.
    @parametrize(
        "dtype,sizes,is_apart",
        (
            (torch.bfloat16, (256, 512, 64, 64), False),
            (torch.half, (201, 333, 80, 33), True),
            (torch.float, (256, 512, 64, 32), False),
        ),
        name_fn=lambda dtype, sizes, is_apart: "_".join(map(str, sizes)),
    )
    def test_calls(self, dtype, sizes, is_apart):
        given = tensors(*sizes, dtype, is_apart)
        problem = triton_impl.Problem(*given[:3])
        for op, args, options, names in calls(*given):
            with self.subTest(op=op):
                cond, impl = triton_impl.KERNELS[op]
                self.assertTrue(cond(*args, **options))
                self.made.clear()
                impl(*args, **options)
                plans = [problem.plan(name) for name in names]
                self.assertEqual(
                    [plan for plan, _ in self.made], [p[:-1] for p in plans]
                )
                for plan, (_, kernel) in zip(plans, self.made):
                    self.assertIn("cubin", kernel.asm)
                    self.assertLessEqual(kernel.metadata.shared, plan.shared)
                    if dtype == torch.bfloat16:
                        # The tiles of the next step are copied in the background.
                        is_copied = "async_copy_global_to_local" in kernel.asm["ttgir"]
                        self.assertTrue(is_copied)


instantiate_parametrized_tests(TestAttnTritonCompile)


if __name__ == "__main__":
    run_tests()
