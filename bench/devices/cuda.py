"""A GPU: what is measured there, how long a call takes, and what the machine does at best."""

import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from cases import (
    CUDNN,
    EVENTS,
    HIGHER_ORDER_MODES,
    KERNEL,
    MODES,
    OUTPUT_MODES,
    SDPA,
    TRITON,
    Case,
    Target,
)
from contenders import RUNS, Problem, Run, allow_tf32
from measure import Clock, NoDevice, host_clock
from roofline import Peaks

# Seconds of a block of calls. A few are enough, because events time each call.
BLOCK = 0.01

# Bytes of the working sets whose bandwidth is measured. A smaller one, or one that is in the
# L2 cache, is taken to be as fast as the first.
WORKING_SETS = [1 << log for log in (24, 26, 28, 30)]
SIDE = 8192  # of the matrices that are multiplied
SMALL = 4e9  # multiplications: some of these calls are composed

# The most important cases are first, because the time may be short.
CASES = (
    Case("bfloat16", 4096, batch=16, modes=(*MODES, *OUTPUT_MODES), targets={
        "forward": Target(2.8),
        "step": Target(2.5, scratch=0.02),
    }),
    Case("bfloat16", 4096, d=128, batch=16, modes=("forward", "step", *OUTPUT_MODES), targets={
        "forward": Target(1.45),
        "step": Target(1.55),
    }),
    Case("float32", 8192, targets={
        "step": Target(scratch=0.02),
    }),
    Case("bfloat16", 128),
    # the other dtypes
    Case("float16", 4096, batch=16),
    Case("float32", 8192, tf32=True),
    Case("float64", 4096),
    # over n
    Case("bfloat16", 8192),
    Case("bfloat16", 2048),
    Case("bfloat16", 512),
    # one query, tall, wide, wider, odd
    Case("bfloat16", 16384, m=1, batch=16),
    Case("bfloat16", 128, m=65536),
    Case("bfloat16", 65536, m=128),
    Case("bfloat16", 1023, d=63, e=65, batch=16),
    # small ones, and the rest of the curve over n
    Case("float32", 128),
    Case("bfloat16", 64, batch=64),
    Case("bfloat16", 16384),
)  # fmt: skip


