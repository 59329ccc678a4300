r"""
14. An operator of your own
===========================

Everything so far, put together: a native operator with a kernel, a formula and tests,
in a PyTorch that has it without an import. The operator is :math:`\log\cosh x`, a
smooth :math:`|x|`. You need a clone of this repository in which ``make attn`` has
run, and this lesson does the rest, in ``build/course/log_cosh``: the first time, that
takes about two minutes.
"""

import ast
import os
import re
import shutil
import subprocess
import sys

import torch
import yaml

from drawing import plt
from exercise import ROOT, about, compare, report, returned

MINE = ROOT / "build" / "course" / "log_cosh"


# Of an outer make, of another Python; with CI, PyTorch's tests write reports and no lines.
LEFT_OUT = ("BASE", "CI", "MAKE", "PYTHON")


def run(*command, cwd=ROOT, may_fail=False):
    """Runs a command of the shell, and returns what it says."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(LEFT_OUT)}
    done = subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True)
    assert done.returncode == 0 or may_fail, done.stdout + done.stderr
    return done.stdout + done.stderr


# %%
# The skeleton
# ------------
# One command writes all that PyTorch wants to know of an operator. In a clone it
# becomes the next commit of the stack; with ``--into`` it becomes the first commit of
# a folder of its own, which gets the machinery too, and not ``attn``:
#
# .. code-block:: sh
#
#    .venv/bin/python -m fork new log_cosh "(Tensor self) -> Tensor" --into build/course/log_cosh

fresh = MINE.with_name("fresh")
shutil.rmtree(fresh, ignore_errors=True)
written = run(
    sys.executable,
    "-m",
    "fork",
    "new",
    "log_cosh",
    "(Tensor self) -> Tensor",
    "--into",
    fresh,
)
print(written)
for kept in ("build", ".venv"):  # of the last time
    if (MINE / kept).exists():
        (MINE / kept).rename(fresh / kept)
shutil.rmtree(MINE, ignore_errors=True)
fresh.rename(MINE)

# %%
# It can be built as it is: what you have to write says ``TODO(log_cosh)``, and raises
# or fails a test until you do.

left = {}
for path in written.split():
    for line in (MINE / path).read_text(encoding="utf-8").splitlines():
        if "TODO(log_cosh)" in line:
            left.setdefault(path, []).append(line.strip())
for path, lines in left.items():
    print(path, *lines, sep="\n    ")
assert len(left) == 5

# %%
# The schema and the kernel
# -------------------------
# The schema is there: it is what we said. ``CompositeExplicitAutograd`` means that
# the kernel is made of other operators, for all devices, and that its gradient is
# *explicit*.

native = (MINE / "aten/src/ATen/native/native_functions.edit.yaml").read_text(
    encoding="utf-8"
)
print(native)
assert "- func: log_cosh(Tensor self) -> Tensor" in native

# %%
# The kernel. As it stands, log(cosh(x)) overflows for x = 1000, of which it should be
# 1000 - log 2. So we take out the larger exponential,
# :math:`\log\cosh x = |x| + \log(1 + e^{-2|x|}) - \log 2`, and say no to what is not
# floating point. The file is ``aten/src/ATen/native/LogCosh.cpp``.


def fill(path, **changes):
    """Puts something in the place of a skeleton's lines, each of which must be there."""
    file = MINE / path
    text = file.read_text(encoding="utf-8")
    for old, lines in changes.values():
        assert old in text, old
        text = text.replace(old, lines)
    file.write_text(text, encoding="utf-8")


KERNEL = """\
  TORCH_CHECK(
      at::isFloatingType(self.scalar_type()),
      "log_cosh: self must be floating point, not ", self.scalar_type());
  const auto x = self.abs();
  return x + (x * -2).exp().log1p() - M_LN2;
"""
fill(
    "aten/src/ATen/native/LogCosh.cpp",
    formula=("// TODO(log_cosh): the formula that this computes.",
             "// log(cosh(x)) = |x| + log(1 + exp(-2 |x|)) - log(2), which does not overflow"),
    kernel=('  TORCH_CHECK_NOT_IMPLEMENTED(false, "TODO(log_cosh): the kernel");\n  return {};\n',
            KERNEL),
    header=("#include <tuple>", "#include <cmath>"),
)  # fmt: skip

