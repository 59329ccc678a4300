"""Tests the runner of upstream's suites with tiny suites that end in every way a suite can."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fork.errors import ForkError
from fork.suites import files, report
from fork.suites import run as runner
from fork.suites.plan import Command
from fork.suites.results import counts

pytest.importorskip("xmlrunner")  # a borrowed environment may lack this package
# This does what upstream's run_tests() does with --save-xml.
HARNESS = """
import sys, unittest, xmlrunner

def run_tests():
    folder = next(a for a in sys.argv if a.startswith("--save-xml=")).partition("=")[2]
    argv = [a for a in sys.argv if not a.startswith("--save-xml=")]
    unittest.main(module="__main__", argv=argv, testRunner=xmlrunner.XMLTestRunner(output=folder))
"""

HEAD = """
import os, signal, sys, unittest
from harness import run_tests

class TestCommonCPU(unittest.TestCase):
    def test_dtypes(self): self.fail("a template is not a test")
    def test_flash_attn_mask(self): pass
    def test_other(self): self.fail("not selected")

def op_test(name, body, wrap=lambda f: f):
    setattr(TestCommonCPU, name, wrap(lambda self: body(self)))
"""

TAIL = """
del TestCommonCPU.test_dtypes
run_tests()
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
    root = tmp_path / "source"
    (root / "torch").mkdir(parents=True)
    (root / "torch/__init__.py").write_text("raise SystemExit('the tree shadows torch')")
    (root / "test/functorch").mkdir(parents=True)
    for folder in ("test", "test/functorch"):
        (root / folder / "harness.py").write_text(HARNESS)
    return root


def add(tree, suite, body, head=HEAD, tail=TAIL):
    (tree / "test" / suite).write_text(head + body + tail)


def run(tree, *names, walks=(), **options):
    wanted = dict.fromkeys(names, walks)
    return runner.run_suites(
        Path(sys.executable), tree, wanted, log_dir=tree.parent / "logs", **options
    )


def one(tree, body, **options):
    parts = {key: options.pop(key) for key in ("head", "tail") if key in options}
    add(tree, "test_ops.py", body, **parts)
    return run(tree, "test_ops.py", **options)[0]


def passed(result):
    return counts(result.ours)["passed"]


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
    assert counts(result.ours) == {"ran": 8, "passed": 3, "skipped": 1, "xfailed": 1, "failed": 3}
    assert result.upstreams == {"TestCommonCPU.test_flash_attn_mask": "passed"}
    assert not result.broken
    assert not result.ok


def test_why_a_test_failed_is_kept(tree):
    messages = one(tree, EVERY_OUTCOME).messages
    assert messages["TestCommonCPU.test_dtypes_attn_cpu_int64"] == "division by zero"
    assert messages["TestCommonCPU.test_dtypes_attn_cpu_int32"] == "[b]wrong[/b] more"
    assert "Unexpected success" in messages["TestCommonCPU.test_dtypes_attn_cpu_int16"]
    assert len(messages) == 3


def test_table_adds_up_and_keeps_upstreams_apart(tree):
    add(tree, "test_ops.py", EVERY_OUTCOME)
    add(tree, "functorch/test_vmap.py", 'op_test("test_dtypes_attn_cpu", lambda self: None)')
    text = shown(run(tree, "test_ops.py", "functorch/test_vmap.py"))
    ours, _, upstreams = text.partition("Upstream's own")
    assert figures(ours) == {
        "test_ops.py": [8, 3, 1, 1, 3],
        "functorch/test_vmap.py": [1, 1, 0, 0, 0],
        "total": [9, 4, 1, 1, 3],
    }
    assert figures(upstreams)["total"] == [2, 2, 0, 0, 0]
    assert "test_dtypes_attn_cpu_int32: [b]wrong[/b]" in text  # rich must not read it as markup


def test_no_second_table_without_upstream_tests(tree):
    body = "del TestCommonCPU.test_flash_attn_mask"
    assert "Upstream's own" not in shown([one(tree, body)])


WALKS = """
class TestRegistry(unittest.TestCase):
    def test_every_schema(self): pass
    def test_every_name(self): self.fail("no attn")
    def test_one_schema(self): self.fail("not selected")
class AnotherTestRegistry(TestRegistry): pass
del TestCommonCPU.test_flash_attn_mask
"""


@pytest.mark.parametrize(
    ("walks", "ran", "failed"),
    [
        ((), 0, 0),
        (("TestRegistry.test_every_schema",), 1, 0),
        (("TestRegistry.test_every_schema", "AnotherTestRegistry.test_every_name"), 2, 1),
        (("TestRegistry.test_every_*",), 2, 1),
        (("TestRegistry.*",), 3, 2),
    ],
)
def test_what_goes_through_a_whole_registry_is_ours(tree, walks, ran, failed):
    result = one(tree, WALKS, walks=walks)
    assert (result.ran, result.failed, result.upstreams) == (ran, failed, {})


def test_a_walk_that_upstream_no_longer_has_breaks_the_suite(tree):
    result = one(tree, WALKS, walks=("TestRegistry.test_every_schema", "TestGone.test_x", "A.*"))
    assert (result.ran, result.broken) == (1, "has no test TestGone.test_x, A.*")


