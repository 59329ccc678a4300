"""What `make bench-gpu` does on a GPU beside measuring: tests, compute-sanitizer."""

import ctypes
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from fork.console import run, step
from fork.errors import ForkError
from fork.project import PROJECT
from fork.suites.results import SUMMARY

# All of it takes MINUTES, the graft included; REST of these are for the plot.
MINUTES, REST = 8, 0.5
FEWEST, MOST = 1.5, 4.0  # minutes of measuring
LIMIT = 150  # seconds that a test file may take; they run side by side

# A test file that has this makes tests for CUDA, alone or beside those for other devices.
HAS_CUDA = re.compile(
    r'instantiate_device_type_tests\(\s*\w+, globals\(\)(, only_for="cuda")?\s*\)'
)
ONLY_CUDA = {"PYTORCH_TESTING_DEVICE_ONLY_FOR": "cuda"}

TOOLS = ("memcheck", "racecheck", "synccheck")
# unittest compares a pattern that has a * with the whole name.
SANITIZED = "*.test_values_and_gradients_*float*"


def devices() -> int:
    """Returns how many GPUs NVIDIA's driver shows, without torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    found = not driver.cuInit(0) and not driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value if found else 0


def check(python: Path, log: Path) -> None:
    """Raises ForkError unless the torch of `python` can use the GPU."""
    run([python, "-E", "-c", "import torch; torch.cuda.init()"], log, "torch cannot use the GPU")


def chosen(own: Iterable[str], tree: Path) -> dict[str, tuple[str, ...]]:
    """Returns as suites the tests on CUDA in the operator's own test files."""
    texts = {name: (tree / "test" / name).read_text() for name in own}
    return {name: ("*CUDA.*",) for name, text in texts.items() if HAS_CUDA.search(text)}


def minutes_left(start: float) -> float:
    """Returns the minutes left for measuring in a run that began at `start` (time.monotonic)."""
    left = MINUTES - REST - (time.monotonic() - start) / 60
    return round(min(MOST, max(FEWEST, left)), 2)


def sanitizer() -> str:
    """Returns the path of NVIDIA's compute-sanitizer."""
    found = shutil.which("compute-sanitizer")
    if found is None:
        raise ForkError("no compute-sanitizer: it is in the CUDA toolkit's bin, which PATH lacks")
    return found


def sanitize(program: str, python: Path, tree: Path, logs: Path, env: dict[str, str]) -> None:
    """Runs a few of the operator's tests with each of the sanitizer's tools, on its kernels."""
    # Each tensor is allocated by itself, so that an access beyond one is seen.
    env = env | ONLY_CUDA | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in TOOLS:
        options = ["--tool", tool, "--kernel-regex", f"kns={PROJECT}_", "--error-exitcode", "1"]
        command = [program, *options, python, f"test_{PROJECT}.py", f"-k{SANITIZED}"]
        with step(f"compute-sanitizer, {tool}"):
            log = logs / f"{tool}.log"
            run(command, log, f"{tool} finds fault", env=env, cwd=tree / "test")
            if not sum(map(int, SUMMARY.findall(log.read_text(errors="replace")))):
                raise ForkError(f"{tool}: no test ran: {log}")
