"""Tests of which tests a commit gets, and of the key under which its success is kept."""

import shutil
from pathlib import Path

import pytest

from fork.overlay import NATIVE, Stack
from fork.paths import ROOT
from fork.suites import plan
from fork.suites.files import LAB
from fork.suites.plan import Plan, commands, key, problems
from fork.tests.conftest import message, write_files

OPERATOR = {NATIVE: "# @@ before: - func: baddbmm(\n- func: attn(Tensor q) -> Tensor\n"}


def stack_of(root, text, files=("test/test_attn.py",)):
    """Makes a stack with one commit, whose test plan has one command."""
    names = [NATIVE, *files]
    contents = dict.fromkeys(files, "") | OPERATOR
    folder = {"stack/01-op/commit.md": message(sorted(names), plan=text), "CMakeLists.txt": ""}
    return Stack(write_files(root, folder | contents))


@pytest.mark.parametrize(
    ("text", "file", "folder", "words"),
    [
        ("python test/a.py -k attn", "test/a.py", "", "test/a.py -k attn"),
        ("python tools/a.py --check   # why", "tools/a.py", "", "tools/a.py --check"),
        ("python a.py 'n=(1|2)'", "a.py", "", "a.py n=(1|2)"),
        ("cd b/c && python -m pt.a 1", "b/c/pt/a.py", "b/c/", "-m pt.a 1"),
        ("cd b && python a.py", "b/a.py", "b/", "a.py"),
    ],
)
def test_a_command(tmp_path, text, file, folder, words):
    (found,) = commands(stack_of(tmp_path, text).commits[0])
    assert (found.file, found.folder, " ".join(found.words)) == (file, folder, words)
    assert not found.left_out


def test_several_commands_of_a_line(tmp_path):
    found = commands(stack_of(tmp_path, "python test/a.py && python b.py").commits[0])
    assert [str(command) for command in found] == ["test/a.py", "b.py"]


@pytest.mark.parametrize(
    "text",
    [
        "PYTORCH_TEST_WITH_SLOW=1 python test/test_ops.py",
        "PYTORCH_TESTING_DEVICE_ONLY_FOR=cuda python test/test_ops.py   # likewise others",
        "python test/test_ops.py   # on a machine with a GPU",
        "cd docs && make html   # without a warning",
    ],
)
def test_what_is_left_out(tmp_path, text):
    stack = stack_of(tmp_path, text, files=())
    assert set(Plan.of(stack, stack.commits[0]).upstream) == {*LAB}  # which every tip has
    assert problems(stack) == []


@pytest.mark.parametrize(
    ("text", "walks"),
    [
        ("python test/test_meta.py -k attn", ()),
        ("python test/test_meta.py TestMeta", ("TestMeta.*",)),
        ("python test/test_meta.py TestMeta.test_a", ("TestMeta.test_a",)),
        ("python test/test_meta.py", ("*",)),
        ("python test/test_decomp.py -k attn", ("HasDecompTest.*",)),  # files.py names this one
    ],
)
def test_which_tests_a_command_selects(tmp_path, text, walks):
    stack = stack_of(tmp_path, text)
    found = Plan.of(stack, stack.commits[0])
    (name,) = set(found.upstream) - {*LAB}
    assert found.upstream[name] == walks
    assert found.own == {"test_attn.py": ()}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("pytest test/test_attn.py", "a command of no known form: pytest test/test_attn.py"),
        ("python test/test_attn.py -k tanh", "in no known way: test/test_attn.py -k tanh"),
        ("SEED=1 python test/test_attn.py", "of no known form: SEED=1 python test/test_attn.py"),
        ("python test/test_attn.py -v", "in no known way: test/test_attn.py -v"),
        ("python test/test_lost.py", "names test/test_lost.py, not in the stack"),
        ("python tools/lost.py", "names tools/lost.py, not in the stack"),
        ("cd b && python -m lost", "names b/lost.py, not in the stack"),
    ],
)
def test_what_is_wrong_with_a_plan(tmp_path, text, why):
    (found,) = problems(stack_of(tmp_path, text))
    assert found.startswith("stack/01-op: its test plan") and why in found


def test_a_command_outside_a_code_block(tmp_path):
    stack = stack_of(tmp_path, "python test/test_attn.py")
    plan = stack.root / "stack/01-op/commit.md"
    plan.write_text(plan.read_text().replace("run it", "run it\n\n    python test/test_ops.py"))
    (found,) = problems(Stack(stack.root))
    assert found.endswith("a command outside a code block: python test/test_ops.py")


