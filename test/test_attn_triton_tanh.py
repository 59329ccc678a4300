# Owner(s): ["module: cuda"]

"""tanh of attn's Triton kernels, number by number, in Triton's interpreter on a CPU."""

import math
import os
import sys
from itertools import islice

import numpy as np


os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when it is imported.

import torch
from torch.torch_version import TorchVersion


try:
    import triton
    import triton.language as tl
    from torch.library import get_kernel  # noqa: F401
except ImportError:
    print("Triton or get_kernel not available, skipping tests", file=sys.stderr)
    sys.exit(0)

# The interpreters of older ones fail with NumPy 2.3 and newer.
if TorchVersion(triton.__version__) < (
    "3.6" if TorchVersion(np.__version__) < "2.3" else "3.9"
):
    print("a newer Triton not available, skipping tests", file=sys.stderr)
    sys.exit(0)

from test_attn_tanh import bits, BOUNDS, chunks, error, REDUCED, STEP, tanh

from torch._native.ops.attn import triton_kernels
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


@triton.jit
def _map_tanh(x, y, FORM: tl.constexpr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(y + places, triton_kernels._tanh(tl.load(x + places), FORM))


class TestAttnTritonTanh(TestCase):
    def tanh(self, x, form):
        y = torch.empty_like(x)
        _map_tanh[(1,)](x, y, form, x.numel())
        return y

    @parametrize("form", ("reduced", "float"))
    def test_every_float(self, form):
        for x in islice(chunks(2**18), None, None, STEP):
            reference, _ = tanh(x)
            y = self.tanh(x, form)
            with self.subTest(first=x[0].item()):
                self.assertGreaterEqual(bits(y).min().item(), 0)
                self.assertTrue(bits(self.tanh(-x, form)).equal(bits(-y)))
                self.assertLessEqual(y.max().item(), 1)
                if form == "float":
                    self.assertLessEqual(error(y, reference), BOUNDS[torch.float])
                else:
                    apart = (y.double() - reference).abs_()
                    self.assertTrue((apart <= REDUCED * reference).all())

    @parametrize("form", ("reduced", "float"))
    def test_infinite_large_and_nan(self, form):
        x = torch.tensor(
            (math.inf, -math.inf, math.nan, -math.nan, 10, -10, 3e38, -3e38)
        )
        y = self.tanh(x, form)
        self.assertEqual(y, x.clamp(-1, 1), rtol=0, atol=0)


instantiate_parametrized_tests(TestAttnTritonTanh)

if __name__ == "__main__":
    run_tests()
