"""PyTorch's own test suites and ours, run on a graft; the benchmark; their tables."""

from fork.suites.benchmark import bench, bench_gpu, figures
from fork.suites.commit import run_stack, run_upstream
from fork.suites.course import run_course
from fork.suites.files import SUITES
from fork.suites.from_source import run_on_build
from fork.suites.own import run_own, run_sanitized
from fork.suites.plan import problems
from fork.suites.record import HEADS, Record
from fork.suites.report import finish, finish_stack, table
from fork.suites.site import run_site