# %%
# The derivative
# --------------
# :math:`(\log\cosh x)' = \tanh x`. One line in
# ``tools/autograd/derivatives.edit.yaml``, and one more for forward mode:
# ``auto_element_wise`` says that the same formula does. With it, the OpInfo's
# ``supports_forward_ad=False`` can go.

fill(
    "tools/autograd/derivatives.edit.yaml",
    gradient=('self: not_implemented("TODO(log_cosh) the gradient of self")',
              "self: grad * self.tanh()\n  result: auto_element_wise"),
)  # fmt: skip
print((MINE / "tools/autograd/derivatives.edit.yaml").read_text(encoding="utf-8"))

# %%
# The OpInfo
# ----------
# Samples: the shapes that may go wrong are those without elements and without
# dimensions. A reference, in NumPy. And what the operator must refuse, with the words
# it must use.

OPINFO = "torch/testing/_internal/opinfo/definitions/log_cosh.py"
fill(
    OPINFO,
    samples=("# TODO(log_cosh): a row per sample, in it a shape for each of self.\nSHAPES = ()",
             "SHAPES = (((),), ((5,),), ((3, 4),), ((2, 0, 3),))"),
    reference=('    raise NotImplementedError("TODO(log_cosh): the reference")',
               "    return np.logaddexp(self, -self) - np.log(2)"),
    errors=("    # TODO(log_cosh): ErrorInput(SampleInput(...), "
            'error_regex="what log_cosh says of it")\n'
            "    cases: list[ErrorInput] = []",
            "    integers = SampleInput(torch.ones(3, dtype=torch.int64, device=device))\n"
            '    cases = [ErrorInput(integers, error_regex="must be floating point, not Long")]'),
    imports=("from torch.testing import make_tensor",
             "import numpy as np\n\nimport torch\nfrom torch.testing import make_tensor"),
    forward=("        # With a formula for forward mode in derivatives.yaml, leave this out.\n"
             "        supports_forward_ad=False,\n", "        supports_forward_ad=True,\n"),
)  # fmt: skip

# %%
# The words
# ---------
# A docstring, and the commit's message. ``python -m fork check`` says what is
# missing: before, and after.

print(
    run(sys.executable, "-m", "fork", "check", cwd=MINE, may_fail=True)
    .strip()
    .splitlines()[-1]
)
fill(
    "torch/_torch_docs.edit.py",
    what=("TODO(log_cosh): what it computes.",
          "Returns :math:`\\log(\\cosh(x))` of each element, without overflow."),
    argument=("self (Tensor): TODO(log_cosh)", "self (Tensor): floating point, of any shape."),
)  # fmt: skip
fill(
    "stack/01-log-cosh/commit.md",
    why=("TODO(log_cosh): what it is for, what it computes, and why it is an\noperator of its own.",
         "log(cosh(x)) is a smooth |x|, used as a loss. Written as it stands, it overflows\n"
         "from x = 90 on in float32; the operator does not, and its backward is one tanh."),
)  # fmt: skip
run(sys.executable, "-m", "fork", "check", cwd=MINE)
assert not [
    path
    for path in written.split()
    if "TODO(" in (MINE / path).read_text(encoding="utf-8")
]

# %%
# Build it
# --------
# ``make log_cosh`` in that folder: an environment, PyTorch's wheel, the code that
# PyTorch's generator makes of the two entries, a compiler for a minute, and the wheel
# with the operator in it, installed.

