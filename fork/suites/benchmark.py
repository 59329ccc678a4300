"""The operator's benchmark, on the CPU or on this machine's GPU, whose tests run before it."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from fork import paths
from fork.bootstrap import make_venv
from fork.console import console, print_wide
from fork.errors import ForkError
from fork.graft import graft_into, open_graft
from fork.overlay import default_release
from fork.suites import gpu
from fork.suites.files import own
from fork.suites.report import finish, table
from fork.suites.run import environment, run_suites


def bench(publish: bool, args: Sequence[str]) -> int:
    """Measures on the CPU; the benchmark's exit status."""
    venv = paths.BUILD / "venv-bench"
    make_venv(venv, Path(__file__).with_name("bench-requirements.txt"))
    graft_into(venv, default_release())
    sweep = ("--sweep", "120")  # unless ARGS say
    return measure(venv, paths.BUILD / "bench", "cpu", publish, (*sweep, *args))


def bench_gpu(release: str, sanitize: bool, publish: bool, args: Sequence[str]) -> int:
    """Tests and measures on the GPU, or runs compute-sanitizer there; an exit status.

    It measures even if a test fails. Results are in build/bench-gpu.
    """
    start = time.monotonic()
    if not gpu.devices():
        raise ForkError("no GPU: NVIDIA's driver is missing, or shows none")
    program = gpu.sanitizer() if sanitize else ""
    with paths.alone():
        open_graft(release).check_kernels()
    graft_into(paths.VENV, release)
    out, python = paths.BUILD / "bench-gpu", paths.VENV / "bin" / "python"
    gpu.check(python, out / "check.log")
    if sanitize:
        gpu.sanitize(program, python, paths.ROOT, out / "sanitizer", environment())
        return 0
    results = run_suites(
        python,
        paths.ROOT,
        gpu.chosen(own(paths.ROOT)),
        log_dir=out / "tests",
        timeout=gpu.LIMIT,
        variables=gpu.ONLY_CUDA,
    )
    print_wide(table((), results))
    time_left = ("--minutes", str(gpu.minutes_left(start)))  # unless ARGS say
    status = measure(paths.VENV, out, "cuda", publish, (*time_left, *args))
    console.print(f"{(time.monotonic() - start) / 60:.1f} minutes in all")
    return finish(results, status)


def measure(venv: Path, out: Path, device: str, publish: bool, args: Sequence[str]) -> int:
    """Runs the benchmark with its results in `out`; its exit status."""
    # -E: PYTHONPATH could bring in another torch.
    python = [venv / "bin" / "python", "-E"]
    script = paths.ROOT / "benchmarks/attn/bench.py"
    command = [*python, script, "--out", out, "--device", device]
    status = subprocess.run([*command, *args], cwd=paths.ROOT).returncode
    if publish and not status:
        kept = paths.ROOT / "fork" / "results"
        kept.mkdir(exist_ok=True)
        for file in sorted(out.glob(f"{device}*")):
            shutil.copy2(file, kept)
        console.print(f"{kept.relative_to(paths.ROOT)}: kept for the README")
    return status
