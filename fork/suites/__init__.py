"""PyTorch's own test suites and ours, run on a graft; the benchmark; their tables."""

from fork.suites.benchmark import bench, bench_gpu
from fork.suites.commit import run_stack, run_upstream
from fork.suites.from_source import run_on_build
from fork.suites.own import run_own, run_sanitized
from fork.suites.report import finish, stack_table, table
from fork.suites.site import build_site, run_site

__all__ = [
    "bench",
    "bench_gpu",
    "build_site",
    "finish",
    "stack_table",
    "table",
    "run_own",
    "run_on_build",
    "run_sanitized",
    "run_site",
    "run_stack",
    "run_upstream",
]
