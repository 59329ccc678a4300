# Owner(s): ["module: vectorization"]

"""attn's tanh, number by number, with each of the CPU's instruction sets."""

import functools
import os
import subprocess
import sys
import unittest
from itertools import islice

import mpmath

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TEST_WITH_SLOW,
    TestCase,
)


# In ULP. Half and bfloat16 are rounded once, from what may be off by a little.
BOUNDS = {
    torch.float: 2.5,
    torch.double: 1.0,
    torch.half: 0.56,
    torch.bfloat16: 0.56,
}
DTYPES = tuple(BOUNDS)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# From the least on.
CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")
CAPABILITY = torch.backends.cpu.get_cpu_capability().replace("NO AVX", "DEFAULT")
CHOSEN = os.environ.get("ATEN_CPU_CAPABILITY")
# Slow tests take every float; others take every STEPth block of floats.
STEP = (16 if CHOSEN else 1) if TEST_WITH_SLOW else (128 if CHOSEN else 16)

# q and k of which q @ k.mT is x in each row, or in each column: a kernel may go about
# them in different ways.
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


def bits(x):
    """The same memory as integers."""
    return x.view(INTEGERS[x.element_size()])


def attn_of(q, k):
    return torch.attn(q, k, k[:, :0]).attn


def ulp(x, dtype):
    """How far apart numbers of ``dtype`` are where they are as large as x in float64."""
    info = torch.finfo(dtype)
    exponent = bits(x) & bits(x.new_tensor(float("inf")))
    return exponent.view(torch.double).clamp_min(info.tiny) * info.eps


def tanh(x):
    """In float64; for x in float64, what is missing there to the exact value as well."""
    if x.dtype != torch.double:
        return x.double().tanh_(), 0
    with mpmath.workdps(40):
        exact = [mpmath.tanh(y) for y in x.tolist()]
        high = [float(y) for y in exact]
        low = [float(y - z) for y, z in zip(exact, high)]
    return x.new_tensor(high), x.new_tensor(low)


def error(actual, reference, low=0):
    """How far from tanh at most, in ULP; ``reference`` and ``low`` are from tanh()."""
    distance = (actual.double() - reference).sub_(low).abs_()
    return distance.div_(ulp(reference, actual.dtype)).max().item()


def chunks(first, end, size):
    """All floats from ``first`` to less than ``end``, which are not negative."""
    first, end = bits(torch.tensor((first, end), dtype=torch.float)).tolist()
    for start in range(first, end, size):
        stop = min(start + size, end)
        yield torch.arange(start, stop, dtype=torch.int32).view(torch.float)


def some(blocks):
    """One of STEP blocks, the first among them."""
    return islice(blocks, None, None, STEP)


@functools.cache
def sample(dtype):
    """All numbers of 16 bits, or some of every size, and tanh of them."""
    info = torch.finfo(dtype)
    if dtype.itemsize == 2:
        x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        x = x[~x.isnan()]
    else:
        least = info.tiny * info.eps
        largest = torch.tensor(info.max, dtype=torch.double).log2().item()
        random = torch.rand(3, 2000, dtype=torch.double)
        x = torch.cat(
            (
                (random[0] * 2 - 1).mul_(largest).exp2_(),
                (random[1] * 8 - 4).exp2_(),
                random[2] * 20,
                torch.tensor((0, least, info.tiny, 1, info.max, float("inf"))).double(),
            )
        ).to(dtype)
        x = torch.cat((x, -x))
    if dtype == torch.bfloat16:
        # The instruction for its products takes smaller numbers for zero.
        x = x[(x == 0) | (x.abs() >= info.tiny)]
    return x, *tanh(x)


