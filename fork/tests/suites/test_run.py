"""Tests the runner of upstream's suites with tiny suites that end in every way a suite can."""

import io
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fork.errors import ForkError
from fork.suites import files, own, report
from fork.suites import run as runner
from fork.suites.plan import Command
from fork.suites.results import Result, read

HEAD = """
import os, signal, sys, unittest

class TestCommonCPU(unittest.TestCase):
    def test_other(self): self.fail("not selected")

def op_test(name, body, wrap=lambda f: f):
    setattr(TestCommonCPU, name, wrap(lambda self: body(self)))
"""

EVERY_OUTCOME = """
op_test("test_dtypes_attn_cpu", lambda self: None)
op_test("test_dtypes_attn_cpu_float32", lambda self: None)
op_test("test_dtypes_attn_cpu_float16", lambda self: self.skipTest("no half"))
op_test("test_dtypes_attn_cpu_int8", lambda self: 1 / 0, unittest.expectedFailure)
op_test("test_dtypes_attn_cpu_int16", lambda self: None, unittest.expectedFailure)
op_test("test_dtypes_attn_cpu_int32", lambda self: self.fail("[b]wrong[/b]\\nmore"))
op_test("test_dtypes_attn_cpu_int64", lambda self: 1 / 0)
op_test("test_torch_attn", lambda self: None)
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Makes a source tree whose own torch/ must never be imported."""
    monkeypatch.setattr(runner, "BYTECODE", tmp_path / "bytecode")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which takes longer than the tests
    root = tmp_path / "source"
    (root / "torch").mkdir(parents=True)
    (root / "torch/__init__.py").write_text(
        "raise SystemExit('the tree shadows torch')", encoding="utf-8"
    )
    (root / "test/functorch").mkdir(parents=True)
    return root


def add(tree, suite, body):
    (tree / "test" / suite).write_text(HEAD + body, encoding="utf-8")


def run(tree, *names, walks=(), **options):
    wanted = dict.fromkeys(names, walks)
    return runner.run_suites(
        Path(sys.executable), tree, wanted, log_dir=tree.parent / "logs", **options
    )


def one(tree, body, **options):
    add(tree, "test_ops.py", body)
    return run(tree, "test_ops.py", **options)[0]


def counted(result, *heads):
    return tuple(result.counts[head] for head in heads)


def shown(results, own=()):
    return printed(report.table(results, own))


def printed(what):
    console = Console(file=io.StringIO(), width=120)
    console.print(what)
    return console.file.getvalue()


def figures(text):
    """Returns the table's rows: {first cell: the counts from `ran` to `failed`}."""
    rows = [line.split() for line in text.splitlines()]
    return {r[0]: [int(n) for n in r[1:6]] for r in rows if len(r) == 7 and r[1].isdigit()}


def test_every_outcome_is_counted(tree):
    result = one(tree, EVERY_OUTCOME)
    assert result.counts == {"ran": 8, "passed": 3, "skipped": 1, "xfailed": 1, "failed": 3}
    assert not result.broken
    assert not result.ok


def test_why_a_test_failed_is_kept(tree):
    messages = one(tree, EVERY_OUTCOME).messages
    assert messages["TestCommonCPU.test_dtypes_attn_cpu_int64"].endswith("division by zero")
    assert messages["TestCommonCPU.test_dtypes_attn_cpu_int32"].endswith(": [b]wrong[/b] more")
    assert "Unexpected success" in messages["TestCommonCPU.test_dtypes_attn_cpu_int16"]
    assert len(messages) == 3


def test_table_adds_up(tree):
    add(tree, "test_ops.py", EVERY_OUTCOME)
    add(tree, "functorch/test_vmap.py", 'op_test("test_dtypes_attn_cpu", lambda self: None)')
    text = shown(run(tree, "test_ops.py", "functorch/test_vmap.py"))
    assert figures(text) == {
        "test_ops.py": [8, 3, 1, 1, 3],
        "functorch/test_vmap.py": [1, 1, 0, 0, 0],
        "total": [9, 4, 1, 1, 3],
    }
    assert "test_dtypes_attn_cpu_int32: AssertionError: [b]wrong[/b]" in text  # no markup to rich


WALKS = """
class TestRegistry(unittest.TestCase):
    def test_every_schema(self): pass
    def test_every_name(self): self.fail("no attn")
    def test_one_schema(self): self.fail("not selected")
"""