def has_cuda_kernel(op: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA")
    except RuntimeError:  # this torch has no such operator
        return False


class Device:
    """What is timed on the current GPU, and how."""

    cases = CASES
    CYCLES = 1_000_000
    SECONDS = 1.0  # of a row: events vary little

    def __init__(self, threads: int) -> None:
        if not torch.cuda.is_available():
            raise NoDevice("torch sees no GPU (torch.cuda.is_available() is false)")
        self.threads = threads  # of the host
        l2 = torch.cuda.get_device_properties().L2_cache_size
        self.cold = torch.empty(max(1, 2 * l2), dtype=torch.int8, device="cuda")
        seconds = self.timed(lambda: torch.cuda._sleep(self.CYCLES))
        self.cycles_per_second = self.CYCLES / seconds

    def clock(self, case: Case) -> Clock:
        """Returns the GPU's clock, or the host's where a caller waits for the host."""
        if case.launch_bound:
            return host_clock(self.threads)
        return Clock(EVENTS, partial(EventsTimer, gpu=self), BLOCK)

    def timed(self, work: Callable[[], Any], calls: int = 1) -> float:
        """Returns the GPU's seconds for the calls, one after another, after one to warm up."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        work()
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def sleep(self, seconds: float) -> None:
        """Keeps the GPU busy while the host goes on."""
        torch.cuda._sleep(int(seconds * self.cycles_per_second))

    def more(self, case: Case, mode: str) -> list[str]:
        """Returns who else takes part: SDPA beside attn_output, the kernel in small cases, and
        Triton's where the build has others in C++."""
        first_order = mode not in HIGHER_ORDER_MODES
        softmax = mode in OUTPUT_MODES and first_order
        small = case.m * case.n * (case.d + case.e) * max(1, case.batch) < SMALL
        both = first_order and has_cuda_kernel("aten::_portable_attn")
        return softmax * [SDPA, CUDNN] + small * [KERNEL] + both * [TRITON]

    def flush(self) -> None:
        """Flushes the L2 cache."""
        self.cold.zero_()

    def about(self) -> dict:
        """Returns what the figures depend on."""
        gpu = torch.cuda.get_device_properties()
        found = {
            "gpu": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "memory": gpu.total_memory,
            "l2": gpu.L2_cache_size,
            "cuda": torch.version.cuda,
        }
        try:
            asked = (
                "nvidia-smi",
                "--query-gpu=driver_version",
                "--format=csv,noheader",
            )
            said = subprocess.run(asked, capture_output=True, text=True).stdout.split()
        except OSError:
            said = []  # the figures are of use without the driver's version
        return found | ({"driver": said[0]} if said else {})

    def peaks(self) -> Peaks:
        """Measures the peaks with torch's own products, fills, sums and copies, in seconds."""
        found = Peaks({}, {})

        def best(work: Callable[[], Any], calls: int) -> float:
            times = []
            for _ in range(3):
                self.sleep(1e-3)  # short calls are all queued by then
                times.append(self.timed(work, calls) / calls)
            return min(times)

        for arithmetic in ("bfloat16", "float16", "tf32", "float32", "float64"):
            allow_tf32(arithmetic == "tf32")
            dtype = getattr(torch, "float32" if arithmetic == "tf32" else arithmetic)
            # The numbers are random: with zeros, a GPU takes less power and runs faster.
            x, y = (torch.randn(SIDE, SIDE, device="cuda").to(dtype) for _ in range(2))
            to = torch.empty_like(x)
            seconds = best(partial(torch.mm, x, y, out=to), calls=2)
            found.flops[arithmetic] = 2 * SIDE**3 / seconds
        for size in WORKING_SETS:
            data = torch.zeros(size // 4, device="cuda")
            to, source = data.chunk(2)
            works = {
                "store": partial(data.fill_, 1),
                "store_memset": data.zero_,
                "read": data.sum,
                "copy": partial(to.copy_, source),
            }
            for kind, work in works.items():
                rate = size / best(work, calls=max(4, WORKING_SETS[-1] // size))
                found.bandwidth.setdefault(kind, {})[size] = rate
        return found

    def scratch(self, case: Case, mode: str, contender: str) -> int:
        """Returns the bytes that torch allocates in a step, above inputs and results."""
        run = RUNS[contender](Problem(case, mode, "cuda"))
        run()  # libraries take their workspaces, and keep them
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run()
        held = sum(x.nbytes for x in results)
        return max(0, torch.cuda.max_memory_allocated() - before - held)


class Seconds:
    """What a Timer of torch.utils.benchmark returns."""

    def __init__(self, found: Sequence[float]) -> None:
        self.mean, self.median = mean(found), median(found)


class EventsTimer:
    """Times by the GPU's own clock: CUDA events around each call, the L2 cache flushed before.

    The GPU sleeps while the host queues the call, so that between the two events it never
    waits for the host.
    """

    WARM = 3
    LONGEST = 0.02  # seconds of sleep, in case the host has to wait for the GPU

    def __init__(self, run: Run, gpu: Device) -> None:
        self.run, self.gpu = run, gpu
        queueing = []
        for _ in range(self.WARM):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            queueing.append(time.perf_counter() - start)
        self.queueing = min(self.LONGEST, 2 * min(queueing) + 2e-5)

    def blocked_autorange(self, min_run_time: float) -> Seconds:
        """Returns the seconds of a call with its overhead, to choose the number of calls."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.timeit(self.WARM)
        return Seconds([(time.perf_counter() - start) / self.WARM])

    def timeit(self, number: int) -> Seconds:
        pairs = []
        for _ in range(number):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.gpu.sleep(self.queueing)
            self.gpu.flush()
            start.record()
            self.run()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return Seconds([start.elapsed_time(end) / 1e3 for start, end in pairs])
