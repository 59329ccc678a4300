"""PyTorch's own test suites and ours, run on a graft; their tables."""

from fork.suites.arm64 import run_arm64
from fork.suites.commit import run_stack, run_upstream
from fork.suites.files import LAB, SUITES, own_files
from fork.suites.from_source import run_on_build
from fork.suites.keys import contents, digest
from fork.suites.own import PARTS, run_own, run_sanitized, triton, with_triton
from fork.suites.plan import Plan, problems
from fork.suites.record import Record
from fork.suites.record import finish as finish_record
from fork.suites.releases import SUPPORTED, ReleasesRecord, run_releases
from fork.suites.report import finish, table
from fork.suites.run import environment, run_suites