python = f"PYTHON={sys.executable}"
said = run("make", "--no-print-directory", "log_cosh", python, cwd=MINE)
print(re.sub(r" \([\d.]+ s\)", "", said))
assert "aten::log_cosh(Tensor self) -> Tensor" in said

# %%
# Use it
# ------
# In a Python that has never heard of this repository:

PROGRAM = """
import torch
from torch.autograd import gradcheck, gradgradcheck
x = torch.tensor([-1000.0, -1.0, 0.0, 2.0, 1000.0], dtype=torch.double, requires_grad=True)
y = torch.log_cosh(x)
y.sum().backward()
print(y.detach().tolist(), x.grad.tolist(), y.grad_fn.name(), sep="\\n")
assert torch.equal(x.grad, x.detach().tanh()) and y.isfinite().all()
small = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
assert gradcheck(torch.log_cosh, small, check_forward_ad=True, check_batched_grad=True)
assert gradgradcheck(torch.log_cosh, small)
compiled = torch.compile(torch.log_cosh, fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(small), torch.log_cosh(small))
"""
print(run(MINE / ".venv/bin/python", "-c", PROGRAM))

# %%
# PyTorch's own test framework makes the operator's tests from the OpInfo. ``make test``
# runs them, and checks the stack.

run("make", "--no-print-directory", "test", python, cwd=MINE)
tests = (MINE / "build/reports/operator/test_log_cosh.log").read_text(encoding="utf-8")
ran = re.findall(r"^\S+::(test_\w+) ", tests, re.M)
print(*ran, sep="\n")
assert len(ran) == 10 and re.search(r"^=+ 10 passed in", tests, re.M)

# %%
# From here on the folder is yours: ``git init`` it. ``python -m fork commits`` makes
# real commits of it on a checkout of PyTorch (:doc:`/stack`), and the next operator
# is one more ``python -m fork new``.

x = torch.linspace(-4, 4, 200)
figure, axes = plt.subplots(figsize=(5, 2.8))
axes.plot(x, x.abs(), ":", color="#888888", label="|x|")
axes.plot(x, torch.logaddexp(x, -x) - torch.log(torch.tensor(2.0)), label="log cosh x")
axes.plot(x, x.tanh(), label="its derivative, tanh x")
axes.legend()
figure.tight_layout()

# %%
# Exercise
# --------
# Write the entry of ``derivatives.yaml`` for ``log_add``, log(exp(a) + exp(b)) of two
# tensors of one shape: the schema, and a formula for each input, made of methods of
# tensors, so that Python can run it as it stands. It must be finite for a = 1000.
# (Then carry it through as above, in a folder of its own: ``new`` will take it.) A
# solution is in :download:`course/solutions/14_own_operator.py
# </../course/solutions/14_own_operator.py>`.


def entry():
    """{"name": the schema, "a": a formula, "b": one}; `grad`, `a`, `b`, `result` are known."""
    raise NotImplementedError  # your turn


OF_BOTH_LANGUAGES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Call, ast.Attribute, ast.Name),
    *(
        ast.Load,
        ast.Constant,
        ast.Add,
        ast.Sub,
        ast.Mult,
        ast.Div,
        ast.USub,
        ast.Compare,
    ),
    *(ast.Lt, ast.Gt, ast.LtE, ast.GtE),
)


def refuse_what_only_python_knows(formula, names):
    """The generator pastes a formula into C++: there it has to mean the same."""
    try:
        tree = ast.parse(formula, mode="eval")
    except SyntaxError:
        raise AssertionError(
            f"{formula!r} is no expression of both languages: write methods of tensors, "
            "and + - * /."
        ) from None
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
        known = isinstance(node, OF_BOTH_LANGUAGES)
        if isinstance(node, ast.Constant):
            known = type(node.value) in (int, float)
        elif isinstance(node, ast.Name):
            known = node.id in names
        elif isinstance(
            node, ast.Attribute
        ):  # a method, and one of a tensor in C++ too
            known = id(node) in called and hasattr(torch.ops.aten, node.attr)
            assert not (known and node.attr.endswith("_")), (
                f"{node.attr} changes a tensor in place, which others use too."
            )
        elif isinstance(node, ast.Call):
            known = isinstance(node.func, ast.Attribute) and not node.keywords
        elif isinstance(node, ast.Compare):
            known = len(node.ops) == 1
        assert known, (
            f"C++ does not know {text}: write methods of tensors, and + - * /."
        )
        whole = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        sides = (node.left, node.right) if whole else ()
        whole = whole and all(type(getattr(s, "value", None)) is int for s in sides)
        assert not whole, f"{text} is a division of whole numbers in C++."