class TestAttnTanh(TestCase):
    """With the instruction set that ATEN_CPU_CAPABILITY names, or the best."""

    # Many small operations: threads would mostly wait for one another.
    def setUp(self):
        super().setUp()
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

    def test_capability(self):
        self.assertEqual(CAPABILITY, (CHOSEN or CAPABILITY).upper())

    @parametrize("shape", SHAPES)
    @parametrize("dtype", DTYPES)
    def test_sample(self, dtype, shape):
        x, *reference = sample(dtype)
        actual = attn_of(*SHAPES[shape](x))
        if len(actual) != len(x):
            actual = actual.mT
        first = actual[:, 0].contiguous()
        self.assertEqual(actual, first[:, None].expand_as(actual), rtol=0, atol=0)
        self.assertLessEqual(first.abs().max().item(), 1)
        bound = BOUNDS[dtype]
        if dtype == torch.double and CAPABILITY == "DEFAULT":
            bound = 2.0  # the C library's
        self.assertLessEqual(error(first, *reference), bound)

    @parametrize("shape", SHAPES)
    @parametrize("dtype", DTYPES)
    def test_special_values(self, dtype, shape):
        inf, nan = float("inf"), float("nan")
        info = torch.finfo(dtype)
        x = (0, inf, nan, info.max, 100, info.tiny)
        expected = (0, 1, nan, 1, 1, info.tiny)
        for sign in (1, -1):
            actual = attn_of(*SHAPES[shape](torch.tensor(x, dtype=dtype) * sign))
            if len(actual) != len(x):
                actual = actual.mT
            wanted = torch.tensor(expected, dtype=dtype)[:, None] * sign
            self.assertEqual(actual, wanted.expand_as(actual), rtol=0, atol=0)

    # Every normal number is a power of two times one of [1, 2).
    def test_every_float(self):
        powers = torch.arange(-126, 128).double().exp2_().float()[:, None]
        tiny, curved, huge = slice(0, 113), slice(113, 131), slice(131, None)
        for mantissas in some(chunks(1, 2, 2**12)):
            attn = attn_of(powers, mantissas[:, None])
            self.assertTrue(attn.equal(-attn_of(-powers, mantissas[:, None])))
            self.assertLessEqual(attn.max().item(), 1)
            x = powers * mantissas
            # Below 2^-13 tanh(x) is x, from 32 on 1, within 0.1 ULP.
            for part, near in ((tiny, bits(x)[tiny]), (huge, bits(torch.ones(1)))):
                apart = (bits(attn)[part] - near).abs_().max().item()
                self.assertLess(apart, BOUNDS[torch.float])
            self.assertLessEqual(
                error(attn[curved], *tanh(x[curved])), BOUNDS[torch.float]
            )

    # The subnormal numbers, and those where tanh(x) is neither x nor 1.
    def test_every_float_in_a_column(self):
        one = torch.ones(1, 1)
        for x in some(chunks(0, torch.finfo(torch.float).tiny, 2**14)):
            attn = attn_of(x[:, None], one)[:, 0]
            self.assertEqual(attn, x, rtol=0, atol=0)
        for x in some(chunks(2**-13, 32, 2**14)):
            attn = attn_of(x[:, None], one)[:, 0]
            self.assertTrue(attn.equal(-attn_of(-x[:, None], one)[:, 0]))
            self.assertLessEqual(attn.max().item(), 1)
            self.assertLessEqual(error(attn, *tanh(x)), BOUNDS[torch.float])


class TestAttnTanhCapabilities(TestCase):
    @unittest.skipIf(CHOSEN or CAPABILITY not in CAPABILITIES, "there is no other")
    def test_lesser(self):
        """The tests above, with fewer instructions than there are."""
        for capability in CAPABILITIES[: CAPABILITIES.index(CAPABILITY)]:
            with self.subTest(capability=capability):
                run = subprocess.run(
                    (sys.executable, __file__, TestAttnTanh.__name__),
                    env={**os.environ, "ATEN_CPU_CAPABILITY": capability.lower()},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                self.assertEqual(run.returncode, 0, msg=run.stdout)


instantiate_parametrized_tests(TestAttnTanh)

if __name__ == "__main__":
    run_tests()
