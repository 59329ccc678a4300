"""Tests of `python -m fork new`: what it writes and refuses. course/tests grafts a skeleton."""

import ast
import inspect
import keyword
import re
import subprocess
import sys

import pytest
import torch
import yaml
from click.testing import CliRunner
from sympy.printing.cxx import reserved

from fork import paths
from fork.__main__ import main
from fork.errors import ForkError
from fork.overlay import (
    DERIVATIVES,
    NATIVE,
    UNPACKED,
    Stack,
    Upstream,
    check,
    new,
    operators,
    resolve,
)
from fork.overlay.new import parse
from fork.series import lint
from fork.tests.conftest import message, write_files

SCHEMA = "(Tensor self, Tensor other, *, float scale=1.0) -> Tensor"
# SymPy, which torch requires, has a list too, up to C++17; these came with C++20.
CPP_KEYWORDS = {word.strip(",") for word in reserved["C++17"]} | {
    *("char8_t", "co_await", "co_return", "co_yield", "concept", "consteval", "constinit"),
    "requires",
}
OPINFOS = "torch/testing/_internal/opinfo/definitions"


def tree(root):
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def status():
    """Returns what git says has changed in this clone."""
    command = ["git", "status", "--short"]
    return subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True).stdout


REFUSED = {
    "a name": ("LogCosh", SCHEMA, "an operator is named in small letters"),
    "another name": ("mine", "yours(Tensor self) -> Tensor", "a schema of yours"),
    "in place": ("mine_", "(Tensor(a!) self) -> Tensor(a!)", "an operator is named in small"),
    "no result": ("mine", "(Tensor self) -> ()", "a result that is not a new Tensor"),
    "no arrow": ("mine", "(Tensor self)", "a schema reads like"),
    "no types": ("mine", "(self) -> Tensor", "a schema reads like"),
    "not closed": ("mine", "(Tensor self -> Tensor", "a schema reads like"),
    "nothing": ("mine", "", "a schema reads like"),
    "a list": (
        "mine",
        "(Tensor[] all) -> Tensor",
        "Tensor[] all: the skeleton takes Tensor, Tensor?, Scalar",
    ),
    "optional": ("mine", "(Tensor? self) -> Tensor", "takes no Tensor"),
    "a string": ("mine", "(Tensor self, str mode) -> Tensor", "str mode: the skeleton takes"),
    "writes": ("mine", "(Tensor(a!) self) -> Tensor", "the skeleton takes"),
    "a view": ("mine", "(Tensor(a) self) -> Tensor(a)", "the skeleton takes"),
    "a number": ("mine", "(Tensor self) -> int", "a result that is not a new Tensor"),
    "a word": (
        "mine",
        "(Tensor self, int how=Mean) -> Tensor",
        "int how=Mean: the default must be an integer",
    ),
    "no tensor": ("mine", "(int n) -> Tensor", "takes no Tensor"),
    "out": (
        "mine",
        "mine.out(Tensor self, *, Tensor(a!) out) -> Tensor(a!)",
        "a schema of mine.out",
    ),
    "upstream's": ("kron", SCHEMA, "PyTorch has a function of that name"),
    "upstream's, in Python": ("lobpcg", SCHEMA, "PyTorch has a function of that name"),
    "taken": ("attn", SCHEMA, "has an operator or a commit of that name"),
    "taken by a commit": ("custom_function", SCHEMA, "has an operator or a commit of that name"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused_and_nothing_written(why):
    name, schema, words = REFUSED[why]
    before = status()
    with pytest.raises(ForkError) as caught:
        new(paths.ROOT, name, schema)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert status() == before


# PyTorch's parser of schemas takes these, but no such operator can be compiled or called.
CANNOT_WORK = {
    "(Tensor self, Tensor self) -> Tensor": "self: named twice",
    "(Tensor self, int n, float n) -> Tensor": "n: named twice",
    "(Tensor self) -> (Tensor a, Tensor a)": "a: named twice",
    "(Tensor self) -> (Tensor self, Tensor b)": "self: named twice",
    "(Tensor self, Tensor input) -> Tensor": "input: Python calls the argument self so",
    "(Tensor self) -> (Tensor a, Tensor)": "name each result, or none",
    "(Tensor self) -> (Tensor, Tensor b)": "name each result, or none",
    "(Tensor self, int default) -> Tensor": "default: C++ reserves this word",
    "(Tensor self, int double) -> Tensor": "double: C++ reserves this word",
    "(Tensor self, *, bool lambda) -> Tensor": "lambda: Python reserves this word",
    "(Tensor self) -> (Tensor a, Tensor class)": "class: Python reserves this word",
    "(Tensor self) -> (Tensor union, Tensor a)": "union: C++ reserves this word",
    "(Tensor grad) -> Tensor": "grad: PyTorch's code generator has this name",
    "(Tensor self, int result0) -> Tensor": "result0: PyTorch's code generator has this name",
    "(Tensor self, Tensor out) -> Tensor": "out: PyTorch's code generator has this name",
    "(Tensor self) -> (Tensor ks, Tensor a)": "ks: PyTorch's code generator has this name",
    **{
        f"(Tensor self) -> (Tensor {name}, Tensor a)": f"{name}: PyTorch's code generator has this"
        for name in ("result", "inputs", "input_mask")
    },
    "(Tensor ) -> Tensor": "'' is not a name",
    "(Tensor self, int _n) -> Tensor": "'_n' is not a name",
    "(Tensor self, int self_) -> Tensor": "'self_' is not a name",
    "(Tensor self, int 2nd) -> Tensor": "'2nd' is not a name",
    "(Tensor se-lf) -> Tensor": "'se-lf' is not a name",
    "(Tensor größe) -> Tensor": "'größe' is not a name",
    "(Tensor self, int n=1, int m) -> Tensor": "m needs a default, as n before it has one",
    "(Tensor self, int n=1, *, int m) -> Tensor": "m needs a default, as n before it has one",
    "(*, Tensor x) -> Tensor": "x: must be positional",
    "(Tensor x, *, Tensor self) -> Tensor": "self: must be positional",
    "(Tensor x, *, int input) -> Tensor": "input: must be positional",
}
NO_DEFAULT = {
    "Tensor": ("1", "True", ".5"),
    "Tensor?": ("1", "True", "[]"),
    "Scalar": ("True", "Mean", "1e", "05", "."),
    "float": ("True", "true", "inf", "05", "1e400", "1_0", "0x10", "-", "e3", "1.5.2"),
    "int": ("1.5", "1.", "1e3", "True", "08", "0x10", "-", "99999999999999999999"),
    "bool": ("1", "0", "true", "false", ".5", "None"),
}
DEFAULTS = {
    "Tensor?": ("None",),
    "Scalar": ("1", "-2.5", ".5", "1e-3"),
    "float": (".5", "-.5", "1.", "0", "-3", "2.50", "1e3", "1e+3", "1.5E-3", "0.5"),
    "int": ("0", "-1", "10", "123456789012345678"),
    "bool": ("True", "False"),
}


@pytest.mark.parametrize(
    "schema, words",
    [
        *CANNOT_WORK.items(),
        *(
            (f"(Tensor self, {type} x={value}) -> Tensor", f"{type} x={value}: the default must be")
            for type, values in NO_DEFAULT.items()
            for value in values
        ),
    ],
)
def test_what_cannot_work_is_refused_at_once(tmp_path, schema, words):
    place = tmp_path / "own"
    with pytest.raises(ForkError) as caught:
        new(paths.ROOT, "mine", schema, place)
    assert f"{schema}: {words}" in str(caught.value) and "\n" not in str(caught.value)
    assert not place.exists()


@pytest.mark.parametrize("word", sorted({*keyword.kwlist, *CPP_KEYWORDS}))
def test_a_keyword_names_nothing(tmp_path, word):
    place = tmp_path / "own"
    schemas = {
        "mine": (f"(Tensor {word}) -> Tensor", f"(Tensor self) -> (Tensor {word}, Tensor x)")
    }
    if word.islower():
        schemas[word] = ("(Tensor self) -> Tensor",)
    for name in schemas:
        for schema in schemas[name]:
            with pytest.raises(ForkError, match=f"{word}: (Python|C\\+\\+) reserves this word"):
                new(paths.ROOT, name, schema, place)
    assert not place.exists()


@pytest.mark.parametrize("type, value", [(t, v) for t, values in DEFAULTS.items() for v in values])
def test_defaults(type, value):
    """What is accepted means the same to PyTorch's dispatcher and to Python."""
    operator = parse("mine", f"(Tensor self, {type} x={value}) -> Tensor")
    taken = torch._C.parse_schema(operator.schema).arguments[1].default_value
    assert (
        taken == inspect.signature(eval(f"lambda {operator.signature}: 0")).parameters["x"].default
    )


def test_names_that_are_near_to_what_is_refused():
    schema = "(Tensor input, Tensor A, int n2, float grad_scale) -> (Tensor out, Tensor results)"
    operator = parse("mine", schema)
    assert [a.name for a in operator.arguments] == ["input", "A", "n2", "grad_scale"]
    assert operator.results == ("out", "results")
    assert parse("mine", "(Tensor self) -> Tensor result").results == ("result",)


def test_without_torch(monkeypatch):
    """The folder torchgen of this repository is not PyTorch's."""
    monkeypatch.setitem(sys.modules, "torchgen.model", None)
    with pytest.raises(ForkError, match="run `make attn` first, to its end"):
        parse("mine", SCHEMA)


# One tensor; two, a flag and an optional tensor; names and a signature that fill lines.
IN_FORM = {
    "mine": SCHEMA,
    "to_polar": "(Tensor x, Tensor? s=None, *, bool degrees=False) -> (Tensor r, Tensor a)",
    "a_name_of_many_words": "(Tensor of_the_first_argument, Tensor of_the_second_argument, "
    "Tensor? of_the_third_argument=None, *, float and_a_number=0.5) -> (Tensor, Tensor, Tensor)",
}


@pytest.mark.parametrize("name", IN_FORM)
def test_lint_finds_nothing(tmp_path, name):
    place = tmp_path / "own"
    done = CliRunner().invoke(main, ["new", name, IN_FORM[name], "--into", str(place)])
    assert done.exit_code == 0, done.output
    assert lint(place, fix=False)


def test_a_folder_that_is_there(tmp_path):
    (tmp_path / "x").write_text("mine", encoding="utf-8")
    with pytest.raises(ForkError, match="exists; name a new folder"):
        new(paths.ROOT, "mine", SCHEMA, tmp_path)
    assert tree(tmp_path) == {"x": b"mine"}


SCHEMAS = {
    "mine": SCHEMA,
    "one": "(Tensor self) -> Tensor",
    "three_named": "(Tensor x, int n, bool flag=True) -> (Tensor a, Tensor b, Tensor c)",
    "two": "two(Tensor self, Scalar alpha) -> (Tensor, Tensor)",
    "key": "(Tensor self, float a, *, Tensor other, int b, bool c=False) -> Tensor",
    "maybe": "(Tensor x, Tensor? weight=None, *, bool flag=True) -> (Tensor a, Tensor b)",
}


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Writes all operators into a folder of their own, one after another."""
    place = tmp_path_factory.mktemp("own") / "others"
    new(paths.ROOT, "mine", SCHEMAS["mine"], place)
    for name in [*SCHEMAS][1:]:
        new(place, name, SCHEMAS[name])
    return place


def test_what_a_folder_of_its_own_has(others):
    assert (others / "fork" / "__main__.py").is_file() and (others / "Makefile").is_file()
    assert not (others / "fork" / "tests").exists() and not (others / "course").exists()
    names_attn = [p for p, text in tree(others).items() if b"attn" in p.encode() + text.lower()]
    assert not names_attn
    assert " python -m fork" not in (others / "README.md").read_text(encoding="utf-8").replace(
        "`", " "
    )
    assert operators(others / NATIVE) == list(SCHEMAS)
    # An earlier commit's version declares only the operators up to it, so it can be grafted too.
    assert operators(Stack(others).tree(2)[NATIVE]) == list(SCHEMAS)[:2]
    said = subprocess.run(
        [sys.executable, "-m", "fork", "--help"], cwd=others, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    # Commands for files that it does not get are not listed.
    assert re.search(r"^  graft\b", said.stdout, re.M)
    assert not re.search(r"^  (bench|course|site)\b", said.stdout, re.M)
    targets = subprocess.run(["make", "-n", "lint"], cwd=others, capture_output=True, text=True)
    assert targets.returncode == 0, targets.stderr
    first = subprocess.run(["make", "-n"], cwd=others, capture_output=True, text=True)
    assert "install --example" in first.stdout, first.stderr
    command = ["make", "--no-print-directory", "help"]
    said = subprocess.run(command, cwd=others, capture_output=True, text=True).stdout
    assert said.startswith("mine ") and "bench" not in said
    script = "from fork.overlay import Stack; from fork.paths import ROOT"
    command = [sys.executable, "-c", f"{script}; print(Stack(ROOT).commits[0].subject(6))"]
    title = subprocess.run(command, cwd=others, capture_output=True, text=True)
    assert title.stdout.startswith("[mine 1/6] "), title.stderr


def test_each_commit_stands(others):
    """It resolves against PyTorch, and the stack breaks no rule but that work is left to do."""
    stack = Stack(others)
    left = [p for p in stack.problems() if "still to do" not in p]
    assert left == []
    # The problems name each file of each operator in which something is left to do.
    for name, commit in zip(SCHEMAS, stack.commits, strict=True):
        assert f"{commit}: something in commit.md is still to do" in stack.problems()
        said = [p.partition(":")[0] for p in stack.unfinished() if f"TODO({name}) is" in p]
        said = [p for p in said if not p.startswith("stack/")]
        assert len(said) == len({*said}) == 4, said
    upstream = next(iter(sorted(paths.BASES.glob(f"*/{UNPACKED}"))), None)
    for number, name in enumerate(SCHEMAS, 1):
        native = stack.tree(number)[NATIVE].read_text(encoding="utf-8")
        assert native.count("\n- func: ") == number and f"- func: {name}(" in native
        if upstream:
            resolve(stack.tree(number), Upstream(upstream.parent))


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_the_files_say(others, name):
    derivatives = {
        e["name"].split("(")[0]: e
        for e in yaml.safe_load((others / DERIVATIVES).read_text(encoding="utf-8"))
    }
    tensors = re.findall(r"Tensor\?? (\w+)", SCHEMAS[name].split("->")[0])
    assert set(derivatives[name]) == {"name", *tensors}
    for path in (f"{OPINFOS}/{name}.py", f"test/test_{name}.py"):
        text = (others / path).read_text(encoding="utf-8")
        ast.parse(text)
        assert "${" not in text
    camel = "".join(word.capitalize() for word in name.split("_"))
    kernel = (others / f"aten/src/ATen/native/{camel}.cpp").read_text(encoding="utf-8")
    assert f" {name}(const Tensor& {tensors[0]}" in kernel and "${" not in kernel
    results = SCHEMAS[name].split("->")[1].count("Tensor")
    assert ("std::tuple<" in kernel) == (results > 1)
    assert ("std::optional<Tensor>& weight" in kernel) == ("Tensor?" in SCHEMAS[name])
    assert "at::hypot is in ATen/ops/hypot.h" in kernel


def test_signatures(others):
    overrides = (others / "torch/overrides.edit.py").read_text(encoding="utf-8")
    assert "torch.mine: lambda self, other, *, scale=1.0: -1," in overrides
    assert "torch.three_named: lambda x, n, flag=True: -1," in overrides
    docs = (others / "torch/_torch_docs.edit.py").read_text(encoding="utf-8")
    assert "mine(self, other, *, scale=1.0) -> Tensor" in docs
    assert "three_named(x, n, flag=True) -> (Tensor, Tensor, Tensor)" in docs
    assert "maybe(x, weight=None, *, flag=True) -> (Tensor, Tensor)" in docs


SAMPLES = {
    "mine": [
        "make(shape_self), make(shape_other), scale=0.5",
        "make(shape_self), make(shape_other)",
    ],
    "one": ["make(shape)"],
    "three_named": ["make(shape), 2, False", "make(shape), 2"],
    "two": ["make(shape), 0.5"],
    "key": [
        "make(shape_self), 0.5, other=make(shape_other), b=2, c=True",
        "make(shape_self), 0.5, other=make(shape_other), b=2",
    ],
    "maybe": ["make(shape_x), make(shape_weight), flag=False", "make(shape_x)"],
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_samples_have_the_defaults_too(others, name):
    opinfo = (others / OPINFOS / f"{name}.py").read_text(encoding="utf-8")
    assert re.findall(r"yield SampleInput\((.*)\)$", opinfo, re.M) == SAMPLES[name]


def test_in_a_clone(tmp_path):
    """If another commit has a file, its version goes into that commit's folder."""
    mark = "# @@ before: - func: baddbmm(Tensor self, Tensor batch1,"
    edit = f"{mark}\n- func: old(Tensor q) -> Tensor\n"
    write_files(
        tmp_path,
        {
            NATIVE: edit,
            "torch/overrides.edit.py": "# @@ after: torch.abs:\n    torch.old: 3,\n",
            "stack/01-old/commit.md": message([NATIVE, "torch/overrides.edit.py"]),
        },
    )
    written = new(tmp_path, "mine", SCHEMA)
    assert written[-1] == "stack/02-mine/commit.md"
    assert (tmp_path / "stack/01-old" / NATIVE).read_text(encoding="utf-8") == edit
    native = (tmp_path / NATIVE).read_text(encoding="utf-8")
    assert native.startswith(edit.rstrip("\n")) and native.count("@@ before") == 1
    overrides = (tmp_path / "torch/overrides.edit.py").read_text(encoding="utf-8")
    assert overrides.count("@@ after") == 2  # its place is another, so it is a block of its own
    assert [p for p in Stack(tmp_path).problems() if "still to do" not in p] == []


def fill_in(root, path):
    """Removes the marks of what is left to do from a file."""
    place = root / path
    place.write_text(
        re.sub(r"TODO\(\w+\)", "Done", place.read_text(encoding="utf-8")), encoding="utf-8"
    )


def test_what_an_earlier_commit_keeps_must_be_filled_in_too(tmp_path, monkeypatch):
    """If three operators are filled in at the tip only, the first two's versions are left to do."""
    place = tmp_path / "own"
    new(paths.ROOT, "one", SCHEMA, place)
    monkeypatch.setattr(paths, "ROOT", place)
    for name in ("two", "three"):
        done = CliRunner().invoke(main, ["new", name, SCHEMA])
    stack = Stack(place)
    left = [line for line in stack.unfinished() if line.startswith("stack/")]
    said = done.output.splitlines()
    assert f"stack/02-two/{NATIVE}" in said and f"stack/01-one/{NATIVE}" not in said
    assert [line for line in said if "note: " in line] == [f"note: {x}" for x in left]
    for path in (*stack.tree(), *(f"{commit}/commit.md" for commit in stack.commits)):
        fill_in(place, path)
    docs = "torch/_torch_docs.edit.py"
    wanted = [
        f"stack/{folder}/{path}: TODO({name}) is still to do"
        for folder, names in (("01-one", ("one",)), ("02-two", ("one", "two")))
        for path in (DERIVATIVES, docs)
        for name in names
    ]
    stack = Stack(place)
    assert check(stack) == stack.unfinished() == wanted
    for line in wanted:
        fill_in(place, line.partition(":")[0])
    assert stack.unfinished() == []


def test_a_file_that_no_commit_has(tmp_path):
    files = {
        NATIVE: "# @@ before: - func: baddbmm(\n- func: old(Tensor q) -> Tensor\n",
        "aten/src/ATen/native/Old.cpp": "",
        "stack/01-old/commit.md": message(["aten/src/ATen/native/Old.cpp"]),
    }
    write_files(tmp_path, files)
    before = tree(tmp_path)
    with pytest.raises(ForkError, match="no commit of the stack claims this file"):
        new(tmp_path, "mine", SCHEMA)
    (tmp_path / "test").mkdir()
    (tmp_path / "test/test_mine.py").write_text("", encoding="utf-8")
    with pytest.raises(ForkError, match="exists already|no commit of the stack"):
        new(tmp_path, "mine", SCHEMA)
    (tmp_path / "test/test_mine.py").unlink()
    assert tree(tmp_path) == before
