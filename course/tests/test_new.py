"""`python -m fork new`, carried through: skeletons filled in, grafted, and tested.

One graft of four operators: three of different shapes, and one that is left as it is written.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MINE = ROOT / "build" / "course" / "operators"
OPINFOS = "torch/testing/_internal/opinfo/definitions"

# name -> its schema: elementwise; of two tensors and a keyword; with two named results.
SCHEMAS = {
    "cube_root": "(Tensor self) -> Tensor",
    "scaled_outer": "scaled_outer(Tensor a, Tensor b, *, Scalar scale=1) -> Tensor",
    "sin_cos": "(Tensor self) -> (Tensor sin, Tensor cos)",
    "left_alone": "(Tensor self, Tensor other, bool flag=False) -> Tensor",
}
KERNELS = {
    "cube_root": ("", "return self.sgn() * self.abs().pow(1. / 3);"),
    "scaled_outer": (
        'TORCH_CHECK(a.dim() == 1 && b.dim() == 1, "scaled_outer: wants vectors");',
        "return a.unsqueeze(1) * b.unsqueeze(0) * scale;",
    ),
    "sin_cos": ("", "return std::make_tuple(self.sin(), self.cos());"),
}
DERIVATIVES = {
    "cube_root": {
        "self": "grad / (3 * result * result)",
        "result": "auto_element_wise",
    },
    "scaled_outer": {
        "a": "at::mv(grad, b) * scale",
        "b": "at::mv(grad.t(), a) * scale",
        "result": "a_t.unsqueeze(1) * b_p * scale + a_p.unsqueeze(1) * b_t * scale",
    },
    "sin_cos": {
        "self": '"(grad_sin.defined() ? grad_sin * self.cos() : zeros_like(self))'
        ' - (grad_cos.defined() ? grad_cos * self.sin() : zeros_like(self))"',
        "sin": "self_t * self_p.cos()",
        "cos": "-self_t * self_p.sin()",
    },
}
SHAPES = {
    "cube_root": "(((5,),), ((3, 4),), ((0,),))",
    "scaled_outer": "(((3,), (4,)), ((1,), (2,)))",
    "sin_cos": "(((),), ((3, 4),))",
}
REFERENCES = {
    "cube_root": "np.cbrt(self)",
    "scaled_outer": "np.outer(a, b) * scale",
    "sin_cos": "(np.sin(self), np.cos(self))",
}
INTEGERS = "torch.ones(3, dtype=torch.int64, device=device)"
REFUSES = {
    "cube_root": (f"SampleInput({INTEGERS})", "must be floating point"),
    "scaled_outer": (
        f"SampleInput({INTEGERS}.double()[None], args=({INTEGERS}.double(),))",
        "scaled_outer: wants vectors",
    ),
    "sin_cos": (f"SampleInput({INTEGERS})", "must be floating point"),
}
FLOATING = (
    'TORCH_CHECK(at::isFloatingType(self.scalar_type()), "must be floating point");'
)
FILLED = list(KERNELS)


# Of an outer make, of another Python; with CI, PyTorch's tests write reports and no lines.
LEFT_OUT = ("BASE", "CI", "MAKE", "PYTHON")


def run(*command, cwd=ROOT):
    """What a command says, and whether it went well."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(LEFT_OUT)}
    done = subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True)
    return done.stdout + done.stderr, done.returncode == 0


def replace(path, *pairs):
    text = (MINE / path).read_text(encoding="utf-8")
    for old, new in pairs:
        assert text.count(old) == 1, f"{path}: {old}"
        text = text.replace(old, new)
    (MINE / path).write_text(text, encoding="utf-8")


def fill_in(name, number):
    checks, body = KERNELS[name]
    camel = "".join(word.capitalize() for word in name.split("_"))
    replace(
        f"aten/src/ATen/native/{camel}.cpp",
        (
            f"// TODO({name}): the formula that this computes.",
            "// See the documentation.",
        ),
        (
            f'TORCH_CHECK_NOT_IMPLEMENTED(false, "TODO({name}): the kernel");\n  return {{}};',
            f"{checks or FLOATING}\n  {body}",
        ),
    )
    formulas = dict(DERIVATIVES[name])
    inputs = [key for key in formulas if key in ("self", "a", "b")]
    last = inputs[-1]
    forward = "".join(f"\n  {k}: {v}" for k, v in formulas.items() if k not in inputs)
    replace(
        "tools/autograd/derivatives.edit.yaml",
        *(
            (
                f'  {key}: not_implemented("TODO({name}) the gradient of {key}")',
                f"  {key}: {formulas[key]}{forward if key == last else ''}",
            )
            for key in inputs
        ),
    )
    sample, words = REFUSES[name]
    tensors = ", ".join(inputs)
    replace(
        f"{OPINFOS}/{name}.py",
        (
            "from torch.testing import",
            "import numpy as np\n\nimport torch\nfrom torch.testing import",
        ),
        (
            f"# TODO({name}): a row per sample, in it a shape for each of {tensors}.\nSHAPES = ()",
            f"SHAPES = {SHAPES[name]}",
        ),
        (
            f"    # TODO({name}): ErrorInput(SampleInput(...), "
            f'error_regex="what {name} says of it")\n'
            "    cases: list[ErrorInput] = []",
            f'    cases = [ErrorInput({sample}, error_regex="{words}")]',
        ),
        (
            f'raise NotImplementedError("TODO({name}): the reference")',
            f"return {REFERENCES[name]}",
        ),
        (
            "        # With a formula for forward mode in derivatives.yaml, leave this out.\n"
            "        supports_forward_ad=False,\n",
            "        supports_forward_ad=True,\n",
        ),
    )
    docs = MINE / "torch/_torch_docs.edit.py"
    docs.write_text(
        docs.read_text(encoding="utf-8").replace(f"TODO({name})", "Of a test"),
        encoding="utf-8",
    )
    folder = f"stack/{number:02d}-{name.replace('_', '-')}"
    replace(
        f"{folder}/commit.md",
        (f"TODO({name}): what it is for", "A test: what it is for"),
    )


