"""The commands that measure the operator, on the CPU or on this machine's GPU."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import click

from commands import extension
from fork import options, paths
from fork.bootstrap import make_venv
from fork.commands import Command
from fork.console import console, print_wide, run, step
from fork.errors import ForkError
from fork.graft import INSTALLED, graft_into, graftable, open_graft
from fork.overlay import Stack, default_release
from fork.project import PROJECT
from fork.suites import contents, digest, environment, finish, own_files, run_suites, table

PUBLISHED = "bench/published"
SCRIPTS = ("bench", "fields", "lengths", "ring", "stages", "ways")
# The sources of the kernels, and for which device they are.
FOLDERS = {
    "torch/_native/ops/attn/": "cuda",
    "aten/src/ATen/native/cuda/": "cuda",
    "aten/src/ATen/native/cpu/": "cpu",
}
COMMENTS = re.compile(rb"//[^\n]*|/\*.*?\*/", re.S)  # of C++

COMMIT = re.compile(r"; kernel of commit ([^;]+)\.$")  # in a report's line on the machine

# All of it takes MINUTES, the graft included; REST of these are for the plot.
MINUTES, REST = 6, 0.5
FEWEST, MOST = 1.5, 3.0  # minutes of measuring
LIMIT = 150  # seconds that a test file may take; they run side by side

# A test file that has this makes tests for CUDA, alone or beside those for other devices.
HAS_CUDA = re.compile(
    r'instantiate_device_type_tests\(\s*\w+, globals\(\)(, only_for=("cuda"|DEVICE))?\s*\)'
)
# The kernels take all that they can in tests, float too; so do they where they are measured.
WITH_FLOAT = {"TORCH_ATTN_TRITON_FLOAT": "1"}
ONLY_CUDA = WITH_FLOAT | {
    "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cuda",
    "TORCH_ATTN_TRITON_LEAST_WORK": "0",
}

TOOLS = ("memcheck", "racecheck", "synccheck")
SANITIZED = "test_values_and_gradients and float"  # of pytest's -k

# The options that a command doesn't have are the benchmark's.
PASSES_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
PUBLISH = click.option(
    "--publish", is_flag=True, help="Keep the results in bench/published, for the manual."
)
ARGS = click.argument("args", nargs=-1, type=click.UNPROCESSED)


@click.command(
    cls=Command,
    section="Measure",
    context_settings=PASSES_ON,
    example="--only n=1024 --mode forward",
)
@click.option(
    "--script",
    type=click.Choice(SCRIPTS),
    default="bench",
    show_default=True,
    help="Of bench/: `fields` is training on second derivatives, `lengths` attn_output over the "
    "length, `ring` over processes, `stages` where the time goes, `ways` what other ways to have "
    "the operator cost.",
)
@PUBLISH
@ARGS
def bench(script: str, publish: bool, args: tuple[str, ...]) -> None:
    """Measure the operator's speed (`make bench`); ARGS are those of the script."""
    venv = paths.BUILD / "venv-bench"
    make_venv(venv, paths.ROOT / "bench" / "requirements.txt")
    graft_into(venv, default_release())
    if script == "ways":
        pip = [venv / "bin" / "python", "-m", "pip", "install", "--force-reinstall", "--no-deps"]
        with paths.alone("extension"):
            wheel = extension.build()
        run([*pip, wheel], venv / "extension.log", "torch-attn cannot be installed")
    sweep = ("--sweep", "120") if script == "bench" else ()  # unless ARGS say
    command = (f"{script}.py", *sweep, *args)
    name = "cpu" if script == "bench" else f"cpu-{script}"
    sys.exit(measure(venv, paths.BUILD / script, name, publish, command))