def test_the_table_names_each_walk_by_class_and_test():
    walks = [walk for walks in files.SUITES.values() for walk in walks]
    assert walks and all(walk.count(".") == 1 for walk in walks)
    assert list(files.SUITES)[: len(files.LAB)] == list(files.LAB) and len(files.LAB) == 6


def test_the_operators_own_files_are_suites_of_which_all_is_ours(tree):
    add(tree, "test_attn.py", "del TestCommonCPU.test_other")
    add(tree, "test_attn_vmap.py", "TestCommonCPU.test_other = lambda self: None")
    add(tree, "test_ops.py", "")
    (tree / "test/attn_function.py").write_text("print('All passed')")
    own = files.own_files(tree)
    assert list(own) == ["attn_function.py", "test_attn.py", "test_attn_vmap.py"]
    results = runner.run_suites(Path(sys.executable), tree, own, log_dir=tree.parent / "logs")
    assert [(r.ran, passed(r), r.failed) for r in results] == [(1, 1, 0), (1, 1, 0), (2, 2, 0)]
    assert not any(r.upstreams for r in results)
    text = shown([one(tree, "")], results).partition("own test files")[2]
    assert figures(text.partition("Upstream's own")[0])["total"] == [4, 4, 0, 0, 0]


def test_only_the_walks_of_an_own_file_are_run(tree):
    add(tree, "test_attn.py", 'op_test("test_edges_attn_cpu", lambda self: None)')
    (result,) = run(tree, "test_attn.py", walks=("*edges*",))
    assert list(result.ours) == ["TestCommonCPU.test_edges_attn_cpu"] and result.ok


@pytest.mark.parametrize("end", ["sys.exit(2)", "raise ValueError", "os.abort()", "("])
def test_a_script_fails_by_its_exit_status(tree, end):
    (tree / "test/attn_function.py").write_text(f"import os, sys\nprint('1 failed')\n{end}")
    (result,) = run(tree, "attn_function.py")
    assert (result.ran, result.failed, result.ok) == (0, 1, False)
    assert "attn_function.py: exit status" in shown([result])


def test_nothing_selected_is_zero_not_broken(tree, monkeypatch):
    monkeypatch.setattr(runner, "operators", lambda native: ["no_such_operator"])
    result = one(tree, "")
    assert (result.ran, result.broken, result.ok) == (0, "", True)


@pytest.mark.parametrize(
    "end, skipped, failed",
    [
        ("print('torch.x is not available, skipping tests', file=sys.stderr); sys.exit(0)", 1, 0),
        ("print('torch.x is not available, skipping tests'); sys.exit(3)", 0, 1),
        ("print('not available, skipping tests: no'); sys.exit(0)", 0, 1),
    ],
)
def test_a_suite_for_which_the_build_lacks_something(tree, end, skipped, failed):
    result = one(tree, end)
    assert counts(result.ours)["skipped"] == skipped
    assert result.failed == failed
    # A suite that is skipped is shown, but is not among the failures.
    why = "test_ops.py: skipped: torch.x is not available"
    assert (why in shown([result])) == bool(skipped)
    assert bool([*report.failures([result])]) == bool(failed)


def test_a_failed_upstream_test_is_not_ok(tree):
    result = one(tree, "TestCommonCPU.test_flash_attn_mask = TestCommonCPU.test_other")
    assert (result.failed, result.ok) == (0, False)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise ImportError('no numpy')", "exit status 1 before the end"),
        ("def broken(:", "exit status 1 before the end"),
        ("sys.exit(0)", "exit status 0 before the end"),
        ('op_test("test_dtypes_attn", lambda self: os._exit(0))', "exit status 0 before the end"),
        ('op_test("test_dtypes_attn", lambda self: os.abort())', "killed by signal 6"),
        ("import atexit; atexit.register(os._exit, 3)", "exit status 3 without a failed test"),
        (
            "TestCommonCPU.setUpClass = classmethod(lambda cls: 1 / 0)",
            "setUpClass (__main__.TestCommonCPU): division by zero",
        ),
    ],
)
def test_a_broken_suite_is_a_failed_row(tree, body, why):
    result = one(tree, body)
    assert result.broken.startswith(why)
    assert (result.failed, result.ok) == (1, False)
    text = shown([result])
    assert figures(text.partition("Upstream's own")[0])["test_ops.py"][4] == 1
    last = result.log.read_text().split()
    assert not last or last[-1] in text


def test_a_process_that_was_killed_is_shown(tree):
    said = "terminate called without an active exception"
    test = f'op_test("test_dtypes_attn", lambda self: (print("{said}"), self.fail("-6")))'
    result = one(tree, test)
    assert (result.failed, result.broken) == (1, "")
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
    assert passed(one(tree, body, variables={"PYTHONPATH": "x"})) == 1


def test_a_hang_is_stopped(tree):
    result = one(tree, "import time; time.sleep(60)", timeout=0.5)
    assert "0.5 s: stopped" in result.broken
    assert result.seconds < 30