@pytest.mark.parametrize(
    ("walks", "ran", "failed"),
    [
        ((), 0, 0),
        (("TestRegistry.test_every_schema",), 1, 0),
        (("TestRegistry.test_every_schema", "TestRegistry.test_every_name"), 2, 1),
        (("TestRegistry.test_every_*",), 2, 1),
        (("TestRegistry.*",), 3, 2),
        (("every and not name",), 1, 0),
        (("*",), 4, 3),
    ],
)
def test_tests_that_do_not_have_the_operators_name(tree, walks, ran, failed):
    assert counted(one(tree, WALKS, walks=walks), "ran", "failed") == (ran, failed)


def test_a_walk_that_upstream_no_longer_has_breaks_the_suite(tree):
    walks = ("TestRegistry.test_every_schema", "TestGone.test_x", "Gone.*")
    result = one(tree, WALKS, walks=walks)
    assert (len(result.tests), result.broken) == (1, "has no test TestGone.test_x, Gone.*")


def test_the_table_names_each_walk_by_class_and_test():
    walks = [walk for walks in files.SUITES.values() for walk in walks]
    assert walks and all(walk.count(".") == 1 for walk in walks)
    assert list(files.SUITES)[: len(files.LAB)] == list(files.LAB) and len(files.LAB) == 6


def test_the_operators_own_files_are_suites_of_which_all_runs(tree):
    add(tree, "test_attn.py", "del TestCommonCPU.test_other")
    add(tree, "test_attn_vmap.py", "TestCommonCPU.test_other = lambda self: None")
    add(tree, "test_ops.py", "")
    (tree / "test/attn_function.py").write_text("print('All passed')", encoding="utf-8")
    own = files.own_files(tree)
    assert list(own) == ["attn_function.py", "test_attn.py", "test_attn_vmap.py"]
    results = runner.run_suites(Path(sys.executable), tree, own, log_dir=tree.parent / "logs")
    assert [counted(r, "ran", "passed") for r in results] == [(1, 1), (0, 0), (1, 1)]
    text = shown([one(tree, "")], results).partition("own test files")[2]
    assert figures(text)["total"] == [2, 2, 0, 0, 0]


def test_of_an_own_file_a_part_can_be_run(tree):
    add(tree, "test_attn.py", 'op_test("test_edges_attn_cpu", lambda self: None)')
    (result,) = run(tree, "test_attn.py", walks=("edges",))
    assert list(result.tests) == ["TestCommonCPU.test_edges_attn_cpu"] and result.ok


@pytest.mark.parametrize("end", ["sys.exit(2)", "raise ValueError", "os.abort()", "("])
def test_a_script_fails_by_its_exit_status(tree, end):
    (tree / "test/attn_function.py").write_text(
        f"import os, sys\nprint('1 failed')\n{end}", encoding="utf-8"
    )
    (result,) = run(tree, "attn_function.py")
    assert (counted(result, "ran", "failed"), result.ok) == ((0, 1), False)
    assert "attn_function.py: exit status" in shown([result])


def test_nothing_selected_is_zero_not_broken(tree, monkeypatch):
    monkeypatch.setattr(runner, "operators", lambda native: ["no_such_operator"])
    result = one(tree, "")
    assert (result.tests, result.broken, result.ok) == ({}, "", True)


@pytest.mark.parametrize(
    "end, skipped, failed",
    [
        ("print('torch.x is not available, skipping tests', file=sys.stderr); sys.exit(0)", 1, 0),
        ("raise unittest.SkipTest('torch.x is not available')", 1, 0),
        ("print('not available, skipping tests: no'); sys.exit(0)", 0, 1),
    ],
)
def test_a_suite_for_which_the_build_lacks_something(tree, end, skipped, failed):
    result = one(tree, end)
    assert counted(result, "skipped", "failed") == (skipped, failed)
    # A suite that is skipped is shown, but is not among the failures.
    why = "test_ops.py: skipped: torch.x is not available"
    assert (why in shown([result])) == bool(skipped)
    assert bool([*report.failures([result])]) == bool(failed)


