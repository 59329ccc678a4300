"""Runs the kernels for CUDA on an emulator, without a GPU, and tests how nvcc is found."""

import fcntl
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fork.errors import ForkError
from fork.graft.base import Base
from fork.graft.build import Graft, cuda
from fork.overlay import Stack
from fork.paths import ROOT
from fork.tests.conftest import write_files

HERE = Path(__file__).parent
SOURCES = ROOT / "aten/src/ATen/native/cuda"
# The emulator replaces these headers.
REPLACED = (
    "ATen/cuda/CUDAContextLight.h",
    *(f"c10/cuda/CUDA{name}.h" for name in ("Exception", "Guard", "Stream")),
    *(f"ATen/native/cuda/{name}.cuh" for name in ("AttnMma", "AttnBackwardMma", "AttnWideMma")),
)
# Runs test/test_attn.py, in which CPU tensors then go to the kernels for CUDA.
RUN = """
import atexit, runpy, sys, torch
library, sys.argv = sys.argv[1], sys.argv[2:]
torch.ops.load_library(library)
atexit.register(lambda: print("launches:", torch.ops.attn_emulated.device(*DEVICE)))
torch.ops.attn_emulated.device(*DEVICE)
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def emulate(folder, change=lambda text: text):
    """Compiles the kernels for the emulator, after `change` of each source; returns the library."""
    launch = re.compile(r"(\w+)<<<(.*?)>>>\(", re.S)
    sources, launches = {}, 0
    for source in SOURCES.glob("*.cu*"):
        text, found = launch.subn(r"emulator::launch(\1, \2)(", source.read_text(encoding="utf-8"))
        sources[f"ATen/native/cuda/{source.name}"] = change(text)
        launches += found
    assert launches == 1
    sources |= dict.fromkeys(REPLACED, '#include "cuda_emulator.h"\n')
    write_files(folder / "include", sources)
    torch = Path(importlib.util.find_spec("torch").origin).parent
    library, partial = folder / "emulated.so", folder / "partial.so"
    places = [folder / "include", HERE, torch / "include", torch / "include/torch/csrc/api/include"]
    subprocess.run(
        [
            *("g++", "-std=c++20", "-O2", "-w", "-shared", "-fPIC", "-U_FORTIFY_SOURCE"),
            *(f"-I{place}" for place in places),
            *(HERE / "cuda_emulated.cpp", "-o", partial),
            *(f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"),
        ],
        check=True,
    )
    partial.rename(library)
    return library


def run_tests(library, *options, device=(9, 227 << 10, 1)):
    """Runs the operator's tests; returns if they passed, their output, the number of launches."""
    program = f"DEVICE = {device}\n{RUN}"
    command = [sys.executable, "-c", program, library, ROOT / "test/test_attn.py", *options]
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT / "test",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    launches = re.search(r"^launches: (\d+)$", done.stdout, re.M)
    return done.returncode == 0, done.stdout, int(launches[1])


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Compiles the library once, even if several workers of pytest want it."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # a worker's own folder is inside it
    folder = base / "emulated"
    with (base / "emulated.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / "emulated.so"
        return made if made.exists() else emulate(folder)


# Small matrices, as the tests have, get smaller blocks on a GPU with more multiprocessors. With
# many of these only the tests run for which the size of a block matters.
EACH = "values_and_gradients_"
OWN_TESTS = [
    ("float16", 1, ""),
    ("float16", 3, f"{EACH}large_cpu"),
    ("float16", 5, f"{EACH}long_"),
    ("float16", 1000, f"{EACH}b"),
    ("float32", 1, ""),
    ("float32", 3, f"{EACH}long_"),
    ("float32", 6, f"{EACH}batch_of_large_"),
    ("float32", 1000, f"{EACH}b"),
    ("float64", 1, EACH),
    ("float64", 3, f"{EACH}long_"),
    ("float64", 1000, f"{EACH}b"),
]


@pytest.mark.parametrize("dtype, processors, tests", OWN_TESTS)
def test_the_operators_own_tests(library, dtype, processors, tests):
    """They pass on the kernels; the emulator reports races and misaligned accesses."""
    device = (9, 227 << 10, processors)
    passed, said, launches = run_tests(library, "-k", f"*{tests}*{dtype}", device=device)
    assert passed, said
    assert launches > 0


@pytest.mark.parametrize("processors", [1, 1000])
def test_a_device_with_less_shared_memory(library, processors):
    """The kernels take smaller blocks on it; GPUs of capability 8.6 and 8.9 are such."""
    cases = ("large_cpu_float16", "large_cpu_float32", "long_cpu_float64")
    only = [option for case in cases for option in ("-k", f"values_and_gradients_{case}")]
    passed, said, launches = run_tests(library, *only, device=(8, 99 << 10, processors))
    _, _, usual = run_tests(library, *only, device=(8, 227 << 10, processors))
    assert passed, said
    assert launches == usual > 0


TF32 = """
import sys, torch
torch.ops.load_library(sys.argv[1])
torch.manual_seed(0)
inputs = [torch.randn(size) for size in ((70, 33), (90, 33), (90, 17))]
grads = torch.randn(70, 17), torch.randn(70, 90)

def to_tf32(x):
    bits = x.view(torch.int32) + 0x1000 & ~0x1FFF
    return bits.view(torch.float).double()

def attn(rounded):
    q, k, v, grad = map(rounded, (*inputs, grads[0]))
    attn = torch.tanh(q @ k.T)
    scores = rounded(((grad @ v.T + grads[1]) * (1 - attn**2)).float())
    p = rounded(attn.float())
    return p @ v, attn, scores @ k, scores.T @ q, p.T @ grad

def kernels():
    outputs = torch.attn(*inputs)
    return *outputs, *torch.ops.aten._attn_backward(*grads, *inputs, outputs[1], [True] * 3)

def error(x, y):
    return (x - y).abs().max().item()

exact = attn(torch.Tensor.double)
for setting in ("pass", "cuda.matmul.allow_tf32 = True", "cuda.matmul.allow_tf32 = False",
                "cuda.matmul.fp32_precision = 'tf32'"):
    exec(setting if setting == "pass" else f"torch.backends.{setting}")
    # Twice what that precision costs the plain computation, and what float does anyway.
    allowed = setting.endswith(("True", "'tf32'"))
    plain = attn(to_tf32) if allowed else exact
    for processors in (1, 1000):  # large blocks, and small ones
        torch.ops.attn_emulated.device(9, 227 << 10, processors)
        for x, y, z in zip(kernels(), plain, exact):
            assert error(x, z) <= 2 * error(y, z) + 1e-4, setting
            assert (error(x, z) > 3e-4) == allowed, setting
"""


def run_program(program, library):
    done = subprocess.run(
        [sys.executable, "-c", program, library], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_tf32_where_it_is_allowed(library):
    """The older setting allows it, and the newer one, of which the older does not know."""
    run_program(TF32, library)


DEVICE = """
import itertools, sys, torch
torch.ops.load_library(sys.argv[1])
torch.manual_seed(0)
q, k, v, grad, grad_attn = (torch.randn(size) for size in ((7, 3), (9, 3), (9, 5), (7, 5), (7, 9)))
attn = torch.attn(q, k, v)[1]
for grads in ((grad, grad_attn), (grad, None), (None, grad_attn)):
    of = [torch.zeros_like(x) if g is None else g for x, g in zip((grad, attn), grads)]
    s = (of[0] @ v.T + of[1]) * (1 - attn**2)
    expected = s @ k, s.T @ q, attn.T @ of[0]
    for mask in itertools.product((False, True), repeat=3):
        actual = torch.ops.aten._attn_backward(*grads, q, k, v, attn, mask)
        for x, y, wanted in zip(actual, expected, mask):
            if wanted:
                x = torch.zeros_like(y) if x is None else x
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
"""


def test_on_the_inputs_device(library):
    """A kernel runs on its inputs' device, even if another one is current.

    torchgen makes the first tensor's device the current one: that of `output`'s gradient, if any.
    """
    run_program(DEVICE, library)


EACH_GRADIENT = """
import itertools, sys, torch
torch.ops.load_library(sys.argv[1])
torch.manual_seed(0)
modes = [(dtype, "") for dtype in (torch.half, torch.bfloat16, torch.float, torch.double)]
modes.append((torch.float, "tf32"))
# With 3 multiprocessors the blocks are smaller.
for (dtype, tf32), width, processors in itertools.product(modes, (20, 72), (1, 3)):
    torch.backends.cuda.matmul.allow_tf32 = bool(tf32)
    torch.ops.attn_emulated.device(9, 227 << 10, processors)
    q, k, v, grad, grad_attn = given = [
        torch.randn(size, dtype=dtype) / 2
        for size in ((7, width), (70, width), (70, width), (7, width), (7, 70))
    ]
    output, attn = torch.attn(q, k, v)
    error = 40 * torch.finfo(torch.half if tf32 else dtype).eps

    def compare(name, actual, expected):
        assert torch.allclose(actual.double(), expected, rtol=error, atol=error), (
            f"{name} of {dtype} {tf32}, {width} columns, on {processors} multiprocessors"
        )

    q, k, v, grad, grad_attn, saved = [x.double() for x in given + [attn]]
    compare("attn", attn, torch.tanh(q @ k.T))
    compare("output", output, saved @ v)
    scores = (grad @ v.T + grad_attn) * (1 - saved**2)
    expected = scores @ k, scores.T @ q, saved.T @ grad
    for i, name in enumerate("qkv"):
        mask = [i == j for j in range(3)]
        grads = torch.ops.aten._attn_backward(*given[3:], *given[:3], attn, mask)
        compare(f"gradient of {name}", grads[i], expected[i])
"""


def test_each_gradient_alone(library):
    """It is right in each precision, for each width, with large blocks and with small ones."""
    run_program(EACH_GRADIENT, library)


LAZY = """
import sys, torch
torch.ops.load_library(sys.argv[1])
torch.manual_seed(0)
is_lazy = torch._C._is_cow_tensor
for dtype in (torch.half, torch.float, torch.double):
    q, k, v, grad, grad_attn = (
        torch.randn(size, dtype=dtype) for size in ((7, 8), (16, 8), (16, 8), (7, 8), (7, 16))
    )
    output, attn = torch.attn(q, k, v)
    for name, outputs, inputs in (
        ("forward", (output, attn), (q, k, v)),
        ("backward", (q, k, v), (grad, grad_attn, q, k, v, attn)),
    ):
        kept = [torch.full_like(x, 7) for x in outputs]
        written, read = ([torch._lazy_clone(x) for x in some] for some in (kept, inputs))
        assert all(map(is_lazy, written + read))
        getattr(torch.ops.attn_emulated, name)(*written, *read)
        for x, y in zip(written, kept):
            assert (y == 7).all() and (x != 7).any(), (dtype, name)
        assert all(map(is_lazy, read)), (dtype, name)
"""


def test_what_is_copied_on_a_write(library):
    """A tensor that is written gets its own memory first; one that is only read stays shared."""
    run_program(LAZY, library)


COPIES = """
import sys, torch
from torch.profiler import profile
torch.ops.load_library(sys.argv[1])
torch.manual_seed(0)
torch.ops.attn_emulated.device(9, 227 << 10, 1)
b, m, n = 6, 20, 24
ROW = 36 * 4  # bytes of 33 elements, up to a multiple of 16


def randn(*sizes, of=(), dtype=torch.float):
    return torch.randn(sizes, dtype=dtype).expand(*of, *(-1,) * len(sizes))


def allocated(name, outputs, inputs):
    with profile(profile_memory=True) as recorded:
        getattr(torch.ops.attn_emulated, name)(*outputs, *inputs)
    return sum(max(0, event.self_cpu_memory_usage) for event in recorded.events())


def compare(case, q, k, v, grad, forward, backward):
    attn = torch.tanh(q @ k.mT)
    outputs = torch.empty_like(attn @ v), torch.empty_like(attn)
    copied = allocated("forward", outputs, (q, k, v))
    assert copied == forward, f"{case}: forward copies {copied} bytes, not {forward}"
    torch.testing.assert_close(outputs, (attn @ v, attn), rtol=1e-4, atol=1e-4)
    s = (grad @ v.mT + attn) * (1 - attn**2)
    expected = s @ k, s.mT @ q, attn.mT @ grad
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in expected]
    copied = allocated("backward", grads, (grad, attn, q, k, v, attn))
    assert copied == backward, f"{case}: backward copies {copied} bytes, not {backward}"
    for x, y in zip(grads, expected):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def wide(*sizes):  # aligned
    return randn(*sizes, 36)[..., :33]


ones = torch.ones(())
for case, q, k, v, grad, forward, backward in (
    ("aligned", wide(b, m), wide(b, n), wide(b, n), wide(b, m), 0, 0),
    ("batch", wide(b, m), randn(n, 33, of=(b,)), wide(b, n), wide(b, m), n, n),
    ("batch of one", wide(1, m), randn(1, n, 33), wide(1, n), wide(1, m), n, n),
    ("whole", wide(b, m), randn(b, n, 33), wide(b, n), wide(b, m), b * n, b * n),
    ("batches", wide(2, b, m), randn(2, 1, n, 33).expand(2, b, n, 33), wide(2, b, n),
     wide(2, b, m), 2 * n, 2 * n),
    ("rows", wide(b, m), randn(b, 1, 33).expand(b, n, 33), wide(b, n), wide(b, m), b, b),
    ("row", wide(b, m), randn(33).expand(b, n, 33), wide(b, n), wide(b, m), 0, 0),
    ("of a sum", wide(b, m), wide(b, n), wide(b, n), ones.expand(b, m, 33), 0, 1),
    ("of a sum over rows", wide(b, m), wide(b, n), wide(b, n), randn(b, m, 1).expand(b, m, 33),
     0, b * m),
):
    compare(case, q, k, v, grad, forward * ROW, backward * ROW)
"""


def test_copies_of_what_is_not_aligned(library):
    """An expanded tensor's elements in memory are copied, each of them once."""
    run_program(COPIES, library)


@pytest.mark.parametrize("device", [(7, 227 << 10, 1), (9, 32 << 10, 1)], ids=["old", "small"])
def test_a_device_without_kernels_composes(library, device):
    passed, said, launches = run_tests(library, "-k", "large_cpu_bfloat16", device=device)
    assert passed, said
    assert launches == 0


def test_a_missing_barrier_is_found(tmp_path):
    """The emulator reports a race: without barriers it finds one."""
    library = emulate(tmp_path, lambda text: text.replace("__syncthreads();", ""))
    passed, said, _ = run_tests(library, "-k", "large_cpu_bfloat16")
    assert not passed
    assert "race: a " in said


LAYOUTS = """
import random, sys, torch
torch.ops.load_library(sys.argv[1])
random.seed(0)
torch.manual_seed(0)


def randn(*sizes):
    \"\"\"Of any strides and offset; expanded along some dimensions.\"\"\"
    stored = [1 if random.random() < 0.3 else size for size in sizes]
    step, offset = random.choice((1, 1, 2)), random.randrange(5)
    order = sorted(range(len(sizes)), key=lambda dim: random.random() * (dim < len(sizes) - 1))
    x = torch.randn(*(stored[dim] for dim in order), step + offset)[..., offset]
    return x.permute([order.index(dim) for dim in range(len(sizes))]).expand(sizes)


for case in range(15):
    *batch, m, n, d, e = [random.choice((1, 2, 3, 9)) for _ in range(random.randrange(4, 8))]
    inputs = q, k, v = [randn(*batch, *size) for size in ((m, d), (n, d), (n, e))]
    grad, grad_attn = randn(*batch, m, e), randn(*batch, m, n)
    attn = torch.tanh(q @ k.mT)
    scores = (grad @ v.mT + grad_attn) * (1 - attn**2)
    expected = attn @ v, attn, scores @ k, scores.mT @ q, attn.mT @ grad
    actual = *torch.attn(*inputs), *torch.ops.aten._attn_backward(
        grad, grad_attn, *inputs, attn, [True] * 3
    )
    for x, y in zip(actual, expected):
        assert torch.allclose(x, y, rtol=1e-4, atol=1e-4), (
            f"case {case}: {[(x.shape, x.stride()) for x in inputs + [grad]]}"
        )
assert torch.ops.attn_emulated.device(9, 227 << 10, 1) > 0
"""


def test_any_layout(library):
    """Inputs and gradients may be expanded, or not aligned."""
    run_program(LAYOUTS, library)


OLDER = """
import itertools, sys, torch
torch.ops.load_library(sys.argv[1])
dtypes = torch.half, torch.bfloat16, torch.float, torch.double
for dtype, width in itertools.product(dtypes, (8, 72)):
    x, attn = torch.zeros(5, width, dtype=dtype), torch.zeros(5, 5, dtype=dtype)
    if dtype is torch.double and width > 64:
        continue  # composed
    for call in (
        lambda: torch.ops.aten.attn(x, x, x),
        *(
            lambda mask=mask: torch.ops.aten._attn_backward(x, attn, x, x, x, attn, mask)
            for mask in itertools.product((False, True), repeat=3)
            if any(mask)
        ),
    ):
        try:
            call()
        except RuntimeError as e:
            assert "trap" in str(e), e
        else:
            raise AssertionError(f"a kernel for {dtype}, {width} has a body")
"""


def test_kernels_for_what_is_older_have_no_body(tmp_path):
    """Upstream compiles every source for such GPUs too; they may lack the instructions."""

    def for_75(text):
        return "#define ARCHITECTURE 750\n" + text.replace("__CUDA_ARCH__", "ARCHITECTURE")

    run_program(OLDER, emulate(tmp_path, for_75))


def base_of(folder, cuda_release, context="enum class Float32Backend { CUDA };"):
    text = f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda_release!r}\n"
    files = {"torch/version.py": text, "torch/include/ATen/Context.h": context}
    return Base(write_files(folder, files))


def compiler(folder, release):
    text = f"""#!/bin/sh
case $1 in
    --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
    *) printf 'compute_%s\\n' 75 80 86 90 100 120 ;;
esac
"""
    nvcc = write_files(folder, {"bin/nvcc": text}) / "bin/nvcc"
    nvcc.chmod(0o755)
    return nvcc


def test_compiler_of_the_bases_release(tmp_path, monkeypatch):
    nvcc = compiler(tmp_path / "cuda", "13.1")
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    found = cuda.find(base_of(tmp_path / "base", "13.0"))
    assert found == cuda.Nvcc(nvcc, "13.1", (80, 90, 100), 75)
    assert found.with_oldest().architectures == (75, 80, 90, 100)


def test_base_without_cuda(tmp_path):
    assert cuda.find(base_of(tmp_path, None)) == "torch 2.13.0 is not built for CUDA"


def test_base_that_cannot_tell_of_tf32(tmp_path):
    why = cuda.find(base_of(tmp_path, "13.0", context="bool allowTF32CuBLAS() const;"))
    assert why.startswith("torch 2.13.0 cannot tell the kernels whether TF32 is allowed")


def test_compiler_of_another_release(tmp_path, monkeypatch):
    nvcc = compiler(tmp_path / "cuda", "11.8")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDACXX", str(nvcc))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    why = cuda.find(base_of(tmp_path / "base", "99.0"))
    assert why.startswith(
        f"torch 2.13.0 is built for CUDA 99.0, for which there is no nvcc; {nvcc} is of 11.8"
    )
    assert why.endswith("on a GPU the operators are composed of others")


def said(symbol, architecture, registers, stores=0, loads=0):
    """Returns what ptxas prints for a kernel."""
    return f"""\
ptxas info    : Compiling entry function '{symbol}' for '{architecture}'
ptxas info    : Function properties for {symbol}
    8 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 8 bytes cumulative stack size
"""


ROWS = "_ZN2at6native10attn_tiles9attn_rowsI6__halfLi64ELb1ELi4EEEvNS1_7RowArgsIT_XT1_EEE"
WIDE = (
    "_ZN2at6native10attn_tiles17attn_wide_columnsIfLi128ELNS1_9PrecisionE1ELb0ELi2EEEvNS1_10"
    "ColumnArgsIT_EE"
)
CLEAN = said(ROWS, "sm_80", 209) + said(ROWS, "sm_90", 203)


def test_what_the_compiler_says():
    half, _, wide = cuda.kernels(CLEAN + said(WIDE, "sm_90", 228, 4, 8))
    assert half == cuda.Kernel("attn_rows<__half, 64, true, 4>", "sm_80", 209, 0)
    assert wide.name == "attn_wide_columns<float, 128, (Precision)1, false, 2>"
    assert wide.spilled == 12


@pytest.mark.parametrize(
    "log, problems",
    [
        ("", ["no kernel was compiled"]),
        (CLEAN, []),
        (said(ROWS, "sm_80", 1), ["attn_rows<__half, 64, true, 4>: not compiled for sm_90"]),
        (
            CLEAN + said(WIDE, "sm_80", 255) + said(WIDE, "sm_90", 255, 4, 8),
            ["attn_wide_columns<float, 128, (Precision)1, false, 2>: spills 12 bytes on sm_90"],
        ),
    ],
    ids=["nothing", "clean", "lacking", "spilling"],
)
def test_what_a_kernel_must_not_have(log, problems):
    assert cuda.problems(cuda.kernels(log), (80, 90)) == problems


@pytest.mark.parametrize(
    "log, problems",
    [
        (CLEAN, ["not compiled for sm_75"]),
        (CLEAN + said(ROWS, "sm_75", 4), []),
        (CLEAN + said(ROWS, "sm_75", 200), ["has a body on sm_75, where it is not launched"]),
    ],
    ids=["lacking", "empty", "body"],
)
def test_kernel_for_what_is_older(log, problems):
    expected = [f"attn_rows<__half, 64, true, 4>: {problem}" for problem in problems]
    assert cuda.problems(cuda.kernels(log), (75, 80, 90)) == expected


def test_table_of_kernels():
    console = Console(width=100, record=True)
    found = cuda.kernels(said(ROWS, "sm_100", 9) + CLEAN + said(WIDE, "sm_90", 228, 4, 8))
    console.print(cuda.table(found))
    lines = [re.split(r" {2,}", line.strip()) for line in console.export_text().splitlines()]
    assert lines[-3][-3:] == ["sm_80", "sm_90", "sm_100"]
    assert lines[-2][1:] == ["209, 0", "203, 0", "9, 0"]
    assert lines[-1][1:] == ["-", "228, 12", "-"]


def test_check_without_a_compiler(tmp_path):
    with pytest.raises(ForkError, match="torch 2.13.0 is not built for CUDA"):
        Graft(Stack(ROOT), base_of(tmp_path, None)).make_kernels()


def test_check_is_for_the_oldest_too(tmp_path, monkeypatch):
    graft = Graft(Stack(ROOT), base_of(tmp_path, "13.0"))
    graft.dir = tmp_path
    graft.nvcc = cuda.Nvcc(Path("nvcc"), "13.0", (80, 90), 75)
    log = said(ROWS, "sm_75", 4) + CLEAN
    monkeypatch.setattr(
        graft, "make", lambda: (tmp_path / "ninja.log").write_text(log, encoding="utf-8")
    )
    assert [kernel.capability for kernel in graft.make_kernels()] == [75, 80, 90]
    assert graft.nvcc.architectures == (75, 80, 90)
