"""PyTorch's own build of a tree, with the stack on it, and what it costs."""

import os
import re
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from fork import paths
from fork.console import NinjaSteps, new_table, run, step
from fork.errors import ForkError
from fork.overlay import Stack, is_source, target_of
from fork.series import commits
from fork.source.place import GIB, Place, folder, size
from fork.source.sandbox import in_debian

# The source that a step of build.ninja compiles: other steps name sources too, such as the .cu that
# every build generates. Of a kernel for CPUs, a copy is compiled for each set of instructions.
COMPILES = re.compile(
    r"^build .*?: \w+_COMPILER__\S+ (.*?)(?:(?<=\.cpp)\.\w+\.cpp)?(?: \||$)", re.M
)
# A line of CMake's cache: PyTorch's CMake turns USE_CUDA off if it finds no CUDA.
FOR_CUDA = re.compile(r"^USE_CUDA:BOOL=(?:ON|YES|TRUE|Y|[1-9]\d*)$", re.I | re.M)


@dataclass(frozen=True)
class Figures:
    """The cost of one run of the build and, from Ninja's log, of the whole build."""

    steps: int
    cpu_seconds: float
    wall_seconds: float
    largest_process: int  # bytes
    whole_steps: int
    whole_seconds: float  # the sum over its steps, each as it last ran
    disk: int  # bytes, of the tree


def configured(place: Place | None, branch: str) -> Place:
    """The `place`, by default Debian's source in a Debian, with the stack on it, configured.

    The caller holds the lock of build/from-source.
    """
    place = place or in_debian(folder(), paths.SOURCES)
    configure(place, Stack(paths.ROOT), branch)
    return place


def configure(place: Place, stack: Stack, branch: str) -> None:
    """Puts the stack on the tree as commits, and has PyTorch's build configured for them.

    Raises ForkError if that build would leave out a C++ file of the overlay.
    """
    with step("commit the stack") as doing:
        upstream, made = commits(stack, place.tree, branch)
        doing.done = f"{len(made)} commits on {upstream}"
    with step("configure"):
        # CMake runs each time, because it globs the lists of sources.
        again = ("build", "--cmake", "--cmake-only")
        _run_setup(place, again, "configure.log", "PyTorch cannot be configured")
        if missing := left_out(stack, place.tree):
            raise ForkError(f"{missing[0]}: PyTorch's build does not compile it")


def build_whole(place: Place) -> Figures:
    """Runs PyTorch's own build of a configured tree; it goes on where it was stopped."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with step("compile") as doing:
        steps = NinjaSteps(doing)
        develop = ("develop", "--no-deps")
        _run_setup(place, develop, "build.log", "PyTorch's build stopped", line=steps)
        doing.done = str(steps)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Figures(
        steps.done,
        sum(getattr(after, k) - getattr(before, k) for k in ("ru_utime", "ru_stime")),
        time.monotonic() - start,
        after.ru_maxrss * 1024,
        *ninja_log(place.tree / "build" / ".ninja_log"),
        size(place.tree),
    )


def ninja_log(log: Path) -> tuple[int, float]:
    """Returns the number of steps of a build, and the seconds that they took in all.

    A step counts as it last ran, so it does not matter how often the build was stopped.
    """
    last = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        # The log's first line has fewer parts, and so has one that a kill cut short.
        if len(parts := line.split("\t")) == 5:
            start, end, _, output, key = parts
            last[output] = int(start), int(end), key
    steps = set(last.values())  # a step may have many outputs, each on a line
    return len(steps), sum(end - start for start, end, _ in steps) / 1000


def table(of: Figures) -> Table:
    """Makes the table of what this run cost, and the whole build."""
    grid = new_table("The build")
    for head in ("", "steps", "CPU seconds", "minutes", "largest process", "disk"):
        grid.add_column(head, justify="right")
    largest, disk = (f"{n / GIB:.1f} GiB" for n in (of.largest_process, of.disk))
    cpu, minutes = f"{of.cpu_seconds:.0f}", f"{of.wall_seconds / 60:.0f}"
    grid.add_row("this run", str(of.steps), cpu, minutes, largest, "")
    whole = f"{of.whole_seconds:.0f}"
    grid.add_row("whole, by Ninja's log", str(of.whole_steps), whole, "", "", disk)
    return grid


def left_out(stack: Stack, tree: Path) -> list[str]:
    """Finds C++ files that the overlay adds or edits, but no step of the build compiles.

    Files for CUDA are wanted only if the build is for CUDA.
    """
    try:
        files = (tree / "build" / name for name in ("build.ninja", "CMakeCache.txt"))
        steps, cache = (file.read_text(encoding="utf-8") for file in files)
    except OSError as e:
        lacks = f"has no build/{Path(e.filename).name}"
        raise ForkError(f"{tree}: {lacks}: CMake has not configured it for Ninja") from None
    compiled = [f"/{source}" for source in COMPILES.findall(steps)]
    sources = (target_of(path) or path for path in stack.tree() if is_source(path))
    others = () if FOR_CUDA.search(cache) else ".cu"
    wanted = (path for path in sources if not path.endswith(others))
    return [p for p in wanted if not any(source.endswith(f"/{p}") for source in compiled)]


def _run_setup(place: Place, args: Sequence[str], log: str, wrong: str, **named) -> None:
    """Runs the tree's setup.py, which is PyTorch's build; see `run`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {**place.variables}
    command = [place.python, "setup.py", *args]
    run(command, place.logs / log, wrong, cwd=place.tree, env=env, **named)