@pytest.mark.parametrize("said", ["torch.x not available, skipping tests", "not available: no"])
def test_a_file_that_exits_is_an_error_for_an_older_pytest(tmp_path, said):
    """7.3, which the suites of 2.6 have, goes on from there and ends with status 2."""
    log, found = tmp_path / "log", tmp_path / "report.xml"
    log.write_text(f"{said}\n", encoding="utf-8")
    found.write_text(
        "<testsuites><testsuite><testcase classname='' name='test_x'>"
        "<error message='collection failure'>Traceback\nSystemExit: 0</error>"
        "</testcase></testsuite></testsuites>",
        encoding="utf-8",
    )
    result = Result("test_x.py", log=log)
    read(result, 2, found)
    is_skipped = said.endswith("skipping tests")
    assert result.ok == is_skipped and counted(result, "skipped") == (int(is_skipped),)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise ImportError('no numpy')", "E   ImportError: no numpy"),
        ("def broken(:", "E   SyntaxError: invalid syntax"),
        ("sys.exit(0)", "SystemExit: 0"),
        ('op_test("test_dtypes_attn", lambda self: os._exit(0))', "exit status 0 before the end"),
        ('op_test("test_dtypes_attn", lambda self: os.abort())', "killed by signal 6"),
        (
            'op_test("test_attn", lambda self: None); import atexit; atexit.register(os._exit, 3)',
            "exit status 3 without a failed test",
        ),
    ],
)
def test_a_broken_suite_is_a_failed_row(tree, body, why):
    result = one(tree, body)
    assert result.broken.startswith(why)
    assert (result.counts["failed"], result.ok) == (1, False)
    text = shown([result])
    assert figures(text)["test_ops.py"][4] == 1
    last = result.log.read_text(encoding="utf-8").split()
    assert not last or last[-1] in text


def test_a_class_that_cannot_be_set_up(tree):
    body = """
op_test("test_attn", lambda self: None)
TestCommonCPU.setUpClass = classmethod(lambda cls: 1 / 0)
"""
    (message,) = one(tree, body).messages.values()
    assert "division by zero" in message


def test_of_many_failures_some_are_shown(tree):
    body = 'for i in range(30): op_test(f"test_attn_{i:02}", lambda self: self.fail("no"))'
    text = shown([one(tree, body)])
    assert text.count("AssertionError: no") == 20
    assert "test_ops.py: 10 more failed: " in text and "_19" in text and "_20" not in text


def test_a_process_that_was_killed_is_shown(tree):
    said = "terminate called without an active exception"
    test = f'op_test("test_dtypes_attn", lambda self: (print("{said}"), self.fail("-6")))'
    result = one(tree, test)
    assert (result.counts["failed"], result.broken) == (1, "")
    assert said in shown([result])


@pytest.mark.parametrize(
    "first",
    [
        "test_a ... =====\\n==7==ERROR: AddressSanitizer: heap-buffer-overflow",
        "test_a ... attn.cpp:3:7: runtime error: signed integer overflow",
    ],
)
def test_a_sanitizers_report_is_shown_from_its_first_line(tree, first):
    report = first + "\\nat main" * 50
    text = shown([one(tree, f'os.write(1, b"{report}"); os._exit(1)')])
    assert "test_a ... " in text and "overflow\n  at main" in text


def test_further_variables(tree):
    body = """op_test("test_dtypes_attn", lambda self: print(os.environ["PYTHONPATH"]))"""
    assert counted(one(tree, body, variables={"PYTHONPATH": "x"}), "passed") == (1,)


def test_a_hang_is_stopped(tree):
    result = one(tree, "import time; time.sleep(60)", timeout=0.5)
    assert "0.5 s: stopped" in result.broken
    assert result.seconds < 30


def test_a_damaged_report_breaks_the_suite(tree):
    body = """
import atexit, glob
atexit.register(lambda: [open(x, "w").write("<testsuite>") for x in glob.glob("../../logs/*.xml")])
"""
    assert one(tree, body).broken.startswith("unreadable report: ")


def test_an_earlier_report_is_not_counted_again(tree):
    one(tree, EVERY_OUTCOME)
    result = one(tree, "os._exit(0)")
    assert (result.tests, result.ok) == ({}, False)


def test_subtests_count_for_their_test(tree):
    body = """
def parts(self):
    for i in range(3):
        with self.subTest(i=i):
            self.assertEqual(i, 1)
op_test("test_dtypes_attn", parts)
"""
    result = one(tree, body)
    assert (counted(result, "ran", "failed"), result.broken) == ((1, 1), "")


def test_the_trees_torch_does_not_shadow_the_installed_one(tree, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tree))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    body = f"""
import importlib.util
spec = importlib.util.find_spec("torch")
assert spec is None or not spec.origin.startswith({str(tree)!r}), spec
op_test("test_dtypes_attn", lambda self: None)
"""
    result = one(tree, body)
    assert (counted(result, "passed"), result.broken) == ((1,), "")
    assert not list(tree.rglob("__pycache__"))


def test_suites_read_text_as_utf8_in_any_locale(tree, monkeypatch):
    for name, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}.items():
        monkeypatch.setenv(name, value)
    data = tree / "data.txt"
    data.write_text("∑", encoding="utf-8")
    body = f"""
op_test("test_dtypes_attn", lambda self: self.assertEqual(open({str(data)!r}).read(), "∑"))
"""
    assert counted(one(tree, body), "passed") == (1,)


