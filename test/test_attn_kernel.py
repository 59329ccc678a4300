# Owner(s): ["module: cpu"]

import ctypes
import hashlib
import json
import math
import mmap
import os
import random
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, combinations, product

import numpy as np
from attn_function import gradients, INPUTS, OUTPUTS
from test_attn import (
    attn_composed,
    AttnTestCase,
    BATCH_LAYOUTS,
    by_case_in,
    copied_elements,
    evaluate,
    GRADIENTS,
    LAYOUTS,
    RESULTS,
    rule,
    USED,
    widen,
)
from test_attn_output import sized

import torch
from torch.profiler import profile, ProfilerActivity
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
    largeTensorTest,
)
from torch.testing._internal.common_utils import (
    IS_LINUX,
    parametrize,
    run_tests,
    slowTest,
    subtest,
    TEST_WITH_ASAN,
)
from torch.utils.cpp_extension import get_cxx_compiler, load


aten = torch.ops.aten
GIVEN = *INPUTS, "grad_output", "grad_attn"
by_dtype = dtypes(torch.float, torch.double, torch.bfloat16, torch.half)


def around(*sizes):
    return [size + i for size in sizes for i in (-1, 0, 1)]


# The kernel works on blocks of rows and columns, parts of sums, vectors and pairs of numbers,
# and differently on few numbers. Here are all tails of each of these.
SIZES = (
    *(sized(m, 7, 5, 6) for m in (*range(1, 14), *around(24, 48, 96, 144, 192, 240))),
    *(sized(m, 33, 17, 19) for m in around(16, 96, 192, 769)),
    *(
        sized(m, n, 3, 4)
        for m in (5, 8)
        for n in (1, 2, *around(8, 16, 32, 64, 96, 192, 288, 576))
    ),
    *(sized(18, n, 16, 21) for n in around(32, 96, 192, 288, 384)),
    *(sized(m, 7, d, 3) for m in (5, 8) for d in (0, 1, 2, *around(16, 32, 288), 600)),
    *(sized(19, 35, d, 16) for d in around(16, 64, 288, 1024)),
    *(sized(m, 7, 3, e) for m in (5, 8) for e in (0, 1, 2, *around(16, 32, 288), 600)),
    *(sized(19, 34, 17, e) for e in around(16, 64, 288, 1024)),
    *(sized(m, n, 2, 2) for m, n in ((1, 1), (1, 64), (64, 1), (8, 8), (5, 13))),
    *(sized(3, 5, d, e) for d, e in ((1, 16), (16, 1), (7, 9), (0, 17), (17, 0))),
    sized(1, 1, 600, 600),
    sized(1, 20000, 9, 8),
    sized(3, 20000, 1, 2),
    sized(20000, 1, 9, 8),
    sized(20000, 3, 2, 1),
    sized(300, 300, 1, 1),
    sized(97, 289, 289, 31),
    sized(97, 289, 31, 289),
    sized(205, 300, 300, 310),
    sized(676, 36, 7, 66, 2),
    sized(50, 289, 600, 600),
    sized(2, 3, 4, 5, 200),
    sized(13, 33, 17, 9, 7),
    sized(17, 33, 17, 19, 7),
    sized(1, 289, 5, 6, 2, 3),
    sized(50, 600, 40, 20, 3),
)
# Sizes at which, in lower precision, the backward holds the sums of some samples at a time.
IN_PARTS = (
    sized(60, 100, 32, 32, 700),
    sized(60, 100, 9, 8, 2, 1500),
    sized(50, 140001, 16, 16),
    sized(49, 140000, 17, 15),
    sized(140001, 100, 32, 16),
    sized(140000, 97, 31, 3),
)
# The cases in which the kernels of the instruction sets differ, to be run with each.
EDGES = [
    case._replace(name=f"edges_{case.name}")
    for case in (
        # Any number of rows is left of a tile, whose height each instruction set has its own.
        *(sized(m, 35, 7, 5) for m in range(1, 14)),
        *(sized(m, n, 600, 3) for m in (4, 8) for n in (1, 9, 31, 33)),
        *(sized(m, 300, d, d + 3) for m, d in ((1, 31), (2, 33), (3, 16), (6, 64))),
        *(sized(13, 600, 3, e) for e in (1, 7, 15, 33, 300)),
        sized(3, 5, 4, 6),
        sized(16, 32, 16, 16),
        sized(17, 97, 18, 19),
        # The smallest sizes that brgemm multiplies in the forward, and in the backward.
        sized(9, 17, 17, 16),
        sized(49, 17, 17, 16),
        sized(50, 289, 17, 64),
        sized(97, 300, 33, 35, 2),
    )
]
# attn is too large for caches, which the kernel may then write it past.
PAST_CACHES = (
    sized(2200, 4128, 16, 17),
    sized(1100, 4097, 3, 2),
)
by_edge = by_case_in(EDGES)
# Enough for several threads, whether they share out rows, columns or samples.
SHARED = (
    sized(1, 20000, 16, 16),
    sized(6, 9001, 9, 8),
    sized(13, 9001, 9, 8),
    sized(9001, 3, 20, 20),
    sized(500, 600, 33, 7),
    sized(60, 601, 300, 290),
    sized(61, 290, 33, 35, 5),
    sized(20, 20001, 16, 17),
    sized(9001, 33, 20, 20),
    sized(3, 7, 40, 30, 300),
    sized(3, 4, 5, 6, 5000),
    sized(6, 2001, 9, 700),
    sized(1, 2001, 16, 1000),
    sized(300, 64, 200, 9),
    sized(12, 900, 300, 40),
)
# A small case, one of dot products, one in which q is transposed; one whose sizes are odd and
# one whose sizes are even.
VARIED = (
    sized(3, 4, 5, 6, 3, 2),
    sized(6, 40, 100, 110, 3, 2),
    sized(20, 30, 90, 80, 3, 2),
    sized(27, 301, 35, 37, 3, 2),
    sized(26, 300, 36, 38, 3, 2),
)
# Cases for the growth of memory: attn is large, all else is not.
LARGE = (
    (sized(8192, 8192, 64, 64), torch.float),
    (sized(8192, 4096, 64, 64), torch.double),
    (sized(8192, 8192, 64, 64), torch.bfloat16),
    (sized(8192, 8192, 64, 64), torch.half),
    (sized(64, 2**18, 16, 16), torch.float),
    (sized(2**18, 64, 16, 16), torch.float),
)
# Scratch memory that grew with d or e would be larger here than all else.
WIDE = (
    *(sized(m, 3, 2**10, 2) for m in (1, 4, 8)),
    *(sized(m, 600, 2, 2**10) for m in (1, 8, 96)),
    sized(600, 600, 2**10, 2**10),
    sized(1, 2**19, 16, 16),
    sized(40, 2**17, 32, 32),
    sized(64, 2**18, 16, 16),
    sized(2**18, 100, 16, 16),
    sized(100, 2**16, 64, 9),
    sized(1, 1, 1, 1, 2**22),
    sized(2, 1, 1, 1, 2**21),
    sized(5, 6, 5, 6, 2**17),
    sized(49, 1, 1, 1, 2**18),
    sized(60, 100, 32, 32, 800),
)
MIB = 2**20
# One for each way in which the kernel makes tiles, and two for brgemm's: rows of an even
# number of elements and of an odd one.
FAR = (
    sized(4, 4, 3, 3),
    sized(3, 40, 20, 20),
    sized(40, 7, 5, 6),
    sized(60, 70, 33, 35),
    sized(64, 64, 64, 64),
)
# The order in which threads add what their tasks make, for each line's samples, row blocks,
# column blocks, threads, tasks taken at once, slots, and the task that throws, if any. Before an
# atomic operation a thread may let others go first, so that any order of these happens.
ORDERS = """
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <thread>

namespace at::native::attn_cpu::std { // which the kernel takes for std
using namespace ::std;

template <typename T>
class atomic : public ::std::atomic<T> {
  using Base = ::std::atomic<T>;
  static void pause() {
    thread_local minstd_rand random(hash<thread::id>()(this_thread::get_id()));
    if (random() % 8 == 0) {
      this_thread::yield();
    }
  }

 public:
  using Base::Base;
  operator T() const {
    pause();
    return Base::load();
  }
  T operator=(T x) {
    pause();
    return Base::operator=(x);
  }
  T operator++() {
    pause();
    return Base::operator++();
  }
  T exchange(T x) {
    pause();
    return Base::exchange(x);
  }
};

} // namespace at::native::attn_cpu::std

#include <ATen/native/cpu/AttnSchedule.h>

namespace attn = at::native::attn_cpu;

void run(int64_t count, void (*task)(void*, int64_t), void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; ++i) {
    threads.emplace_back([=] {
      try {
        task(context, i);
      } catch (const std::runtime_error& e) {
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

int main() {
  int64_t samples, rows, cols, threads, step, slots, thrower;
  while (std::scanf(
             "%ld %ld %ld %ld %ld %ld %ld",
             &samples, &rows, &cols, &threads, &step, &slots, &thrower) == 7) {
    const attn::Runtime runtime{nullptr, run, std::malloc, std::free};
    attn::Progress progress;
    attn::OrderedSums<double> row_sums(samples * rows, cols, 1, slots, 1, runtime, progress);
    attn::OrderedSums<double> col_sums(samples * cols, rows, cols, slots, 1, runtime, progress);
    std::vector<std::vector<int>> added(samples * (rows + cols));
    const auto hand_in = [&](auto& sums, int64_t task, int64_t sum, int64_t turn, auto& to) {
      sums.slot(task)[0] = task;
      sums.hand_in(task, sum, turn, [&](int64_t, const double* addend) {
        to.push_back(static_cast<int>(*addend));
      });
    };
    const auto tasks = samples * rows * cols;
    attn::run_in_order(runtime, tasks, step, threads, progress, [&](int64_t task, int64_t) {
      if (task == thrower) {
        throw std::runtime_error("thrown");
      }
      const auto sample = task / (rows * cols), tile = task % (rows * cols);
      const auto row = sample * rows + tile / cols, col = sample * cols + tile % cols;
      hand_in(row_sums, task, row, tile % cols, added[row]);
      hand_in(col_sums, task, col, tile / cols, added[samples * rows + col]);
    });
    for (const auto& sum : added) {
      for (int task : sum) {
        std::printf("%d ", task);
      }
      std::printf(";");
    }
    std::printf("%s\\n", progress.failed() ? "failed" : "");
  }
}
"""
# Each instruction set contains those before it.
CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")
# A variable that is set for a process with a lesser set: it tests properties with a fifth of the
# examples.
FEWER_EXAMPLES = "ATTN_FEWER_EXAMPLES"


