"""The operator that site/carry.md fills in: its command, its differences, a graft, its tests."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys

import pytest
from test_new import ROOT, run

PAGE = (ROOT / "site" / "carry.md").read_text(encoding="utf-8")
MINE = ROOT / "build" / "course" / "to_polar"


@pytest.fixture(scope="module")
def filled_in():
    """A folder that has the operator as the page fills it in."""
    (command,) = re.findall(r"^\.venv/bin/python (.* --into) ~/to_polar$", PAGE, re.M)
    fresh = MINE.with_name("to_polar-fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    said, well = run(sys.executable, *shlex.split(command), fresh)
    assert well, said
    for differences in re.findall(r"^```diff\n(.*?)^```$", PAGE, re.M | re.S):
        apply = ["git", "apply", "-p0", "-"]
        done = subprocess.run(
            apply, cwd=fresh, input=differences, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
    for kept in ("build", ".venv"):  # of the last time
        if (MINE / kept).exists():
            (MINE / kept).rename(fresh / kept)
    shutil.rmtree(MINE, ignore_errors=True)
    fresh.rename(MINE)
    return MINE


def test_nothing_is_left_to_do(filled_in):
    said, well = run(sys.executable, "-m", "fork", "check", cwd=filled_in)
    assert well and "1 commits, 13 files: sound" in said, said


USED = """
import torch
x, y = torch.tensor([[3.0, 0.0], [4.0, 2.0]], requires_grad=True)
radius, angle = torch.to_polar(x, y, degrees=True)
assert radius.tolist() == [5, 2] and angle.tolist()[1] == 90
assert torch.equal(torch.to_polar(x, y, radius).radius, radius * radius)
for result in (radius, angle):  # each by itself: the other's gradient is undefined
    found = torch.autograd.grad(result.sum(), (x, y), retain_graph=True)
    assert all(gradient.isfinite().all() for gradient in found)
print(radius.grad_fn.name())
"""


def test_it_is_built_and_passes_its_tests(filled_in):
    said, well = run("make", "to_polar", f"PYTHON={sys.executable}", cwd=filled_in)
    assert well and "aten::to_polar(Tensor x, Tensor y, Tensor? scale=None" in said, (
        said
    )
    python = filled_in / ".venv" / "bin" / "python"
    said, well = run(python, "test_to_polar.py", "-v", cwd=filled_in / "test")
    found = re.findall(r" \.\.\. (\w+)$", said, re.M)
    assert well and found == ["ok"] * 10, said
    said, well = run(python, "-c", USED)
    assert well and said == "ToPolarBackward0\n", said
