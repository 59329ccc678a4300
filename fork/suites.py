"""PyTorch's own test suites, run for one operator as upstream runs them."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import shorten

from rich.box import SIMPLE
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fork.console import console
from fork.errors import ForkError

OP = "attn"

# PyTorch's test files that go through all OpInfos, native functions, schemas or public functions.
# Beside each, as `Class.test`, the tests that go through a whole registry under a name that is not
# the operator's: these are ours too. The lab's six first.
LAB = {
    "test_ops.py": (),
    "test_overrides.py": ("TestResolveName.*", "TestDisabledUserWarnings.*"),
    "functorch/test_aotdispatch.py": (),
    "functorch/test_ops.py": (),
    "functorch/test_vmap.py": (),
    "test_proxy_tensor.py": (),
}
SUITES = LAB | {
    # every OpInfo
    "test_ops_gradients.py": (),
    "test_ops_fwd_gradients.py": (),
    "test_ops_jit.py": (),
    "test_meta.py": (),
    "test_decomp.py": ("HasDecompTest.*",),
    "test_schema_check.py": (),
    "test_fx.py": ("TestFX.test_get_torch_func_signature",),  # see torchbind.py
    "test_fx_experimental.py": (),
    "test_jit_fuser_te.py": (),
    "test_testing.py": (),
    "test_utils.py": (),
    "export/opinfo_schema.py": (),
    "inductor/test_torchinductor_opinfo.py": (),
    "distributed/_tensor/test_dtensor_ops.py": (),
    # every schema and registration, autocast's list
    "test_function_schema.py": ("TestFunctionSchema.test_serialize_and_deserialize",),
    "test_fake_tensor.py": (
        "FakeTensorOperatorInvariants.test_like_ops",
        "FakeTensorOperatorInvariants.test_non_kwarg_only_device",
        "FakeTensorOperatorInvariants.test_tensor_constructors_all_have_kwarg_device",
    ),
    "test_dispatch.py": ("TestDispatch.test_find_dangling_impls",),
    "test_namedtuple_return_api.py": ("TestNamedTupleAPI.*",),
    "functorch/test_vmap_registrations.py": (),
    "test_autocast.py": ("TestAutocastCPU.test_autocast_torch_16",),
    # every public function
    "test_public_bindings.py": (
        "TestPublicBindings.test_correct_module_names",
        "TestPublicBindings.test_no_new_*",
    ),
    "test_torch.py": (
        "TestTorch.test_dir",
        "TestTorch.test_doc*",
        "TestTorch.test_wildcard_import",
    ),
}

# Not a suite, and older than the operator: what it says is its exit status.
SCRIPT = "attn_function.py"

# Of several entries for one test (subtests), the first of these counts.
OUTCOMES = ("failed", "xfailed", "passed", "skipped")
COUNTS = ("ran", "passed", "skipped", "xfailed", "failed")  # as the tables show them

SUMMARY = re.compile(r"^Ran (\d+) tests? in ", re.M)
# How a sanitizer's report begins, which says most there; the name of the test is before it.
REPORT = re.compile(r"^.*(=\n==\d+==ERROR: AddressSanitizer|: runtime error): ", re.M)
# What a file says that ends early, as upstream's do for what a build was made without.
LACKS = re.compile(r"^(.*not available), skipping tests\s*\Z", re.M)
# Where Python keeps what it compiles, of torch too, which is installed without: each file of tests
# is a process of its own. A file that changes is compiled again: an install gives all a new time.
BYTECODE = Path(__file__).resolve().parent.parent / "build" / "bytecode"
NO_TESTS = 5  # unittest's exit status from Python 3.12 on when nothing was selected


@dataclass
class Result:
    """What became of one suite. The counts are of our own tests; `upstreams` has the others."""

    suite: str
    seconds: float = 0.0
    ours: dict[str, str] = field(default_factory=dict)  # test -> outcome
    upstreams: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)  # failed test -> why, in short
    broken: str = ""  # why the suite as a whole failed, tests aside
    lacks: str = ""  # why all of it was skipped
    log: Path = Path()

    @property
    def ran(self) -> int:
        return len(self.ours)

    @property
    def passed(self) -> int:
        return count(self.ours, "passed")

    @property
    def skipped(self) -> int:
        return count(self.ours, "skipped")

    @property
    def xfailed(self) -> int:
        return count(self.ours, "xfailed")

    @property
    def failed(self) -> int:
        """Failed tests and unexpected successes, and one more for a broken suite."""
        return count(self.ours, "failed") + bool(self.broken)

    @property
    def ok(self) -> bool:
        return not self.failed and not count(self.upstreams, "failed")


def count(tests: dict[str, str], outcome: str) -> int:
    return Counter(tests.values())[outcome]


def run(
    python: Path,
    tree: Path,
    suites: Mapping[str, Sequence[str]] = SUITES,
    *,
    log_dir: Path,
    op: str = OP,
    jobs: int | None = None,
    timeout: float = 3600,
    variables: Mapping[str, str] | None = None,
) -> list[Result]:
    """Run each suite of the source tree for `op` with `python`'s torch; results in that order.

    `suites` gives for each the tests that are ours whatever their names, as in SUITES;
    `variables` are further ones of the environment.
    """
    # Not resolved: a virtual environment's python is a link out of it.
    python, tree, log_dir = (Path(os.path.abspath(p)) for p in (python, tree, log_dir))
    if not os.access(python, os.X_OK):
        raise ForkError(f"{python}: no python to run the suites with")
    for suite in suites:
        if not (tree / "test" / suite).is_file():
            raise ForkError(f"{tree}: has no test/{suite}: not a source tree of PyTorch?")
    cores = os.cpu_count() or 1
    jobs = max(1, min(jobs or cores, len(suites)))
    env = environment(threads=max(1, cores // jobs)) | {**(variables or {})}
    with ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(run_suite, python, tree, suite, walks, log_dir, op, env, timeout)
            for suite, walks in suites.items()
        ]
        try:
            for future in as_completed(futures):
                console.print(progress(future.result()))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def own(tree: Path) -> dict[str, tuple[str, ...]]:
    """The operator's own test files in a tree, as suites: all of their tests are ours."""
    test = tree / "test"
    files = [*test.glob(SCRIPT), *sorted(test.glob(f"test_{OP}*.py"))]
    return {file.name: ("*",) for file in files}


