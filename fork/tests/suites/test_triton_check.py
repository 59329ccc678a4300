"""Tests of the Triton kernels' plans and of `make triton-check`; a few kernels are compiled."""

import json
import re
from types import SimpleNamespace

import pytest

from commands import triton_check
from commands.triton_check import KERNELS, PLANS, VERSIONS, Job
from fork.errors import ForkError

JOBS = triton_check.all_jobs()
FOUND = triton_check.read_record()["found"]
PLANS_OF = triton_check.load(PLANS)
IMPL = KERNELS.with_name("triton_impl.py").read_text(encoding="utf-8")
NAMES = set(re.findall(r'\blaunch\(\s*"(\w+)"', IMPL))
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
LIMITS = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}  # bytes
ROWS = [
    (target, size, width, name)
    for target in TARGETS
    for size in triton_check.DTYPES
    for width in PLANS_OF.WIDTHS
    for name in sorted(NAMES)
]
# These are composed: they would spill much, or nobody has looked for plans.
WITHOUT = {
    (target, size, width, name)
    for target, size, width, name in ROWS
    if (size == 4 and target in ("sm_80", "gfx942"))
    or (size == 4 and width == 256 and name.startswith("tangent"))
    or (size == 4 and width > 64 and name.startswith("third"))
    or (target == "gfx942" and width == 256 and name.startswith("third"))
}
JOB = Job("sm_90", "bf16", 64, "attn", (64, 64, 4, 2))


def device(target, capability=0, shared_memory=2**31):
    return SimpleNamespace(target=target, capability=capability, shared_memory=shared_memory)


def test_every_kernel_has_plans():
    assert len(NAMES) == 11
    listed = {(*key, *kernel[::-1]) for key, of in PLANS_OF.plans().items() for kernel in of}
    assert listed == set(ROWS) - WITHOUT


@pytest.mark.parametrize(("target", "size"), PLANS_OF.plans())
def test_the_plans_of_a_kernel(target, size):
    """Tiles are what Triton can take; each plan fits, and each but the first needs less."""
    for listed in PLANS_OF.plans()[target, size].values():
        for plan in listed:
            assert all(x >= 16 and x & (x - 1) == 0 for x in (plan.rows, plan.columns))
            assert plan.warps in (4, 8) and plan.stages in (1, 2, 3)
            assert plan.shared <= LIMITS[target]
        shared = [plan.shared for plan in listed]
        assert shared == sorted({*shared}, reverse=True)


@pytest.mark.parametrize(
    ("given", "target"),
    [
        (device("cuda", 75), None),
        (device("cuda", 80), "sm_80"),
        (device("cuda", 89), "sm_80"),
        (device("cuda", 90), "sm_90"),
        (device("cuda", 100), "sm_100"),
        (device("cuda", 103), "sm_100"),
        (device("cuda", 120), "sm_80"),
        (device("hip", 94), "gfx942"),
        (device("xpu"), "gfx942"),
        (device("cpu"), "sm_90"),
    ],
)
def test_a_device_has_the_plans_of_a_target(given, target):
    assert PLANS_OF.target_of(given) == target


@pytest.mark.parametrize(("width", "column"), [(1, 64), (64, 64), (65, 128), (256, 256)])
def test_the_plan_of_a_width(width, column):
    wanted = PLANS_OF.plans()["sm_90", 2]["attn", column][0]
    assert PLANS_OF.plan_for("attn", 2, width, device("cuda", 90)) == wanted


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_plan_fits_the_device(name):
    """The first plan that fits is taken, and none where none fits."""
    for width in PLANS_OF.WIDTHS:
        listed = PLANS_OF.plans()["sm_80", 2][name, width]
        for memory in (166912, 101376, 0):
            wanted = next((plan for plan in listed if plan.shared <= memory), None)
            assert PLANS_OF.plan_for(name, 2, width, device("cuda", 86, memory)) == wanted
    assert PLANS_OF.plan_for(name, 2, 257, device("cuda", 86)) is None
    assert PLANS_OF.plan_for(name, 8, 64, device("cuda", 86)) is None


def test_the_record_is_of_these_kernels():
    """If this fails, the kernels were changed: `make triton-check` makes the record again."""
    assert triton_check.read_record()["kernels"] == triton_check.kernels_hash()


def test_the_record_is_of_these_plans():
    """Each version of Triton compiled each of them."""
    assert FOUND.keys() == {job.key for job in JOBS}
    assert all({*values} == {*VERSIONS} for values in FOUND.values())
    assert not list(triton_check.problems(JOBS, FOUND, FOUND))


@pytest.mark.parametrize(
    ("found", "recorded", "said"),
    [
        ([100, 255, 0], [100, 200, 0], None),
        ([100, 255, 8], [100, 255, 8], "attn 64x64x4x2: Triton 3.6.0 spills 8 bytes"),
        ([101, 255, 0], [100, 255, 0], "takes 101 bytes of shared memory, and not 100"),
        (
            [99, 255, 0],
            [99, 255, 0],
            "takes 99 bytes of shared memory at most, not 100",
        ),
    ],
)
def test_what_is_a_problem(found, recorded, said):
    both = {JOB.key: dict.fromkeys(VERSIONS, found)}
    problems = list(triton_check.problems({JOB: 100}, both, {JOB.key: {"3.6.0": recorded}}))
    assert (said in problems[0]) if said else not problems


@pytest.mark.parametrize(("before", "count"), [(8, 0), (4, 1), (None, 0)])
def test_spilled_bytes_may_not_grow(before, count):
    """That holds for a kernel, data type, width and version of Triton, whatever the plan was."""
    job = JOB._replace(width=256)
    found = {job.key: dict.fromkeys(VERSIONS, [100, 255, 8])}
    old = job._replace(plan=(32, 32, 4, 2)).key
    recorded = {} if before is None else {old: {"3.6.0": [100, 255, before]}}
    assert len(list(triton_check.problems({job: 100}, found, recorded))) == count


def test_the_record_keeps_what_is_of_the_same_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(triton_check, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(triton_check, "all_jobs", lambda: {JOB: 100})
    old = {"kernels": triton_check.kernels_hash(), "found": {JOB.key: {"3.6.0": [1, 2, 3]}}}
    triton_check.write_record({JOB.key: {"3.9.0": [4, 5, 6]}}, old)
    both = {"3.6.0": [1, 2, 3], "3.9.0": [4, 5, 6]}
    assert triton_check.read_record() == {**old, "found": {JOB.key: both}}
    triton_check.write_record({JOB.key: {"3.9.0": [4, 5, 6]}}, {**old, "kernels": "others"})
    assert triton_check.read_record()["found"] == {JOB.key: {"3.9.0": [4, 5, 6]}}
    json.loads(triton_check.RECORD.read_text(encoding="utf-8"))


def test_plans_compile():
    """Kernels for compute capability 9.0 spill nothing, and take the memory that is known."""
    version = VERSIONS[-1]
    try:
        triton_check.triton(version)
    except ForkError as error:
        pytest.skip(f"no Triton: {error}")
    names = ("output", "grad_kv", "stored_grad_kv", "tangent", "tangent_grad_q")
    these = [Job("sm_90", "bf16", 64, name, ()) for name in names]
    jobs = {job: shared for job, shared in JOBS.items() if job._replace(plan=()) in these}
    found = {job.key: {version: values} for job, values in triton_check.compiled(version, [*jobs])}
    assert len(found) == len(names)
    assert not list(triton_check.problems(jobs, found, {}))