def printed_by(name, source, given="", flags=()):
    """What a program prints that includes the kernel's headers, and is given this."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, f"{name}.cpp")
        with open(file, "w") as f:
            f.write(source)
        program = load(
            f"attn_{name}",
            [file],
            extra_cflags=[*flags],
            extra_ldflags=[*flags],
            build_directory=folder,
            is_python_module=False,
            is_standalone=True,
        )
        library = os.path.join(torch.__path__[0], "lib")
        env = os.environ | {"LD_LIBRARY_PATH": library}
        # The program takes seconds: if it takes minutes, it hangs.
        return subprocess.check_output(
            [program], env=env, text=True, input=given, timeout=120
        )


def runs_with(*flags):
    """Whether a program that is compiled with these flags runs here."""
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "program")
        command = [*get_cxx_compiler().split(), "-x", "c++", "-", *flags, "-o", program]
        given = {"input": b"int main() {}", "stderr": subprocess.DEVNULL}
        return not (
            subprocess.run(command, **given).returncode
            or subprocess.run([program], **given).returncode
        )


def ternary(*sizes):
    return torch.randint(-1, 2, sizes).double()


def sparse(*sizes):
    """One or two numbers in each row; together they reach the last columns."""
    x = torch.zeros(sizes, dtype=torch.double)
    *batch, rows, cols = sizes
    if x.numel() > 0:
        columns = -1 - torch.arange(rows), torch.randint(cols, (rows,))
        index = torch.stack(columns, -1).remainder(cols).expand(*batch, rows, 2)
        x.scatter_(-1, index, 2 * torch.randint(2, index.shape).double() - 1)
    return x


def exact(case, dtype):
    """Inputs and gradients of which every sum is exact in float, in any order.

    A score is 0, or so far from it that attn is -1 or 1; so 1 - attn**2 is 1 or 0. Before
    the last sums all numbers are exact in bfloat16 too.
    """
    m, d, n, e = case.m, case.d, case.n, case.e
    tensors = [
        factor * make(*case.batch, *sizes)
        for factor, make, sizes in (
            (1, sparse, (m, d)),
            (32, ternary, (n, d)),
            (1, ternary, (n, e)),
            (1, sparse, (m, e)),
            (1, ternary, (m, n)),
        )
    ]
    tensors = [x.to(dtype) for x in tensors]
    return tensors[:3], tensors[3:]


def narrow(tensors, dtype):
    return [None if x is None else x.to(dtype) for x in tensors]


def higher(x):
    """A NumPy array of a higher precision."""
    wide = np.longdouble if x.dtype == torch.double else np.double
    return x.detach().double().numpy().astype(wide)


def reference(inputs, grads, used=OUTPUTS):
    """RESULTS in a higher precision."""
    q, k, v, *grads = map(higher, (*inputs, *grads))
    grad_output, grad_attn = (
        grad * (name in used) for name, grad in zip(OUTPUTS, grads)
    )
    attn = np.tanh(q @ k.swapaxes(-1, -2))
    grad_scores = (grad_output @ v.swapaxes(-1, -2) + grad_attn) * (1 - attn * attn)
    return (
        attn @ v,
        attn,
        grad_scores @ k,
        grad_scores.swapaxes(-1, -2) @ q,
        attn.swapaxes(-1, -2) @ grad_output if "output" in used else None,
    )


def compact(x):
    """A copy of x, row after row."""
    return x.clone(memory_format=torch.contiguous_format)


def both_ways(q, k, v, grad_output, grad_attn, attn):
    """RESULTS of the two operators, which are given the arguments as they are."""
    grads = aten._attn_backward(
        grad_output, grad_attn, q, k, v, attn, (True, True, True)
    )
    return *torch.attn(q, k, v), *grads


def special_values():
    for name, value in ("nan", np.nan), ("inf", np.inf), ("minus_inf", -np.inf):
        for size in (1, 2):
            for where in combinations(GIVEN, size):
                yield subtest((value, where), name="_".join((name, "in", *where)))


def memory(field):
    with open("/proc/self/status") as file:
        (line,) = (x for x in file if x.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def growth(run):
    """The most memory that ``run`` takes, without what it returns."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is now what there is
    before = memory("VmRSS")
    results = run()
    return memory("VmHWM") - before - sum(x.nbytes for x in results)