def environment(threads: int = os.cpu_count() or 1) -> dict[str, str]:
    # PYTHONPATH could bring in another torch; PYTHONSAFEPATH takes the suite's own folder away;
    # with CI, upstream's tests write reports into the working folder.
    unwanted = ("CI", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    return env | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONPYCACHEPREFIX": str(BYTECODE),  # the tree stays as it is
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_TEST_WITH_SLOW": "1",  # which upstream's CI has in a job of its own
    }


def run_suite(
    python: Path,
    tree: Path,
    suite: str,
    walks: Sequence[str],
    log_dir: Path,
    op: str,
    env: dict,
    timeout: float,
) -> Result:
    name = suite.removesuffix(".py").replace("/", ".")
    reports = log_dir / name
    try:
        shutil.rmtree(reports, ignore_errors=True)  # an earlier run's report is not this run's
        reports.mkdir(parents=True)
        log = log_dir / f"{name}.log"
        command = [python, suite]
        if suite != SCRIPT:
            patterns = [op, *(f"*.{walk}" for walk in walks)]  # "*.": the module's name
            command += ["-v", *(f"-k{p}" for p in patterns), f"--save-xml={reports}"]
        start = time.monotonic()
        with open(log, "wb") as out:
            # From test/, where upstream's CI stands: the tree's torch/ is not on the path there.
            status = subprocess.run(
                command,
                cwd=tree / "test",
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            ).returncode
    except subprocess.TimeoutExpired:
        status = None
    except OSError as e:
        raise ForkError(f"{e.filename or suite}: {e.strerror or e}") from None
    result = Result(suite, time.monotonic() - start, log=log)
    tests, broken = read_reports(reports, result.messages)
    written = functions(tree / "test" / suite)
    for test, outcome in tests.items():
        ours = any(fnmatchcase(test, walk) for walk in walks) or is_ours(
            test.rpartition(".")[2], written, op
        )
        (result.ours if ours else result.upstreams)[test] = outcome
    text = log.read_text(errors="replace")
    if status is None:
        result.broken = f"still running after {timeout:g} s: stopped"
    elif suite == SCRIPT:
        result.ours = {} if status else {suite: "passed"}
        result.broken = f"exit status {status}" if status else ""
    elif not (tests or status) and (lacks := LACKS.search(text)):
        result.ours, result.lacks = {suite: "skipped"}, lacks[1]
    else:
        gone = [walk for walk in walks if not any(fnmatchcase(test, walk) for test in tests)]
        missing = f"has no test {', '.join(gone)}" if gone else ""
        result.broken = broken or fault(status, text, tests) or missing
    return result


