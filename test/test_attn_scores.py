# Owner(s): ["module: cpu"]

"""attn is tanh of the scores, whichever way the CPU's kernel goes about it."""

import os
import subprocess
import sys
import unittest

from test_attn_tanh import BEST, bound, BOUNDS, CAPABILITIES, error, sample

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


CHOSEN = os.environ.get("ATEN_CPU_CAPABILITY")
# q and k of which q @ k.mT is x in each row, or in each column.
SHAPES = {
    "column": lambda x: (x[:, None], x.new_ones(1, 1)),
    "row": lambda x: (x.new_ones(1, 1), x[:, None]),
    "columns": lambda x: (x[:, None], x.new_ones(37, 1)),
    "rows": lambda x: (x.new_ones(7, 1), x[:, None]),
    "tall": lambda x: (x[:, None], x.new_ones(512, 1)),
    "wide": lambda x: (x.new_ones(256, 1), x[:, None]),
    "features": lambda x: (
        torch.stack((torch.zeros_like(x), x, torch.zeros_like(x)), 1),
        x.new_ones(48, 3),
    ),
}


class TestAttnScores(TestCase):
    """With the instruction set that ATEN_CPU_CAPABILITY names, or the best."""

    def attn(self, shape, x):
        """tanh(x), the same in each column."""
        q, k = SHAPES[shape](x)
        attn = torch.attn(q, k, k[:, :0]).attn
        attn = attn if len(attn) == len(x) else attn.mT
        first = attn[:, 0].contiguous()
        self.assertEqual(attn, first[:, None].expand_as(attn), rtol=0, atol=0)
        return first

    def test_capability(self):
        self.assertEqual(BEST, (CHOSEN or BEST).upper())

    @parametrize("shape", SHAPES)
    @parametrize("dtype", BOUNDS)
    def test_sample(self, dtype, shape):
        x, *reference = sample(dtype)
        if dtype == torch.bfloat16:
            # bfloat16's instruction takes subnormal numbers for zero.
            normal = (x == 0) | (x.abs() >= torch.finfo(dtype).tiny)
            x, reference = x[normal], (reference[0][normal],)
        attn = self.attn(shape, x)
        self.assertLessEqual(attn.abs().max().item(), 1)
        self.assertLessEqual(error(attn, *reference), bound(BEST, dtype))

    @parametrize("shape", SHAPES)
    @parametrize("dtype", BOUNDS)
    def test_nan(self, dtype, shape):
        x = torch.tensor((float("nan"), float("inf"), float("-inf")), dtype=dtype)
        self.assertEqual(self.attn(shape, x), x.clamp(-1, 1), rtol=0, atol=0)


class TestAttnScoresCapabilities(TestCase):
    @unittest.skipIf(CHOSEN or len(CAPABILITIES) < 2, "there is no other")
    def test_lesser(self):
        """The tests above, with fewer instructions than there are."""
        for capability in CAPABILITIES[:-1]:
            with self.subTest(capability=capability):
                run = subprocess.run(
                    (sys.executable, __file__, TestAttnScores.__name__),
                    env={**os.environ, "ATEN_CPU_CAPABILITY": capability.lower()},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                self.assertEqual(run.returncode, 0, msg=run.stdout)


instantiate_parametrized_tests(TestAttnScores)

if __name__ == "__main__":
    run_tests()