@click.command(
    "bench-gpu", cls=Command, section="Measure", context_settings=PASSES_ON, example="--sanitize"
)
@options.base_option(type=graftable, default=INSTALLED)
@click.option(
    *("--sanitize", "sanitized"), is_flag=True, help="Run compute-sanitizer on the kernels instead."
)
@PUBLISH
@ARGS
def bench_gpu(base: str, sanitized: bool, publish: bool, args: tuple[str, ...]) -> None:
    """Build, test and measure the operator on this machine's GPU (`make bench-gpu`).

    Planned for six minutes. ARGS are those of bench/bench.py, which measures even if a
    test fails. Results are in build/bench-gpu.
    """
    start = time.monotonic()
    if not devices():
        raise ForkError("no GPU: NVIDIA's driver is missing, or shows none")
    program = sanitizer() if sanitized else ""
    with paths.alone():
        open_graft(base).check_cuda()
    graft_into(paths.VENV, base)
    out, python = paths.BUILD / "bench-gpu", paths.VENV / "bin" / "python"
    check(python, out / "check.log")
    if sanitized:
        sanitize(program, python, paths.ROOT, out / "sanitizer", environment())
        return
    results = run_suites(
        python,
        paths.ROOT,
        chosen(own_files(paths.ROOT), paths.ROOT),
        log_dir=out / "tests",
        timeout=LIMIT,
        variables=ONLY_CUDA,
    )
    print_wide(table((), results))
    time_left = ("--minutes", str(minutes_left(start)))  # unless ARGS say
    command = ("bench.py", "--device", "cuda", *time_left, *args)
    status = measure(paths.VENV, out, "cuda", publish, command, WITH_FLOAT)
    console.print(f"{(time.monotonic() - start) / 60:.1f} minutes in all")
    sys.exit(finish(results, status))


def kernel(device: str) -> str:
    """A hash of the code of the kernel for a device, which says what figures are of."""
    files = {}
    for path, file in Stack(paths.ROOT).tree().items():
        folder = next(filter(path.startswith, FOLDERS), "")
        if FOLDERS.get(folder) == device:
            files[path.removeprefix(folder)] = file
    texts = contents(files)
    for name in [name for name in texts if not name.endswith(".py")]:
        texts[name] = b"".join(COMMENTS.sub(b"", texts[name]).split())
    return digest([], texts)


def figures() -> list[tuple[str, str, str]]:
    """Of each report in bench/published: path, machine, and whether the kernel is today's.

    Of an older kernel it says the commit.
    """
    found = []
    for report in sorted((paths.ROOT / PUBLISHED).glob("*.md")):
        about = report.read_text(encoding="utf-8").splitlines()[2]
        device, result = report.stem.partition("-")[0], report.with_suffix(".json")
        text = result.read_text(encoding="utf-8") if result.exists() else "{}"
        state = "this one"
        if json.loads(text).get("kernel") != kernel(device):
            commit = COMMIT.search(about)
            state = "an older one" + (f", of commit {commit[1]}" if commit else "")
        found.append((f"{PUBLISHED}/{report.name}", about.partition(";")[0], state))
    return found


def measure(
    venv: Path,
    out: Path,
    name: str,
    publish: bool,
    command: Sequence[str],
    variables: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Runs a script of bench/, which writes files called `name` into `out`; its exit status."""
    script, *args = command
    measured = kernel(name.partition("-")[0])
    # -E: PYTHONPATH could bring in another torch.
    python = [venv / "bin" / "python", "-E"]
    run_script = [*python, paths.ROOT / "bench" / script, "--out", out, *args]
    env = os.environ | variables
    status = subprocess.run(run_script, cwd=paths.ROOT, env=env).returncode
    if publish and not status:
        kept = paths.ROOT / PUBLISHED
        kept.mkdir(exist_ok=True)
        for file in sorted(out.glob(f"{name}*")):
            shutil.copy2(file, kept)
        result = kept / f"{name}.json"
        named = {"kernel": measured, **json.loads(result.read_text(encoding="utf-8"))}
        result.write_text(json.dumps(named, indent=1) + "\n", encoding="utf-8")
        console.print(f"{kept.relative_to(paths.ROOT)}: kept for the manual")
    return status


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
    texts = {name: (tree / "test" / name).read_text(encoding="utf-8") for name in own}
    return {name: ("CUDA",) for name, text in texts.items() if HAS_CUDA.search(text)}


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
        command = [program, *options, python, "-m", "pytest", f"test_{PROJECT}.py", "-k", SANITIZED]
        with step(f"compute-sanitizer, {tool}"):
            log = logs / f"{tool}.log"
            run(command, log, f"{tool} finds fault", env=env, cwd=tree / "test")