def read_reports(folder: Path, messages: dict[str, str]) -> tuple[dict[str, str], str]:
    """Each test's outcome by upstream's XML reports (xmlrunner's), and what is wrong with these."""
    tests: dict[str, str] = {}
    broken = ""
    for report in sorted(folder.rglob("*.xml")):
        try:
            cases = list(ET.parse(report).iter("testcase"))
        except ET.ParseError as e:
            return tests, f"unreadable report {report.name}: {e}"
        for case in cases:
            name = case.get("name", "")
            outcome, message = read_case(case)
            if not name.startswith("test"):  # not a test but, say, a setUpClass
                if outcome == "failed":
                    broken = f"{name}: {message}"
                continue
            # A subtest is "name (parameters)": it counts for its test.
            test = f"{case.get('classname')}.{name.split(' ')[0]}"
            tests[test] = min(outcome, tests.get(test, outcome), key=OUTCOMES.index)
            if outcome == "failed":
                messages.setdefault(test, message)
    return tests, broken


def read_case(case: ET.Element) -> tuple[str, str]:
    for mark in case:
        if mark.tag in ("failure", "error"):  # an unexpected success is an error here
            return "failed", shorten(mark.get("message") or mark.get("type") or "", 200)
        if mark.tag == "skipped":
            return ("xfailed" if mark.get("type") == "XFAIL" else "skipped"), ""
    return "passed", ""


def fault(status: int, log: str, tests: dict[str, str]) -> str:
    """Why the suite as a whole failed, beyond its tests; empty if it did not."""
    summaries = SUMMARY.findall(log)
    if status < 0:
        return f"killed by signal {-status} ({signal.strsignal(-status)})"
    if not summaries:
        return f"exit status {status} before the end of the tests"
    selected = int(summaries[-1])
    if selected > len(tests):
        return f"{selected} tests ran, but only {len(tests)} are in the report"
    if status and "failed" not in tests.values() and not (status == NO_TESTS and not selected):
        return f"exit status {status} without a failed test"
    return ""


def functions(file: Path) -> set[str]:
    """The names of all functions written in a Python file."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return set()  # the suite's own run ends with that error
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def is_ours(test: str, written: Iterable[str], op: str) -> bool:
    """Whether a test exists because of the operator, not just has its name somewhere.

    PyTorch makes a test of an operator from a function for all operators: its name, the
    operator's, then a device or more (test_dtypes -> test_dtypes_attn_cpu). What is written out
    under the operator's name is ours if it begins with it (test_attn_empty, not test_flash_attn).
    """

    def begins(stem: str) -> bool:
        return test == stem or test.startswith(f"{stem}_")

    # functorch/test_vmap_registrations.py makes its tests from the dispatcher's entries.
    if entry := re.search(r"_\[aten::(\w+)", test):
        return entry[1] in (op, f"_{op}_backward")
    if any(op in name and begins(name) for name in written):
        return begins(f"test_{op}")
    # test_overrides.py makes its tests from a namespace and a function, without a written name.
    stems = [*written, "test_torch", "test_Tensor"]
    return any(begins(f"{stem}_{op}") for stem in stems)


def progress(result: Result) -> Text:
    what = result.broken or f"{result.ran} of ours ran, {result.failed} failed"
    if others := len(result.upstreams):
        what += f"; {others} of upstream's, {count(result.upstreams, 'failed')} failed"
    line = Text("ok     " if result.ok else "FAILED ", style="green" if result.ok else "red")
    line.append(f"{result.suite}: {what} ({result.seconds:.0f} s)", style="default")
    return line


def table(results: Sequence[Result], own: Sequence[Result] = ()) -> Group:
    """Our tests by suite, upstream's own that the name also selects, skipped files, failures."""
    parts: list = []
    for title, of in (("Our tests", results), ("The operator's own test files", own)):
        if of:
            parts.append(rows(title, [(r, r.ours, r.broken) for r in of]))
    others = [(r, r.upstreams, "") for r in results if r.upstreams]
    if others:
        parts.append(rows("Upstream's own tests of a like name", others))
    skipped = [Text(f"{r.suite}: skipped: {r.lacks}\n") for r in (*results, *own) if r.lacks]
    return Group(*parts, *skipped, *all_failures([*results, *own]))


