"""The operator's benchmark, on the CPU or on this machine's GPU, whose tests run before it."""

import hashlib
import json
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
from fork.overlay import Stack, default_release
from fork.suites import gpu
from fork.suites.files import own
from fork.suites.report import finish, table
from fork.suites.run import environment, run_suites

PUBLISHED = "bench/published"
NATIVE_FOLDER = "aten/src/ATen/native/"


def bench(publish: bool, args: Sequence[str]) -> int:
    """Measures on the CPU; the benchmark's exit status."""
    venv = paths.BUILD / "venv-bench"
    make_venv(venv, Path(__file__).with_name("bench-requirements.txt"))
    graft_into(venv, default_release())
    sweep = ("--sweep", "120")  # unless ARGS say
    return measure(venv, paths.BUILD / "bench", "cpu", publish, (*sweep, *args))


def bench_gpu(base: str, sanitize: bool, publish: bool, args: Sequence[str]) -> int:
    """Tests and measures on the GPU, or runs compute-sanitizer there; an exit status.

    It measures even if a test fails. Results are in build/bench-gpu.
    """
    start = time.monotonic()
    if not gpu.devices():
        raise ForkError("no GPU: NVIDIA's driver is missing, or shows none")
    program = gpu.sanitizer() if sanitize else ""
    with paths.alone():
        open_graft(base).check_kernels()
    graft_into(paths.VENV, base)
    out, python = paths.BUILD / "bench-gpu", paths.VENV / "bin" / "python"
    gpu.check(python, out / "check.log")
    if sanitize:
        gpu.sanitize(program, python, paths.ROOT, out / "sanitizer", environment())
        return 0
    results = run_suites(
        python,
        paths.ROOT,
        gpu.chosen(own(paths.ROOT), paths.ROOT),
        log_dir=out / "tests",
        timeout=gpu.LIMIT,
        variables=gpu.ONLY_CUDA,
    )
    print_wide(table((), results))
    time_left = ("--minutes", str(gpu.minutes_left(start)))  # unless ARGS say
    status = measure(paths.VENV, out, "cuda", publish, (*time_left, *args))
    console.print(f"{(time.monotonic() - start) / 60:.1f} minutes in all")
    return finish(results, status)


def kernel(device: str) -> str:
    """A hash of the sources of the kernel for a device, which says what figures are of."""
    others = {"cpu": "cuda/", "cuda": "cpu/"}[device]
    digest = hashlib.sha256()
    for path, file in sorted(Stack(paths.ROOT).tree().items()):
        name = path.removeprefix(NATIVE_FOLDER)
        if name != path and not name.startswith(others):
            digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def figures() -> list[tuple[str, str, str]]:
    """Of each report in bench/published: path, machine, and whether the kernel is today's."""
    found = []
    for report in sorted((paths.ROOT / PUBLISHED).glob("*.md")):
        machine = report.read_text().splitlines()[2].partition(";")[0]
        device, result = report.stem.partition("-")[0], report.with_suffix(".json")
        known = json.loads(result.read_text()).get("kernel") if result.exists() else None
        state = "this one" if known == kernel(device) else "an older one"
        found.append((f"{PUBLISHED}/{report.name}", machine, state))
    return found


def measure(venv: Path, out: Path, device: str, publish: bool, args: Sequence[str]) -> int:
    """Runs the benchmark with its results in `out`; its exit status."""
    # -E: PYTHONPATH could bring in another torch.
    python = [venv / "bin" / "python", "-E"]
    script, measured = paths.ROOT / "bench/bench.py", kernel(device)
    command = [*python, script, "--out", out, "--device", device]
    status = subprocess.run([*command, *args], cwd=paths.ROOT).returncode
    if publish and not status:
        kept = paths.ROOT / PUBLISHED
        kept.mkdir(exist_ok=True)
        for file in sorted(out.glob(f"{device}*")):
            shutil.copy2(file, kept)
        result = kept / f"{device}.json"
        named = {"kernel": measured, **json.loads(result.read_text())}
        result.write_text(json.dumps(named, indent=1) + "\n")
        console.print(f"{kept.relative_to(paths.ROOT)}: kept for the README")
    return status
