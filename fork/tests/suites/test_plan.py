"""Tests of which tests a commit gets."""

import pytest

from fork.overlay import NATIVE, Stack
from fork.paths import ROOT
from fork.suites.files import LAB
from fork.suites.plan import Plan, commands, problems
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
    plan.write_text(
        plan.read_text(encoding="utf-8").replace("run it", "run it\n\n    python test/test_ops.py"),
        encoding="utf-8",
    )
    (found,) = problems(Stack(stack.root))
    assert found.endswith("a command outside a code block: python test/test_ops.py")


def test_the_plans_of_this_stack():
    """The lab's suites run at commits that tell PyTorch of the operator, and at the tip."""
    stack = Stack(ROOT)
    plans = [Plan.of(stack, commit) for commit in stack.commits]
    with_lab = [n for n, of in enumerate(plans, 1) if {*LAB} <= {*of.upstream}]
    assert with_lab == [*range(3, 16), 26, 27, len(plans)]
    assert problems(stack) == []
    for commit, of in zip(stack.commits, plans, strict=True):
        own = {path for path in commit.files if path.startswith("test/test_attn")}
        assert own <= {f"test/{name}" for name in of.own}
