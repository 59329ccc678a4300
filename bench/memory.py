"""How much memory a step takes above its results: `memory.py SIZES MODE CONTENDER THREADS`.

It is measured in a process of its own, by what the system counts: scratch is found wherever a
kernel takes it from, torch's allocator or not, and also scratch that it keeps. SIZES are a case's,
as JSON.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

from cases import Case

LEAST = 16 << 20  # bytes of attn: below this, pages and libraries' own buffers would count too much


class NoMemory(Exception):
    """Why the memory cannot be measured, in one line."""


def peak(case: Case, mode: str, contender: str, threads: int) -> int:
    """Returns the bytes, measured in a new process."""
    # With a fixed threshold malloc maps every large block by itself, and unmaps it when freed.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, json.dumps(case.sizes), mode, contender, str(threads)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NoMemory(f"{case.name} {mode} {contender}: {last}")
    return int(done.stdout)


def status() -> dict[str, int]:
    """Returns the process's memory in bytes."""
    found = {}
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            found[name] = int(value.split()[0]) * 1024
    return found


def measure(sizes: str, mode: str, contender: str, threads: int) -> int:
    import torch
    from contenders import MORE_RUNS, RUNS, Problem

    torch.set_num_threads(threads)
    run = (RUNS | MORE_RUNS)[contender](Problem(Case(**json.loads(sizes)), mode))
    # This starts threads, autograd and the BLAS, but no attn: memory that attn keeps counts.
    x = torch.randn(256, 256, requires_grad=True)
    torch.autograd.grad((x @ x).tanh(), x, torch.ones(256, 256))
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    before = status()
    results = run()
    after = status()
    # Code of libraries that was loaded only now is not counted.
    code = sum(after[x] - before[x] for x in ("RssFile", "RssShmem"))
    held = sum(x.nbytes for x in results)
    return max(0, after["VmHWM"] - before["VmRSS"] - code - held)


if __name__ == "__main__":
    print(measure(*sys.argv[1:4], int(sys.argv[4])))