def check(attempt):
    from torchgen.model import FunctionSchema

    given = returned(yaml.safe_load(yaml.safe_dump(attempt())), dict, "entry")
    assert isinstance(given.get("name"), str), "The entry has no name: the schema."
    try:
        schema = FunctionSchema.parse(given["name"])
    except (AssertionError, RuntimeError, ValueError) as error:
        raise AssertionError(
            f"PyTorch's parser does not take the schema: {error}"
        ) from None
    assert str(schema.name) == "log_add", f"It is called {schema.name}, not log_add."
    arguments = [str(a) for a in schema.arguments.flat_non_out]
    assert arguments == ["Tensor a", "Tensor b"] and not schema.arguments.out, (
        f"It takes {', '.join(map(str, schema.arguments.flat_all))}, not Tensor a, Tensor b."
    )
    assert [str(r.type) for r in schema.returns] == ["Tensor"], "It returns a Tensor."
    for key in given:
        assert key in ("name", "a", "b", "result"), (
            f"There is a formula for {key}, which is no argument of log_add."
        )
    for name in "ab":
        assert isinstance(given.get(name), str), f"There is no formula for {name}."
        with about(f"the formula for {name}"):
            given[name] = " ".join(given[name].split())  # a formula may have many lines
            refuse_what_only_python_knows(given[name], ("grad", "a", "b", "result"))
    ends = torch.tensor([[0.0, 1000, -1000, 1000], [0, -1000, 1000, 1000]])
    a, b = (torch.cat([end.double(), torch.randn(20).double()]) for end in ends)
    a.requires_grad_(), b.requires_grad_()
    result = torch.logaddexp(a, b)
    grad = torch.randn_like(a)
    truths = torch.autograd.grad(result, (a, b), grad)
    names = {"grad": grad, "a": a.detach(), "b": b.detach(), "result": result.detach()}
    for name, truth in zip("ab", truths, strict=True):
        with about(f"the formula for {name}"):
            found = eval(given[name], {}, names)
        with about(f"the formula for {name}, on another device than the CPU"):
            eval(given[name], {}, {key: t.to("meta") for key, t in names.items()})
        assert isinstance(found, torch.Tensor) and found.isfinite().all(), (
            f"The gradient of {name} is not finite: {found}."
        )
        compare(f"The gradient of {name}", found, truth)
    if "result" in given:  # a formula for forward mode, which may be left out
        check_tangent(given["result"], a.detach(), b.detach())


def check_tangent(formula, a, b):
    """`formula` is of the tangents a_t, b_t, at a_p, b_p."""
    assert formula != "auto_element_wise", (
        "auto_element_wise is for functions of one tensor: the generator refuses it."
    )
    assert formula != "auto_linear", "auto_linear: log_add is not linear."
    tangents = torch.randn_like(a), torch.randn_like(b)
    result, truth = torch.func.jvp(torch.logaddexp, (a, b), tangents)
    names = dict(zip(("a_t", "b_t", "a_p", "b_p"), (*tangents, a, b), strict=True))
    names["result"] = result
    with about("the formula for result"):
        formula = " ".join(returned(formula, str, "entry").split())
        refuse_what_only_python_knows(formula, tuple(names))
        found = eval(formula, {}, names)
    compare("The tangent", found, truth)


report(check, entry)