@pytest.fixture(scope="module")
def grafted():
    """The environment with all four: the first in a folder of its own, then the others."""
    fresh = MINE.with_name("operators-fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    for name, schema in SCHEMAS.items():
        first = ["--into", fresh] if not fresh.exists() else []
        place = ROOT if first else fresh
        said, well = run(
            sys.executable, "-m", "fork", "new", name, schema, *first, cwd=place
        )
        assert well, said
    for kept in ("build", ".venv"):  # of the last time
        if (MINE / kept).exists():
            (MINE / kept).rename(fresh / kept)
    shutil.rmtree(MINE, ignore_errors=True)
    fresh.rename(MINE)
    for number, name in enumerate(SCHEMAS, 1):
        if name in FILLED:
            fill_in(name, number)
    said, well = run("make", next(iter(SCHEMAS)), f"PYTHON={sys.executable}", cwd=MINE)
    assert well, said
    return MINE / ".venv" / "bin" / "python", said


def test_it_grafts(grafted):
    for name in SCHEMAS:
        assert f"aten::{name}(" in grafted[1]


def outcomes(python, name):
    """Test -> ok, FAIL or ERROR, of the operator's own file."""
    said, _ = run(python, f"test_{name}.py", "-v", cwd=MINE / "test")
    found = dict(
        re.findall(r"^(test_\w+) \(.*?\).*? \.\.\. (ok|FAIL|ERROR)$", said, re.M)
    )
    assert found, said
    return found


@pytest.mark.parametrize("name", FILLED)
def test_filled_in(grafted, name):
    """gradcheck, gradgradcheck, the reference, errors, compile: of each sample."""
    found = outcomes(grafted[0], name)
    assert len(found) == 10 and set(found.values()) == {"ok"}, found


GRADCHECK = """
import torch
from torch.autograd import gradcheck, gradgradcheck
torch.manual_seed(0)
a, b = (torch.randn(n, dtype=torch.double, requires_grad=True) for n in (3, 4))
for op, given in ((torch.cube_root, (a,)), (torch.sin_cos, (a,)),
                  (lambda a, b: torch.scaled_outer(a, b, scale=2.5), (a, b))):
    assert gradcheck(op, given, check_forward_ad=True) and gradgradcheck(op, given)
assert torch.sin_cos(a).cos.grad_fn.name() == "SinCosBackward0"
print(torch.scaled_outer(a, b).shape)
"""


def test_gradcheck(grafted):
    said, well = run(grafted[0], "-c", GRADCHECK)
    assert well and "torch.Size([3, 4])" in said, said


def test_what_is_left_alone_fails_by_name(grafted):
    """Each thing that is to do; what the skeleton itself has right passes."""
    found = outcomes(grafted[0], "left_alone")
    well = {name for name, outcome in found.items() if outcome == "ok"}
    assert well == {"test_override_cpu"}
    kinds = ("kernel", "reference", "gradient", "second_gradient", "compile", "errors")
    for kind in (*kinds, "documentation"):
        assert any(name.startswith(f"test_{kind}") for name in found.keys() - well), (
            kind
        )
    said, _ = run(sys.executable, "-m", "fork", "check", cwd=MINE)
    assert "stack/04-left-alone: something in commit.md is still to do" in said


def test_a_todo_at_a_time(grafted):
    """With samples but no kernel it is the kernel's test that says so, and so on."""
    program = """
import sys, torch
sys.argv = sys.argv[:1]
from torch.testing._internal.opinfo.definitions import left_alone
left_alone.SHAPES = (((2,), (2,)),)
sample = next(left_alone.op_db[0].sample_inputs("cpu", torch.double, requires_grad=True))
try:
    torch.left_alone(sample.input, *sample.args)
except NotImplementedError as error:
    print(error)
try:
    left_alone.op_db[0].ref(1, 2)
except NotImplementedError as error:
    print(error)
"""
    said, well = run(grafted[0], "-c", program)
    assert (
        well and "TODO(left_alone): the kernel" in said and "the reference" in said
    ), said