def growths():
    """For a process of its own: a line of JSON with, for each of LARGE, by how much attn, its
    backward and a tensor as large as attn let memory grow.
    """
    found = []
    for case, dtype in LARGE:
        inputs, grads = case.make("cpu", dtype)
        few = [x[:256, :256] for x in (*inputs, *grads)]
        both_ways(*few, few[-1])  # starts the threads
        found.append(
            (
                growth(lambda: torch.attn(*inputs)),
                growth(
                    lambda: aten._attn_backward(*grads, *inputs, grads[1], (True,) * 3)
                ),
                growth(lambda: [grads[1].clone().sum()]),
            )
        )
    print(json.dumps(found))


def allocations(run):
    """What ``run`` returns, and the bytes that PyTorch's allocator gives and gets back
    meanwhile.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        results = run()
    events = found.profiler.kineto_results.events()
    events = [event for event in events if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return results, [event.nbytes() for event in events]


def scratch(run):
    """The most memory that ``run`` asks for or takes at once, without what it returns."""
    asked = []

    def profiled():
        results, sizes = allocations(run)
        returned = sum(x.nbytes for x in results)
        asked.append(max(accumulate(sizes), default=0) - returned)
        return results

    return max(growth(profiled), *asked)


def scratch_bound(case, dtype, threads):
    """Of the forward, and of the backward: see the note."""
    sums = 0
    if dtype.itemsize == 2:
        rows = case.m * case.d if case.n > 96 else 0
        cols = case.n * (case.d + case.e) if case.m > 96 else 0
        sums = min(max(rows + cols, 2**22), math.prod(case.batch) * (rows + cols))
    return 12 * MIB * threads, 12 * MIB * threads + 4 * sums


def sweep(count):
    """Cases of any sizes whose results and products are not too large; the same in each run."""
    random.seed(0)
    while count > 0:
        m, n, batch = (int(2 ** random.uniform(0, 20)) for _ in range(3))
        d, e = (int(2 ** random.uniform(0, 10)) for _ in range(2))
        numbers = batch * (m * n + (m + n) * (d + e))
        if numbers < 2**23 and batch * m * n * (d + e) < 2**26:
            yield sized(m, n, d, e, batch)
            count -= 1


def scratches():
    """For a process of its own: a line of JSON, for each of WIDE and of a sweep what it asks
    for, and by how much memory grows.
    """
    found = []
    for index, case in enumerate((*WIDE, *sweep(40))):
        dtype = (torch.float, torch.bfloat16, torch.double, torch.half)[index % 4]
        if case in WIDE:
            runs = product((torch.float, torch.bfloat16), ((1, 2), (None, 1)))
        else:
            runs = [(dtype, random.choice(((1, 2), (None, 1))))]
        m, d, n, e = case.m, case.d, case.n, case.e
        for dtype, (column, threads) in runs:
            torch.set_num_threads(threads)
            # All rows are the same one in memory, or all columns are.
            tensors = [
                torch.zeros(rows if column else 1, column or cols, dtype=dtype).expand(
                    *case.batch, rows, cols
                )
                for rows, cols in ((m, d), (n, d), (n, e), (m, e), (m, n), (m, n))
            ]
            inputs, grads = tensors[:3], tensors[3:]
            sizes = []
            for run in (
                lambda: torch.attn(*inputs),
                lambda: aten._attn_backward(
                    *grads[:2], *inputs, grads[2], (True, True, True)
                ),
            ):
                sizes.append(scratch(run))
            bound = scratch_bound(case, dtype, threads)
            found.append(((case, str(dtype), column, threads), sizes, bound))
    print(json.dumps(found))


class Guarded:
    """A copy of x between two pages that cannot be read, close to one of them."""

    def __init__(self, x, at_end):
        page, used = mmap.PAGESIZE, -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, used + 2 * page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for guard in (address, address + page + used):
            if mprotect(guard, page, 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        self.tensor = torch.frombuffer(
            memory,
            dtype=x.dtype,
            count=x.numel(),
            offset=page + (used - x.nbytes if at_end else 0),
        ).view(x.shape)
        self.tensor.copy_(x)


class Far:
    """A copy of x in which 2**31 bytes lie between the first and the last row, or column.
    Of what is between them no memory is taken.
    """

    def __init__(self, x, columns, odd):
        rows, cols = x.mT.shape if columns else x.shape
        stride = 2 * (2**30 // x.itemsize // (rows - 1) + 8) + odd
        count = (rows - 1) * stride + cols
        no_reserve = 0x4000 if IS_LINUX else 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        memory = mmap.mmap(-1, count * x.itemsize, flags=flags)
        base = torch.frombuffer(memory, dtype=x.dtype, count=count)
        self.tensor = base.as_strided((rows, cols), (stride, 1))
        if columns:
            self.tensor = self.tensor.mT
        self.tensor.copy_(x)


def digests():
    """Digests of the inputs and of what the forward and the backward make of them."""
    torch.manual_seed(0)
    found = {part: hashlib.sha256() for part in ("inputs", "forward", "backward")}
    for dtype, case in product((torch.float, torch.double), EDGES):
        inputs, grads = exact(case, dtype)
        # Not randn, which depends on the instruction set itself.
        q, k, v, *grads, attn = (
            torch.randint_like(x, -999, 1000) / 2**12
            for x in (*inputs, *grads, grads[1])
        )
        for part, tensors in (
            ("inputs", (q, k, v, *grads, attn)),
            ("forward", torch.attn(q, k, v)),
            ("backward", aten._attn_backward(*grads, q, k, v, attn, (True,) * 3)),
        ):
            for x in tensors:
                found[part].update(x.numpy().tobytes())
    return {part: digest.hexdigest() for part, digest in found.items()}


def report_on(module, pattern):
    """What became of the tests of ``module`` whose names have ``pattern`` in them."""
    result = unittest.main(module, argv=["", "-k", pattern], exit=False).result
    return {
        "capability": torch.backends.cpu.get_cpu_capability().replace(
            "NO AVX", "DEFAULT"
        ),
        "tests": result.testsRun,
        "passed": result.wasSuccessful(),
    }


def run_edges():
    """For a process of its own: the tests of EDGES, then a line of JSON on them."""
    print(json.dumps(report_on(__name__, "edges") | {"digests": digests()}))


def in_process(function, **environment):
    """What the last line that ``function`` prints in a process of its own says."""
    folder, file = os.path.split(os.path.realpath(function.__code__.co_filename))
    module, _ = os.path.splitext(file)
    process = subprocess.run(
        [sys.executable, "-c", f"import {module}; {module}.{function.__name__}()"],
        cwd=folder,
        # With this, threads that wait leave their processors to others: there may be few.
        env=os.environ | {"OMP_WAIT_POLICY": "passive"} | environment,
        capture_output=True,
        text=True,
    )
    if process.returncode != 0:
        raise RuntimeError(process.stdout + process.stderr)
    return json.loads(process.stdout.splitlines()[-1]), process.stderr


class KernelTestCase(AttnTestCase):
    def assert_by_rule(self, dtype, case, actual, plain, expected):
        """For float64 too the reference is more precise."""
        for name, x, y, z in zip(RESULTS, actual, plain, expected):
            with self.subTest(result=name):
                self.assertEqual(x is None, z is None)
                if x is not None and x.numel() > 0:
                    self.assertEqual(x.dtype, dtype)
                    bound = rule(dtype, higher(y), z, case)
                    self.assertLessEqual(abs(higher(x) - z).max(), bound)

    def assert_results(self, dtype, case, used=OUTPUTS):
        inputs, grads = case.make("cpu", dtype)
        self.assert_by_rule(
            dtype,
            case,
            (*torch.attn(*inputs), *gradients(torch.attn, inputs, grads, used=used)),
            (
                *attn_composed(*inputs),
                *gradients(attn_composed, inputs, grads, used=used),
            ),
            reference(inputs, grads, used),
        )

    def reports_by_capability(self, function):
        """What a process of its own reports of passed tests, for each instruction set below
        the best that the machine has.
        """
        best = torch.backends.cpu.get_cpu_capability().replace("NO AVX", "DEFAULT")
        if best not in CAPABILITIES[1:]:
            self.skipTest(f"none is below {best}")
        for capability in CAPABILITIES[: CAPABILITIES.index(best)]:
            chosen = {"ATEN_CPU_CAPABILITY": capability.lower(), FEWER_EXAMPLES: "1"}
            report, log = in_process(function, **chosen)
            self.assertEqual(report["capability"], capability)
            self.assertTrue(report["passed"], msg=log)
            yield report

    def assert_exact(self, dtype, case):
        inputs, grads = exact(case, dtype)
        expected = attn_composed(*widen(inputs))
        self.assert_bitwise(torch.attn(*inputs), narrow(expected, dtype))
        for used in USED:
            with self.subTest(used=used):
                actual, expected = (
                    gradients(op, *tensors, used=used)
                    for op, tensors in (
                        (torch.attn, (inputs, grads)),
                        (attn_composed, (widen(inputs), widen(grads))),
                    )
                )
                self.assert_bitwise(actual, narrow(expected, dtype))


class TestAttnKernel(KernelTestCase):
    @by_edge
    @by_dtype
    def test_values_and_gradients(self, device, dtype, case):
        self.assert_results(dtype, case)

    @by_case_in(SIZES)
    @dtypes(torch.float, torch.bfloat16)
    def test_values_of_tails(self, device, dtype, case):
        """test_no_term_is_lost has these sizes in each dtype, exactly, but a fifth of the terms
        are zero in all of its results. Double shares float's code, and half bfloat16's.
        """
        self.assert_results(dtype, case)

    # Large scores cancel in 1 - attn**2; small ones are attn itself, nearly. Few scores the
    # composed maths may by luck round well, all of them.
    @by_case_in([case for case in EDGES if case.m * case.n >= 100])
    @parametrize(
        "scores", (subtest(20.0, name="saturated"), subtest(1e-4, name="tiny"))
    )
    @by_dtype
    def test_scale_of_scores(self, device, dtype, scores, case):
        case = case._replace(scores=scores)
        for used in USED:
            with self.subTest(used=used):
                self.assert_results(dtype, case, used)

    @by_case_in((*SIZES, *EDGES, *PAST_CACHES))
    @by_dtype
    def test_no_term_is_lost(self, device, dtype, case):
        self.assert_exact(dtype, case)

    @parametrize("wanted,used", GRADIENTS)
    @by_dtype
    def test_choice_of_gradients(self, device, dtype, wanted, used):
        for case in (EDGES[-1], sized(7, 33, 300, 4), sized(2, 600, 5, 300)):
            inputs, grads = exact(case, dtype)
            actual, expected = (
                gradients(op, *tensors, wanted, used)
                for op, tensors in (
                    (torch.attn, (inputs, grads)),
                    (attn_composed, (widen(inputs), widen(grads))),
                )
            )
            self.assert_bitwise(actual, narrow(expected, dtype))

    @by_dtype
    def test_subnormal(self, device, dtype):
        """As exact as the composed maths, which may flush those of bfloat16 to zero."""
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        for case in (EDGES[-1], sized(1, 40, 3, 33)):
            (q, k, v), _ = exact(case, dtype)
            inputs = q, k, (v.double() * smallest).to(dtype)
            expected = attn_composed(*widen(inputs))[0]
            self.assertGreater(expected.abs().max(), 0)
            error, plain = (
                (op(*inputs)[0].double() - expected).abs().max()
                for op in (torch.attn, attn_composed)
            )
            self.assertLessEqual(error, 2 * plain)

    def test_sums_in_half_do_not_overflow(self, device):
        for case in EDGES:
            (q, k, v), (grad_output, _) = exact(case, torch.half)
            # Where a part of the sum exceeds half's largest number, all of it need not.
            inputs, grads = (q, k, 2**13 * v), (2**13 * grad_output, None)
            attn = torch.attn(*inputs).attn
            output, _ = attn_composed(*widen(inputs))
            self.assert_bitwise(torch.attn(*inputs)[:1], [output.half()])
            grad_v = attn.double().mT @ grads[0].double()
            _, _, found = aten._attn_backward(*grads, *inputs, attn, (True,) * 3)
            self.assert_bitwise([found], [grad_v.half()])

    @parametrize("value,where", list(special_values()))
    @by_dtype
    def test_special_values(self, device, dtype, value, where):
        for case in VARIED:
            inputs, grads = case._replace(scores=0.1).make(device, dtype)
            arguments = dict(zip(GIVEN, (*inputs, *grads)))
            for name in where:
                x = arguments[name][0, 1]
                # One is in the tails of rows and columns, one is not.
                x[1, 2] = x[-1, -1] = value
            actual = evaluate(torch.attn, inputs, grads)
            # oneDNN's product of bfloat16 on a CPU without an instruction for it makes NaN
            # of an inf at the end of an odd number of terms.
            with torch.backends.mkldnn.flags(enabled=False):
                expected = evaluate(attn_composed, inputs, grads)
            self.assertFalse(all(x.isfinite().all() for x in expected))
            for name, x, y in zip(RESULTS, actual, expected):
                for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                    with self.subTest(case=case.name, result=name, kind=kind.__name__):
                        self.assertEqual(kind(x), kind(y))

    @by_edge
    @by_dtype
    def test_memory_is_used_again(self, device, dtype, case):
        """What is in scratch memory from before is not in the results."""
        inputs, grads = exact(case, dtype)
        expected = evaluate(torch.attn, inputs, grads)
        nan = [[torch.full_like(x, np.nan) for x in xs] for xs in (inputs, grads)]
        for _ in range(3):  # so that malloc keeps its memory
            evaluate(torch.attn, *nan)
        self.assert_bitwise(evaluate(torch.attn, inputs, grads), expected)
        for x in expected:
            self.assertTrue(x.isfinite().all())

    @unittest.skipUnless(IS_LINUX, "mprotect")
    @by_edge
    @by_dtype
    def test_reads_nothing_else(self, device, dtype, case):
        inputs, grads = exact(case, dtype)
        tensors = *inputs, *grads, torch.attn(*inputs).attn
        expected = both_ways(*tensors)
        for at_end in (False, True):
            guarded = [Guarded(x, at_end).tensor for x in tensors]
            self.assert_bitwise(both_ways(*guarded), expected)
            guarded = [Guarded(x.mT, at_end).tensor.mT for x in tensors]
            self.assert_bitwise(both_ways(*guarded), expected)

    @by_dtype
    def test_callers_at_once(self, device, dtype):
        calls = [case.make(device, dtype) for case in SHARED]
        expected = [evaluate(torch.attn, *call) for call in calls]
        with ThreadPoolExecutor(len(calls)) as pool:
            actual = pool.map(lambda call: evaluate(torch.attn, *call), 3 * calls)
            for results, wanted in zip(actual, 3 * expected):
                self.assert_bitwise(results, wanted)

    @by_dtype
    def test_in_parallel_region(self, device, dtype):
        try:
            openmp = ctypes.CDLL(None)
            in_parallel, parallel = openmp.omp_in_parallel, openmp.GOMP_parallel
        except AttributeError:
            self.skipTest("no OpenMP that GCC's code can call")
        for case in SHARED:
            inputs, grads = case.make(device, dtype)
            tensors = *inputs, *grads, torch.attn(*inputs).attn
            expected = both_ways(*tensors)
            found = []

            @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
            def body(_):
                found.append((in_parallel(), both_ways(*tensors)))

            parallel(body, None, 3, 0)
            self.assertEqual([inside for inside, _ in found], [1, 1, 1])
            for _, results in found:
                self.assert_bitwise(results, expected)

    # In reduced precision another order of a sum shows in few of the results.
    @by_case_in((sized(6, 400, 1000, 20), sized(400, 6, 1000, 20)))
    @by_dtype
    def test_layout_of_long_rows(self, device, dtype, case):
        for _ in range(20):
            (q, k, v), _ = case._replace(scores=0.5).make(device, dtype)
            expected = torch.attn(q, k, v)
            for inputs in (
                (q, LAYOUTS["transposed"](k), v),
                (LAYOUTS["transposed"](q), k, v),
            ):
                self.assert_bitwise(torch.attn(*inputs), expected)

    @parametrize("layout", (LAYOUTS | BATCH_LAYOUTS).keys())
    @by_dtype
    def test_copies_nothing(self, device, dtype, layout):
        for case in VARIED:
            inputs, grads = case._replace(layout=layout).make(device, dtype)
            tensors = *inputs, *grads, grads[1]
            for op in "aten::attn", "aten::_attn_backward":
                copied = copied_elements(lambda: both_ways(*tensors), op)
                self.assertEqual(copied, 0, msg=case.name)

    # What threads hold, and in reduced precision the sums in float of the gradients, is
    # little beside attn. No temporary may be as large as that.
    @unittest.skipUnless(os.access("/proc/self/clear_refs", os.W_OK), "needs Linux")
    @unittest.skipIf(TEST_WITH_ASAN, "ASan has memory of its own")
    def test_memory(self, device):
        # So that malloc returns all memory at once, and none is hidden in what it keeps.
        found, _ = in_process(growths, MALLOC_MMAP_THRESHOLD_=str(2**16))
        self.assertEqual(len(found), len(LARGE))
        for (case, dtype), (forward, backward, temporary) in zip(LARGE, found):
            with self.subTest(case=case.name, dtype=dtype):
                m, d, n, e = case.m, case.d, case.n, case.e
                bound = 0.03 * m * n * dtype.itemsize
                sums = 4 * (m * d + n * (d + e)) if dtype.itemsize == 2 else 0
                self.assertLess(forward, bound)
                self.assertLess(backward, bound + sums)
                # A temporary of attn's size would be seen.
                self.assertGreater(temporary, 30 * bound)

    # The bound holds for any sizes. With those of WIDE some path once took more.
    @unittest.skipUnless(os.access("/proc/self/clear_refs", os.W_OK), "needs Linux")
    @unittest.skipIf(TEST_WITH_ASAN, "ASan has memory of its own")
    def test_scratch_memory(self, device):
        found, _ = in_process(scratches, MALLOC_MMAP_THRESHOLD_=str(2**16))
        for case, sizes, bounds in found:
            for name, size, bound in zip(("forward", "backward"), sizes, bounds):
                with self.subTest(case=case, name=name):
                    self.assertLess(size, bound)

    @by_case_in(IN_PARTS)
    @dtypes(torch.bfloat16, torch.half)
    @unittest.skipIf(TEST_WITH_ASAN, "too slow with ASan")
    def test_sums_in_parts(self, device, dtype, case):
        inputs, grads = exact(case, dtype)
        expected = narrow(evaluate(attn_composed, widen(inputs), widen(grads)), dtype)
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            with self.subTest(threads=count):
                self.assert_bitwise(evaluate(torch.attn, inputs, grads), expected)

    @unittest.skipIf(TEST_WITH_ASAN, "too slow with ASan")
    def test_instruction_sets(self, device):
        found = [digests()]
        for report in self.reports_by_capability(run_edges):
            self.assertGreater(report["tests"], 5 * len(EDGES))
            found.append(report["digests"])
        # Each has a kernel of its own: the order of a sum's terms depends on how many rows
        # and columns fit in the registers, so the last bits differ.
        for part in ("inputs", "forward", "backward"):
            different = {x[part] for x in found}
            self.assertEqual(len(different), 1 if part == "inputs" else len(found))

    @unittest.skipIf(sys.platform == "win32", "the linker's options are those of ELF")
    @parametrize(
        "flag",
        (
            subtest("", name="plain"),
            subtest("-fsanitize=thread", name="thread_sanitizer"),
        ),
    )
    def test_order_of_sums(self, device, flag):
        """Threads add in the order of the tasks, and end if a task throws."""
        flags = flag.split()
        if flags and not runs_with(*flags):
            self.skipTest(f"no program runs here that is compiled with {flag}")
        random.seed(seed := random.SystemRandom().randrange(2**32))
        cases = [
            (*(random.randint(1, most) for most in (3, 6, 6, 8, 3, 9)), thrower)
            for thrower in (*[-1] * 500, *([] if flags else range(20)))
        ]
        given = "\n".join(" ".join(map(str, case)) for case in cases)
        for case, line in zip(
            cases, printed_by("orders", ORDERS, given, flags).splitlines(), strict=True
        ):
            samples, rows, cols, *_, thrower = case
            *found, end = line.split(";")
            found = [[int(task) for task in text.split()] for text in found]
            tasks = torch.arange(samples * rows * cols).view(samples, rows, cols)
            sums = [*tasks.flatten(0, 1).tolist(), *tasks.mT.flatten(0, 1).tolist()]
            with self.subTest(seed=seed, case=case):
                throws = 0 <= thrower < tasks.numel()
                self.assertEqual(end, "failed" if throws else "")
                # Once a task has thrown, none waits for another, and the sums mean nothing.
                if not throws:
                    self.assertEqual(found, sums)

    @unittest.skipUnless(IS_LINUX, "memory that is only taken where it is written")
    @by_case_in(FAR)
    @by_dtype
    def test_far_strides(self, device, dtype, case):
        """A block of any argument may span more than 2**31 bytes."""
        inputs, grads = case.make(device, dtype)
        tensors = *inputs, *grads, torch.attn(*inputs).attn
        expected = both_ways(*tensors)
        for i, columns, odd in product(range(6), (False, True), (False, True)):
            with self.subTest(argument=i, columns=columns, odd=odd):
                far = Far(tensors[i], columns, odd).tensor
                self.assert_bitwise(
                    both_ways(*tensors[:i], far, *tensors[i + 1 :]), expected
                )

    # attn has more than 2**31 elements; so has each tensor below that is long.
    @slowTest
    @largeTensorTest("6GB", device="cpu")
    @unittest.skipIf(TEST_WITH_ASAN, "too slow with ASan")
    def test_large_square(self, device):
        size = 46400
        (q, _, _), (grad_output, _) = exact(sized(size, 1, 16, 16), torch.bfloat16)
        (_, k, v), _ = exact(sized(1, size, 16, 16), torch.bfloat16)
        output, attn = torch.attn(q, k, v)
        # attn is its own grad_attn: there may be no memory for another one.
        actual = aten._attn_backward(
            grad_output, attn, q, k, v, attn, (True, True, True)
        )
        some = torch.tensor([0, 1, size // 2, size - 2, size - 1])
        for rows, cols in ((some, slice(None)), (slice(None), some)):
            inputs = widen((q[rows], k[cols], v[cols]))
            expected = attn_composed(*inputs)
            grads = gradients(
                attn_composed, inputs, (*widen([grad_output[rows]]), expected[1])
            )
            self.assert_bitwise([attn[rows, cols]], narrow(expected[1:], attn.dtype))
            if rows is some:
                found = [output[rows], actual[0][rows]]
                self.assert_bitwise(found, narrow((expected[0], grads[0]), attn.dtype))
            else:
                found = [x[cols] for x in actual[1:]]
                self.assert_bitwise(found, narrow(grads[1:], attn.dtype))

    @slowTest
    @largeTensorTest("9GB", device="cpu")
    @unittest.skipIf(TEST_WITH_ASAN, "too slow with ASan")
    def test_large_row(self, device):
        size = 2**31 + 12345
        places = torch.tensor([0, 77, 2**31 - 1, 2**31, 2**31 + 1, size - 1])
        q = torch.full((1, 1), 64, dtype=torch.bfloat16)
        k = torch.zeros(size, 1, dtype=q.dtype)
        signs = torch.tensor([1, -1, 1, 1, -1, -1]).to(q)
        k[places, 0] = signs / 2

        output, attn = torch.attn(q, k, k)
        self.assertEqual(attn.count_nonzero(), len(places))
        self.assertEqual(attn[0, places], signs)
        self.assertEqual(output.item(), 3)
        del attn

        # grad_q sums (v + grad_attn) (1 - attn**2) k, where v, grad_attn and attn are k, too.
        (grad_q, _, _) = aten._attn_backward(
            torch.ones_like(q), k.mT, q, k, k, k.mT, (True, False, False)
        )
        self.assertEqual(grad_q.item(), 2.25)


instantiate_device_type_tests(TestAttnKernel, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