def test_what_python_compiles_is_kept_outside_the_tree(tree, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    module = tree / "test" / "module.py"
    body = f"""
import module, pathlib
cached = pathlib.Path(module.__cached__)
kept = cached.is_file() and cached.is_relative_to({str(runner.BYTECODE)!r})
op_test("test_dtypes_attn", lambda self: self.fail(f"{{module.VALUE}} {{kept}}"))
"""
    for value in (1, 22):  # Python compiles the changed file again
        module.write_text(f"VALUE = {value}", encoding="utf-8")
        (message,) = one(tree, body).messages.values()
        assert message.endswith(f" {value} True")
    assert not list(tree.rglob("*.pyc"))


def test_results_are_in_the_order_asked_for_and_each_is_announced(tree, monkeypatch, capsys):
    names = ("test_slow.py", "test_quick.py")
    quick = tree.parent / "logs" / "test_quick.xml"
    add(tree, names[0], f"import time\nwhile not os.path.exists({str(quick)!r}): time.sleep(0.1)")
    add(tree, names[1], "")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert [result.suite for result in run(tree, *names)] == list(names)
    lines = capsys.readouterr().out.splitlines()
    words = [line.split()[1] for line in lines]
    assert words == ["test_quick.py:", "test_slow.py:", "test"]  # the last line is: + test files: 2


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (8, "4"), (9, "4")])
def test_the_cores_are_shared_by_the_suites(tree, monkeypatch, cores, threads):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    body = """
test = lambda self: self.fail(os.environ["OMP_NUM_THREADS"])
op_test("test_dtypes_attn", test)
"""
    for name in ("test_a.py", "test_b.py"):
        add(tree, name, body)
    for result in run(tree, "test_a.py", "test_b.py"):
        assert list(result.messages.values()) == [f"AssertionError: {threads}"]


def test_variables_of_one_suite(tree):
    body = """
test = lambda self: self.fail(str(os.environ.get("PYTHONPATH")))
op_test("test_dtypes_attn", test)
"""
    names = ("test_a.py", "test_b.py")
    for name in names:
        add(tree, name, body)
    found = run(tree, *names, of_suite={"test_b.py": {"PYTHONPATH": "there"}})
    said = [message for result in found for message in result.messages.values()]
    assert said == ["AssertionError: None", "AssertionError: there"]


def test_triton_is_downloaded_once_for_its_own_tests(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(own.paths, "BUILD", tmp_path)
    monkeypatch.setattr(own, "run", lambda command, *_: commands.append(command))
    assert own.with_triton(["test_attn.py"]) == {} and not commands
    for _ in range(2):
        ((suite, variables),) = own.with_triton(["test_attn.py", "test_attn_triton.py"]).items()
        assert suite == "test_attn_triton.py" and Path(variables["PYTHONPATH"]).is_dir()
    assert [command[-1] for command in commands] == [f"triton=={own.TRITON}"]


def test_a_missing_suite_or_python_is_named(tree):
    with pytest.raises(ForkError, match="no test/test_gone"):
        run(tree, "test_gone.py")
    with pytest.raises(ForkError, match="no python"):
        runner.run_suites(tree / "bin/python", tree, {}, log_dir=tree.parent)
    with pytest.raises(ForkError, match="/false: has no pytest, which runs the tests"):
        runner.run_suites(Path(shutil.which("false")), tree, {}, log_dir=tree.parent)


@pytest.mark.parametrize(
    ("body", "passed", "why"),
    [
        ("import beside; assert sys.argv[1:] == ['--seed', '1']", 1, ""),
        ("raise SystemExit(3)", 0, "exit status 3"),
        ("import time; time.sleep(60)", 0, "still running after 2 s: stopped"),
    ],
)
@pytest.mark.parametrize(
    ("folder", "words"), [("", ("tools/thing.py",)), ("tools/", ("-m", "thing"))]
)
def test_a_script_of_a_test_plan(tree, folder, words, body, passed, why):
    (tree / "tools").mkdir()
    (tree / "tools/beside.py").write_text("", encoding="utf-8")
    (tree / "tools/thing.py").write_text(f"import sys\n{body}\n", encoding="utf-8")
    args = ("--seed", "1")
    command = Command(folder, "tools/thing.py", (*words, *args), args)
    limit = 2 if "still running" in why else 60
    result = runner.run_script(Path(sys.executable), tree, command, tree.parent / "logs", limit)
    assert (result.suite, len(result.tests)) == ("tools/thing.py --seed 1", passed)
    assert result.broken == why and result.ok == bool(passed)
