"""`make triton-check`: compiles the Triton kernels for GPUs that need not be there.

No kernel may spill registers where `must_not_spill` says so, take other than the shared memory that
triton_plans.py names, or spill more than triton_check.json says, which is the record of what was
found.
"""

import importlib.util
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from fork import paths
from fork.commands import Command, report
from fork.console import new_table, print_wide, step
from fork.errors import ForkError
from fork.suites import contents, digest, triton

KERNELS = paths.ROOT / "torch/_native/ops/attn/triton_kernels.py"
PLANS = KERNELS.with_name("triton_plans.py")
RECORD = Path(__file__).with_suffix(".json")
COMPILER = Path(__file__).with_name("_triton.py")
VERSIONS = ("3.6.0", "3.9.0")  # of Triton: the oldest that upstream takes, and the newest
DTYPES = {2: ("bf16", "fp16"), 4: ("fp32",)}  # by the size of an element

# For a job's key and a version of Triton: bytes of shared memory, and a thread's registers and
# spilled bytes, each the most of all variants.
Found = dict[str, dict[str, list[int]]]


class Job(NamedTuple):
    """A plan to compile for a data type."""

    target: str
    dtype: str
    width: int
    name: str
    plan: tuple[int, ...]

    @property
    def key(self) -> str:
        return (
            f"{self.target} {self.dtype} {self.width} {self.name} {'x'.join(map(str, self.plan))}"
        )

    @property
    def must_not_spill(self) -> bool:
        return self.target in ("sm_90", "sm_100") and self.dtype != "fp32" and self.width <= 128


@click.command("triton-check", cls=Command, section="Test", example="--target sm_90")
@click.option("--target", "targets", multiple=True, help="This target alone; may be repeated.")
@click.option("--triton", "versions", multiple=True, type=click.Choice(VERSIONS), help="Likewise.")
def triton_check(targets: tuple[str, ...], versions: tuple[str, ...]) -> None:
    """Compile the Triton kernels without a GPU, and record what they take (`make triton-check`).

    The record is commands/triton_check.json. Exits with status 1 if a kernel spills registers where
    it must not, or takes more than is known of it.
    """
    jobs = {
        job: shared for job, shared in all_jobs().items() if not targets or job.target in targets
    }
    if not jobs:
        raise ForkError(f"no plan is for {', '.join(targets)}")
    recorded, found = read_record(), {}
    for version in versions or VERSIONS:
        for job, values in compiled(version, list(jobs)):
            found.setdefault(job.key, {})[version] = values
    print_tables(jobs, found)
    report(list(problems(jobs, found, recorded["found"])))
    write_record(found, recorded)


def load(file: Path):
    """Imports a file of the overlay that needs nothing of torch."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def all_jobs() -> dict[Job, int]:
    """The plans of the table, for each data type, and the shared memory that the table says."""
    return {
        Job(target, dtype, width, name, plan[:-1]): plan.shared
        for (target, size), kernels in load(PLANS).plans().items()
        for (name, width), listed in kernels.items()
        for plan in listed
        for dtype in DTYPES[size]
    }


def kernels_hash() -> str:
    """A hash of the kernels without their comments."""
    return digest([], contents({KERNELS.name: KERNELS}))


def answers(version: str, jobs: Sequence[Job]) -> Iterator[dict]:
    """What _triton.py says of both variants of each job, in turn."""
    command = [paths.VENV / "bin" / "python", COMPILER, KERNELS]
    cache = paths.BUILD / "triton" / version
    env = os.environ | {"PYTHONPATH": str(triton(version)), "TRITON_CACHE_DIR": str(cache)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, encoding="utf-8", **pipes) as process:
        for job in jobs:
            for hardest in (True, False):
                print(json.dumps({**job._asdict(), "hardest": hardest}), file=process.stdin)
        process.stdin.close()
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise ForkError(f"Triton {version} ends with status {process.returncode}")


def compiled(version: str, jobs: Sequence[Job]) -> Iterator[tuple[Job, list[int]]]:
    """Compiles jobs by a version of Triton: the largest values of each one's variants."""
    with step(f"{len(jobs)} plans by Triton {version}") as doing:
        each = answers(version, jobs)
        for i, job in enumerate(jobs):
            doing.tell(job.key, done=i, total=len(jobs))
            # zip would take an answer too many.
            variants = [next(each, {"error": "no answer"}) for _ in range(2)]
            if errors := [answer["error"] for answer in variants if "error" in answer]:
                raise ForkError(f"{job.key}: Triton {version}: {errors[0]}")
            yield job, [max(values) for values in zip(*(x.values() for x in variants), strict=True)]


def cell(key: str) -> str:
    """A job's key without the plan: what was spilled there is compared."""
    return key.rpartition(" ")[0]


def problems(jobs: Mapping[Job, int], found: Found, recorded: Found) -> Iterator[str]:
    """What is not as it must be."""
    spilled: dict[tuple[str, str], int] = {}
    for key, by_version in recorded.items():
        for version, values in by_version.items():
            at = cell(key), version
            spilled[at] = max(values[2], spilled.get(at, 0))
    most: dict[Job, int] = {}  # of all data types, as the table does not tell them apart
    for job, table in jobs.items():
        for version, (shared, _, spill) in found[job.key].items():
            where = f"{job.key}: Triton {version}"
            known = spilled.get((cell(job.key), version), spill)
            if spill > (0 if job.must_not_spill else known):
                yield f"{where} spills {spill} bytes"
            if shared > table:
                yield f"{where} takes {shared} bytes of shared memory, and not {table}"
            plan = job._replace(dtype="")
            most[plan] = max(most.get(plan, 0), shared)
    if all(len(by_version) == len(VERSIONS) for by_version in found.values()):
        for job, table in jobs.items():
            if (shared := most[job._replace(dtype="")]) < table:
                yield f"{job.key} takes {shared} bytes of shared memory at most, not {table}"


def read_record() -> dict:
    text = RECORD.read_text(encoding="utf-8") if RECORD.exists() else '{"found": {}}'
    return json.loads(text)


def write_record(found: Found, recorded: dict) -> None:
    """Keeps what was found, and of the same kernels what was found before of the plans that are."""
    keys = [job.key for job in all_jobs()]
    kernels = kernels_hash()
    before = recorded["found"] if recorded.get("kernels") == kernels else {}
    kept = {key: {**before.get(key, {}), **found.get(key, {})} for key in keys}
    lines = [f'  "{key}": {json.dumps(values)}' for key, values in kept.items() if values]
    text = ",\n".join(lines)
    RECORD.write_text(
        f'{{\n "kernels": "{kernels}",\n "found": {{\n{text}\n }}\n}}\n', encoding="utf-8"
    )


def print_tables(jobs: Iterable[Job], found: Found) -> None:
    """Prints for each target the registers of each kernel, and the bytes that it spills."""
    jobs = list(jobs)
    for target in dict.fromkeys(job.target for job in jobs):
        table = new_table(f"{target}: registers, + spilled bytes of a thread")
        own = [job for job in jobs if job.target == target]
        columns = list(dict.fromkeys((job.dtype, job.width) for job in own))
        for title in ("kernel", *(f"{dtype} {width}" for dtype, width in columns)):
            table.add_column(title)
        for name in dict.fromkeys(job.name for job in own):
            cells = {column: [] for column in columns}
            for job in own:
                if job.name == name:
                    _, registers, spilled = map(max, zip(*found[job.key].values(), strict=True))
                    text = f"{registers} +{spilled}" if spilled else str(registers)
                    cells[job.dtype, job.width].append(text)
            table.add_row(name, *map("; ".join, cells.values()))
        print_wide(table)