def test_a_test_without_report_breaks_the_suite(tree):
    tail = TAIL.replace("run_tests()", "unittest.main(argv=sys.argv[:-1])")
    result = one(tree, 'op_test("test_dtypes_attn", lambda self: None)', tail=tail)
    assert result.broken == "2 tests ran, but only 0 are in the report"


def test_a_damaged_report_breaks_the_suite(tree):
    tail = "open(sys.argv[-1].partition('=')[2] + '/TEST-x.xml', 'w').write('<testsuite>')"
    result = one(tree, "", tail=tail)
    assert result.broken.startswith("unreadable report TEST-x.xml")


def test_an_earlier_report_is_not_counted_again(tree):
    one(tree, EVERY_OUTCOME)
    assert one(tree, "del TestCommonCPU.test_flash_attn_mask").ran == 0


def test_subtests_count_for_their_test(tree):
    body = """
def parts(self):
    for i in range(3):
        with self.subTest(i=i):
            self.assertEqual(i, 1)
op_test("test_dtypes_attn", parts)
"""
    result = one(tree, body)
    assert (result.ran, result.failed, result.broken) == (1, 1, "")


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
    assert (passed(result), result.broken) == (1, "")
    assert not list(tree.rglob("__pycache__"))


def test_what_python_compiles_is_kept_outside_the_tree(tree, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    module = tree / "test" / "module.py"
    body = """
import module
op_test("test_dtypes_attn", lambda self: self.fail(f"{module.VALUE} {module.__cached__}"))
"""
    for value in (1, 22):  # Python compiles the changed file again
        module.write_text(f"VALUE = {value}")
        (message,) = one(tree, body).messages.values()
        found, cached = message.split()
        assert int(found) == value
        assert Path(cached).is_file()
        assert Path(cached).is_relative_to(runner.BYTECODE)
    assert not list(tree.rglob("*.pyc"))


def test_results_are_in_the_order_asked_for_and_each_is_announced(tree, monkeypatch, capsys):
    names = ("test_slow.py", "test_quick.py")
    add(tree, names[0], "import time; time.sleep(1)")
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
        assert list(result.messages.values()) == [threads]


def test_a_missing_suite_or_python_is_named(tree):
    with pytest.raises(ForkError, match="no test/test_gone"):
        run(tree, "test_gone.py")
    with pytest.raises(ForkError, match="no python"):
        runner.run_suites(tree / "bin/python", tree, {}, log_dir=tree.parent)


# Functions in these files of upstream 2.6.0, then the names that they get for an operator.
WRITTEN = (
    "test_dtypes",
    "test_fn_gradgrad",
    "test_quick_core_backward",
    "test_vmapjvpall_has_batch_rule",
    "test_python_ref_executor",
    "test_self_attn_TxT_attn_mask",
    "test_cpu_flash_attn_nan_propagation",
    "test_torchscript_multi_head_attn",
    "test_multihead_attn_3d_attn_mask",
    "test_cpu",
    "test_attn_empty_batch",
)


@pytest.mark.parametrize(
    "name",
    [
        "test_dtypes_attn_cpu",
        "test_dtypes_attn_cuda",
        "test_fn_gradgrad_attn_cpu_complex128",
        "test_quick_core_backward_attn_cpu_float64",
        "test_vmapjvpall_has_batch_rule_attn_cpu_float32",
        "test_python_ref_executor_attn_executor_aten_cpu_bool",
        "test_torch_attn",
        "test_Tensor_attn",
        "test_attn_empty_batch",
        "test_attn_empty_batch_cpu_float32",
        "test_unimplemented_batched_registrations_[aten::attn]",
        "test_unimplemented_batched_registrations_[aten::attn.out]",
        "test_unimplemented_batched_registrations_[aten::_attn_backward]",
    ],
)
def test_ours(name):
    assert files.is_ours(name, WRITTEN, "attn")


@pytest.mark.parametrize(
    "name",
    [
        "test_self_attn_TxT_attn_mask_cpu",
        "test_cpu_flash_attn_nan_propagation_cpu_float32",
        "test_torchscript_multi_head_attn",
        "test_multihead_attn_3d_attn_mask",
        "test_dtypes_nn_functional_varlen_attn_cpu_float32",  # the name of another operator
        "test_dtypes_attn2_cpu",
        "test_torch_attn2",
        "test_unimplemented_batched_registrations_[aten::_flash_attn_backward]",
        "test_unimplemented_batched_registrations_[aten::attn2]",
        "test_torch_functional_flash_attn",
        "test_dtypes_nn_functional_scaled_dot_product_attention_cpu",
    ],
)
def test_upstreams(name):
    assert not files.is_ours(name, WRITTEN, "attn")


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
    (tree / "tools/beside.py").write_text("")
    (tree / "tools/thing.py").write_text(f"import sys\n{body}\n")
    args = ("--seed", "1")
    command = Command(folder, "tools/thing.py", (*words, *args), args)
    result = runner.run_script(Path(sys.executable), tree, command, tree.parent / "logs", 2)
    assert (result.suite, result.ran) == ("tools/thing.py --seed 1", passed)
    assert result.broken == why and result.ok == bool(passed)
