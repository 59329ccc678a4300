# Owner(s): ["module: vectorization"]

"""attn's tanh of vectors, number by number: ATen/native/cpu/AttnTanh.h."""

import ctypes
import functools
import os
import platform
import sys
import tempfile
import unittest
from itertools import islice

import mpmath

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TEST_WITH_ASAN,
    TEST_WITH_SLOW,
    TestCase,
)
from torch.utils.cpp_extension import load


SOURCE = """
#include <ATen/native/cpu/AttnTanh.h>

#include <algorithm>

using namespace at::native::attn_cpu;

#define MAP(name, T, f)                                                 \\
  extern "C" void name(const T* x, T* y, int64_t n) {                   \\
    using Vec = at::vec::Vectorized<T>;                                 \\
    for (int64_t i = 0; i < n; i += Vec::size()) {                      \\
      const int64_t count = std::min<int64_t>(Vec::size(), n - i);      \\
      f(Vec::loadu(x + i, count)).store(y + i, count);                  \\
    }                                                                   \\
  }
MAP(tanh_float, float, attn_tanh)
MAP(tanh_double, double, attn_tanh)
MAP(tanh_reduced, float, attn_tanh_reduced)
"""
# The instruction sets, the least one first.
FLAGS = {
    "DEFAULT": [],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"],
}
BEST = torch.backends.cpu.get_cpu_capability().replace("NO AVX", "DEFAULT")
CAPABILITIES = [*FLAGS][: [*FLAGS].index(BEST) + 1] if BEST in FLAGS else []
# In ULP. Half and bfloat16 are rounded once, from what may be off by a little.
BOUNDS = {
    torch.float: 2.5,
    torch.double: 1.0,
    torch.half: 0.51,
    torch.bfloat16: 0.51,
}
REDUCED = 2**-14.6  # the largest relative error of what is rounded to these
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Slow tests take every float; others take every STEPth block of floats.
STEP = 1 if TEST_WITH_SLOW else 512


def bound(capability, dtype):
    """Without fused multiply-add, the error in double is larger."""
    fused = capability != "DEFAULT" or platform.machine() in ("aarch64", "arm64")
    return 1.5 if dtype == torch.double and not fused else BOUNDS[dtype]


@functools.cache
def library(capability):
    """SOURCE, compiled."""
    name = f"attn_tanh_{capability.lower()}"
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, f"{name}.cpp")
        with open(source, "w") as file:
            file.write(SOURCE)
        macros = [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
        load(
            name,
            [source],
            extra_cflags=["-O2", "-w", *macros, *FLAGS[capability]],
            build_directory=folder,
            is_python_module=False,
        )
        return ctypes.CDLL(os.path.join(folder, f"{name}.so"))


def attn_tanh(capability, x, name=None):
    """The header's function of this name, by default that for the type of x."""
    name = name or ("tanh_double" if x.dtype == torch.double else "tanh_float")
    y = torch.empty_like(x)
    pointers = (ctypes.c_void_p(z.data_ptr()) for z in (x, y))
    getattr(library(capability), name)(*pointers, ctypes.c_int64(x.numel()))
    return y


def bits(x):
    """The same memory as integers."""
    return x.view(INTEGERS[x.element_size()])


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


def chunks(size):
    """All floats that are not negative, infinite or NaN."""
    end = bits(torch.tensor(float("inf"))).item()
    for start in range(0, end, size):
        stop = min(start + size, end)
        yield torch.arange(start, stop, dtype=torch.int32).view(torch.float)


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
    return x, *tanh(x)


@unittest.skipIf(not CAPABILITIES, "another architecture's")
@unittest.skipIf(sys.platform == "win32", "the compiler's options are GCC's")
@unittest.skipIf(TEST_WITH_ASAN, "the library has no sanitizer in it")
class TestAttnTanh(TestCase):
    """With each instruction set that the machine has."""

    def assert_odd(self, capability, x, y, name=None):
        """For x that are not negative. Zero and NaN have a sign, too."""
        self.assertGreaterEqual(bits(y).min().item(), 0)
        self.assertTrue(bits(attn_tanh(capability, -x, name)).equal(bits(-y)))

    def test_every_float(self):
        for x in islice(chunks(2**18), None, None, STEP):
            reference, _ = tanh(x)
            for capability in CAPABILITIES:
                y = attn_tanh(capability, x)
                with self.subTest(capability=capability, first=x[0].item()):
                    self.assert_odd(capability, x, y)
                    self.assertLessEqual(y.max().item(), 1)
                    self.assertLessEqual(error(y, reference), BOUNDS[torch.float])
                    name = "tanh_reduced"
                    y = attn_tanh(capability, x, name)
                    self.assert_odd(capability, x, y, name)
                    apart = (y.double() - reference).abs_()
                    self.assertTrue((apart <= REDUCED * reference).all())

    @parametrize("capability", CAPABILITIES)
    def test_double(self, capability):
        x, *reference = sample(torch.double)
        y = attn_tanh(capability, x)
        self.assertLessEqual(y.max().item(), 1)
        half = len(x) // 2
        self.assert_odd(capability, x[:half], y[:half])
        self.assertLessEqual(error(y, *reference), bound(capability, torch.double))

    @parametrize("dtype", (torch.half, torch.bfloat16))
    @parametrize("capability", CAPABILITIES)
    def test_reduced(self, capability, dtype):
        x, *reference = sample(dtype)
        y = attn_tanh(capability, x.float(), "tanh_reduced").to(dtype)
        self.assertLessEqual(y.max().item(), 1)
        self.assertLessEqual(error(y, *reference), BOUNDS[dtype])

    @parametrize("name", ("tanh_float", "tanh_double", "tanh_reduced"))
    @parametrize("capability", CAPABILITIES)
    def test_infinite_and_nan(self, capability, name):
        dtype = torch.double if name == "tanh_double" else torch.float
        x = torch.tensor((float("inf"), float("-inf"), float("nan")), dtype=dtype)
        y = attn_tanh(capability, x, name)
        if name == "tanh_reduced":
            y = y.half().float()
        self.assertEqual(y, x.clamp(-1, 1), rtol=0, atol=0)


instantiate_parametrized_tests(TestAttnTanh)

if __name__ == "__main__":
    run_tests()