def rows(title: str, counted: Sequence[tuple[Result, dict[str, str], str]]) -> Table:
    lines = [
        (result.suite, counts(tests, broken), f"{result.seconds:.1f}")
        for result, tests, broken in counted
    ]
    totals = sum((by for _, by, _ in lines), Counter())
    seconds = sum(result.seconds for result, _, _ in counted)
    grid = new_table(title)
    grid.add_column("file", footer="total")
    for head, total in zip((*COUNTS, "seconds"), (*numbers(totals), f"{seconds:.1f}"), strict=True):
        grid.add_column(head, footer=total, justify="right")
    for suite, by, took in lines:
        grid.add_row(escape(suite), *numbers(by), took, style="red" if by["failed"] else None)
    return grid


def new_table(title: str) -> Table:
    # Narrow, so that a row fits in a terminal.
    return Table(title=title, title_justify="left", show_footer=True, box=SIMPLE, padding=0)


def counts(tests: Mapping[str, str], broken: str = "") -> Counter:
    """How many tests ran and ended in each way; a suite that is broken is one failure more."""
    return Counter(tests.values()) + Counter(ran=len(tests), failed=int(bool(broken)))


def tally(results: Iterable[Result]) -> Counter:
    return sum((counts(r.ours, r.broken) for r in results), Counter())


def numbers(by: Mapping[str, int]) -> list[str]:
    return [str(by.get(head, 0)) for head in COUNTS]


@dataclass
class Row:
    """What became of one commit of the stack."""

    commit: str
    suites: dict[str, int] = field(default_factory=dict)  # as `counts` gives them
    own: dict[str, int] = field(default_factory=dict)
    upstreams_failed: int = 0
    seconds: float = 0.0
    error: str = ""  # why the commit could not be tested

    @classmethod
    def of(cls, commit: str, results: Sequence[Result], own: Sequence[Result]) -> Row:
        ran = [*results, *own]
        failed = sum(count(r.upstreams, "failed") for r in ran)
        seconds = sum(r.seconds for r in ran)
        return cls(commit, dict(tally(results)), dict(tally(own)), failed, seconds)

    @property
    def ok(self) -> bool:
        failed = self.suites.get("failed", 0) + self.own.get("failed", 0) + self.upstreams_failed
        return not failed and not self.error

    def write(self, file: Path, key: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"key": key, "row": asdict(self)}))

    @classmethod
    def read(cls, file: Path, key: str) -> Row | None:
        """What was written under the same key; None if it was another, or nothing."""
        try:
            stored = json.loads(file.read_text())
            return cls(**stored["row"]) if stored["key"] == key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def stack_table(of: Sequence[Row]) -> Table:
    """A line per commit: the lab's suites, then the operator's own test files."""
    grid = new_table("Each commit by itself")
    grid.show_footer = False
    grid.add_column("commit")
    for head in (*COUNTS, "own passed", "own failed", "seconds"):
        grid.add_column(head, justify="right")
    for row in of:
        own = [str(row.own.get(head, 0)) for head in ("passed", "failed")]
        cells = [*numbers(row.suites), *own, f"{row.seconds:.1f}"]
        if row.error:
            cells = ["-"] * len(cells)
        grid.add_row(escape(row.commit), *cells, style=None if row.ok else "red")
    return grid


def all_failures(results: Iterable[Result]) -> list[Text]:
    return [line for result in results for line in failures(result)]


def failures(result: Result, lines: int = 12) -> Iterable[Text]:
    """A line for each failed test; for a broken suite the reason and a part of its log."""
    for test, message in sorted(result.messages.items()):
        yield Text(f"{result.suite} {test}: {message}")
    if result.broken:
        text = result.log.read_text(errors="replace").rstrip()
        if report := REPORT.search(text):
            has, part = "has", text[report.start() :].splitlines()[:lines]
        else:
            has, part = "ends", text.splitlines()[-lines:]
        yield Text(f"{result.suite}: {result.broken}; {result.log} {has}:", style="red")
        for line in part:
            yield Text(f"  {line}", style="dim")
