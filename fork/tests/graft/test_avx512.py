"""attn's CPU kernel for AVX-512, on any x86-64 machine: avx512/emulated.h has its instructions.

Most machines that run these tests have no AVX-512, and products of pairs are taken on few of those
that have it. The kernel's sources are compiled as they are, but for two functions in inline
assembly and for oneDNN's.
"""

import ctypes
import platform
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

from fork.paths import ROOT

sys.path.append(str(ROOT / "test"))

from test_attn import rule, widen  # noqa: E402
from test_attn_output import Problem, both_ways, composed, sized  # noqa: E402
from test_attn_output_second_order import defined, tangents_of  # noqa: E402
from test_attn_output_triple_backward import OPTIONAL  # noqa: E402
from test_attn_output_triple_backward import defined as third_order  # noqa: E402
from test_attn_output_triple_backward import make as make_third_order  # noqa: E402

HERE = Path(__file__).with_name("avx512")
FLAGS = ("-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-mavx2", "-mfma", "-mf16c")
DEFINES = ("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512")
# SIMDe has no place for these lines, by file: a pattern of each, and the C++ that takes its place.
REPLACED = {
    "AttnPairs.h": (
        (r'asm\("vcvtne2ps2bf16[^;]*;', "rounded = emulated::round_to_bfloat16(x[0], x[1]);"),
        (r'asm\("vdpbf16ps[^;]*;', "sum = emulated::add_pairs(sum, a, b);"),
    ),
    "AttnBrgemm.h": (
        (r"cpublas::brgemm_release\(\);", ""),
        (r"cpublas::brgemm\(", "emulated::brgemm("),
    ),
}
KINDS = {
    "pairs_bfloat16": torch.bfloat16,
    "brgemm_bfloat16": torch.bfloat16,
    "brgemm_half": torch.half,
    "fma_float": torch.float,
    "fma_double": torch.double,
    "fma_bfloat16": torch.bfloat16,
    "fma_half": torch.half,
}
# At these sizes, or beside them, vectors, pairs, blocks of rows and tiles end.
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 130, 193, 200, 300)
SEED, CASES = 0, 80
SIMDE = Path("/usr/include/simde/x86/avx512.h")
pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="emulated by AVX2"),
    pytest.mark.skipif(not SIMDE.exists(), reason="needs SIMDe: apt-get install libsimde-dev"),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The library of avx512/kernels.cpp."""
    folder = tmp_path_factory.mktemp("avx512")
    native = Path("aten/src/ATen/native")
    shutil.copytree(ROOT / native, folder / native)
    for name, changes in REPLACED.items():
        file = folder / native / "cpu" / name
        text = file.read_text(encoding="utf-8")
        for pattern, by in changes:
            text, count = re.subn(pattern, by, text)
            assert count == 1, pattern
        file.write_text(text, encoding="utf-8")
    library = folder / "kernels.so"
    paths = [f"-I{HERE}", f"-I{folder / 'aten/src'}", *(f"-I{p}" for p in include_paths())]
    links = [*(f"-L{p}" for p in library_paths()), "-ltorch_cpu", "-lc10"]
    command = ["g++", *FLAGS, *DEFINES, *paths, HERE / "kernels.cpp", "-o", library, *links]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(library))


def call(kernels, kind, what, problem, inputs, results, more=(None,) * 4):
    """Runs a kernel. Tensors that are None are not given, or not wanted."""
    case = problem.case
    pointers = (ctypes.c_void_p * 18)(
        *(None if x is None else x.data_ptr() for x in (*inputs, *results, *more))
    )
    getattr(kernels, kind)(
        what.encode(),
        *map(ctypes.c_int64, (case.m, case.n, case.d, case.e)),
        ctypes.c_int(problem.is_causal),
        ctypes.c_double(problem.scale),
        pointers,
    )


def drawn(rng):
    sizes = [rng.choice(SIZES) for _ in "mnde"]
    scale = rng.choice((1.0, 0.5, -2.0))
    return Problem(sized(*sizes), is_causal=rng.random() < 0.5, scale=scale)


def empty(*tensors):
    """Results like these: the kernel must write all of them, or zeros come first."""
    return [torch.full_like(x, 7.0) for x in tensors]


def unseen_are_zero(problem, *gradients):
    """The kernel leaves the keys after the last query to its caller."""
    for x in gradients:
        if problem.is_causal:
            x[problem.case.m :] = 0


def check(problem, found, plain, expected):
    for actual, *others in zip(found, plain, expected, strict=True):
        if actual is not None and actual.numel():
            actual, nearly, reference = widen((actual, *others))
            bound = rule(others[0].dtype, nearly, reference, problem.case, order=2)
            assert (actual - reference).abs().max() <= bound


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward(kernels, kind):
    """attn_output's, and attn's where nothing is masked: the same bits."""
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    for _ in range(CASES // 2):
        problem = drawn(rng)
        (q, k, v), grad_output = problem.make("cpu", KINDS[kind])
        arguments = [q, k, v, grad_output, *[None] * 5]
        (output,) = empty(grad_output)
        call(kernels, kind, "forward", problem, arguments, [output, *[None] * 4])
        gradients = empty(q, k, v)
        call(kernels, kind, "backward", problem, arguments, [None, None, *gradients])
        unseen_are_zero(problem, *gradients[1:])
        plain = both_ways(composed, problem, (q, k, v), grad_output)
        *wide, wide_grad = widen((q, k, v, grad_output))
        expected = both_ways(composed, problem, wide, wide_grad)
        check(problem, [output, *gradients], plain, expected)
        if problem.is_causal:
            continue
        again, attn, *others = empty(
            output, torch.empty(q.size(0), k.size(0), dtype=q.dtype), q, k, v
        )
        call(kernels, kind, "forward", problem, arguments, [again, attn, *[None] * 3])
        arguments[5] = attn
        call(kernels, kind, "backward", problem, arguments, [None, None, *others])
        for x, y in zip((output, *gradients), (again, *others), strict=True):
            assert torch.equal(x, y), problem.name


@pytest.mark.parametrize("kind", KINDS)
def test_second_order(kernels, kind):
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    for _ in range(CASES // 4):
        problem = drawn(rng)
        inputs, grad_output = problem.make("cpu", KINDS[kind])
        given = rng.choice(("q", "k", "qk", "qv", "kv", "qkv"))
        tangents = tangents_of(inputs, given)
        results = empty(grad_output, *inputs)
        call(
            kernels,
            kind,
            "second order",
            problem,
            [*inputs, grad_output, None, None, *tangents],
            [results[0], None, *results[1:]],
        )
        unseen_are_zero(problem, *results[2:])
        *wide, wide_grad = widen((*inputs, grad_output))
        wide_tangents = [None if x is None else x.double() for x in tangents]
        plain = defined(problem, inputs, tangents, grad_output)
        expected = defined(problem, wide, wide_tangents, wide_grad)
        check(problem, results, plain, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_third_order(kernels, kind):
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    for _ in range(CASES // 4):
        problem = drawn(rng)
        given = rng.choice((("u_q", "w_q"), ("u_q", "w_k"), ("u_k", "w_q"), OPTIONAL))
        given = {*given, "grad_output", *rng.sample(OPTIONAL, 3)}
        tensors = make_third_order(problem, "cpu", KINDS[kind], given)
        grad_output, *inputs = tensors[:4]
        w_grad_output, *w = tensors[7:]
        results = empty(grad_output, *inputs)
        call(
            kernels,
            kind,
            "third order",
            problem,
            [*inputs, grad_output, None, None, *tensors[4:7]],
            [results[0], None, *results[1:]],
            [*w, w_grad_output],
        )
        unseen_are_zero(problem, *results[2:])
        wide = [None if x is None else x.double() for x in tensors]
        plain, expected = third_order(problem, tensors), third_order(problem, wide)
        check(problem, results, plain, expected)