def test_the_plans_of_this_stack():
    """The lab's suites run at commits that tell PyTorch of the operator, and at the tip."""
    stack = Stack(ROOT)
    plans = [Plan.of(stack, commit) for commit in stack.commits]
    with_lab = [n for n, of in enumerate(plans, 1) if {*LAB} <= {*of.upstream}]
    assert with_lab == [*range(3, 15), *range(28, 32), 33, 34, len(plans)]
    assert problems(stack) == []
    for commit, of in zip(stack.commits, plans, strict=True):
        own = {path for path in commit.files if path.startswith("test/test_attn")}
        assert own <= {f"test/{name}" for name in of.own}


FILES = {
    "stack/01-script/commit.md": message(
        ["test/attn_function.py"], plan="python test/attn_function.py"
    ),
    "stack/02-op/commit.md": message(
        ["aten/src/ATen/native/Attn.cpp", NATIVE, "test/test_attn.py"], title="Two"
    ),
    "stack/03-more/commit.md": message(
        [
            *("aten/src/ATen/native/cuda/Attn.cu", "benchmarks/attn/cases.py"),
            *("docs/source/attn.md", "test/test_attn_more.py"),
        ]
    ),
    "stack/04-bench/commit.md": message(
        ["benchmarks/attn/bench.py"], plan="python benchmarks/attn/bench.py"
    ),
    "stack/05-last/commit.md": message(["test/test_attn_last.py"]),
    "CMakeLists.txt": "",
    "aten/src/ATen/native/Attn.cpp": "",
    "aten/src/ATen/native/cuda/Attn.cu": "",
    "benchmarks/attn/bench.py": "",
    "benchmarks/attn/cases.py": "",
    "docs/source/attn.md": "",
    "test/attn_function.py": "",
    "test/test_attn.py": "from attn_function import Attn\n",
    "test/test_attn_more.py": "    import test_attn\n",
    "test/test_attn_last.py": "",
    **OPERATOR,
}


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        ("aten/src/ATen/native/Attn.cpp", {2, 3, 4, 5}),
        ("aten/src/ATen/native/cuda/Attn.cu", set()),
        ("benchmarks/attn/cases.py", {4}),  # commit 4 runs a file beside it
        ("docs/source/attn.md", set()),
        ("test/attn_function.py", {1, 2, 3}),  # 2 imports it, and 3 imports what 2 has
        ("test/test_attn.py", {2, 3}),
        ("test/test_attn_more.py", {3}),
        ("CMakeLists.txt", {1, 2, 3, 4, 5}),
    ],
)
def test_what_changes_a_key(tmp_path, path, changed):
    root = write_files(tmp_path / "stack", FILES)
    keys = lambda: [key(Stack(root), commit) for commit in Stack(root).commits]  # noqa: E731
    before = keys()
    (root / path).write_text("# changed\n")
    assert {n for n, (a, b) in enumerate(zip(before, keys(), strict=True), 1) if a != b} == changed


def test_a_key_is_of_contents_alone(tmp_path, monkeypatch):
    """It depends neither on the places of the clone and of a version, nor on name and message."""
    keys = []
    for name in ("here", "there"):
        root = write_files(tmp_path / name, FILES)
        if name == "there":
            shutil.move(root / "stack/02-op", root / "stack/02-renamed")
            version = root / "stack/02-renamed/test/test_attn.py"
            version.parent.mkdir()
            version.write_text(FILES["test/test_attn.py"])
        stack = Stack(root)
        keys.append([key(stack, commit) for commit in stack.commits])
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 5
    monkeypatch.setattr(plan, "suites_release", lambda: "2.7.0")
    assert not {key(stack, commit) for commit in stack.commits} & {*keys[0]}


def test_how_tests_are_run_changes_a_key(tmp_path, monkeypatch):
    stack = Stack(write_files(tmp_path / "stack", FILES))
    before = key(stack, stack.commits[1])
    runner = Path(plan.RUNNER[0])
    changed = write_files(tmp_path / "other", {"run.py": runner.read_text() + "# changed\n"})
    monkeypatch.setattr(plan, "RUNNER", (changed / "run.py", *plan.RUNNER[1:]))
    assert key(stack, stack.commits[1]) != before
