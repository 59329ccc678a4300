"""What the pages and docstrings say of the operator is so, and the same wherever it is said."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from test_code import PAGES, name, prose

from fork.overlay import Stack

ROOT = Path(__file__).resolve().parents[2]
COMMITS = Stack(ROOT).commits
KERNEL = ROOT / "aten/src/ATen/native/cpu"
DOCSTRINGS = ROOT / "torch/_torch_docs.edit.py"
RING = ROOT / "torch/distributed/tensor/experimental/_attn_ring.py"
# These speak of tests and of commits, and promise nothing of the operator.
OF_TESTS = {"site/testing.md", "site/stack.md"}
BITS = (r"(?<!\d )\bbits\b", r"\bthreads\b")  # of a result; a vector has a number of them


def strings(file):
    """The strings of a Python file, docstrings among them."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return [x.value for x in nodes if isinstance(x, ast.Constant) and isinstance(x.value, str)]


TEXTS = {name(page): prose(page) for page in PAGES}
TEXTS |= {name(file): "\n\n".join(strings(file)) for file in (DOCSTRINGS, RING)}


def paragraphs(text, *patterns):
    """The paragraphs, each in one line, that have all of the patterns."""
    found = (" ".join(part.split()) for part in re.split(r"\n\s*\n|^\s*- ", text, flags=re.M))
    return [part for part in found if all(re.search(pattern, part) for pattern in patterns)]


def constant(file, name):
    """A constant of the kernel, as AVX-512 has it."""
    value = re.search(rf"\b{name} = ([^;]+);", (KERNEL / file).read_text(encoding="utf-8"))[1]
    return str(int(eval(value, {"LANES": 16})))


def width():
    """Inputs with more columns have no kernel."""
    return constant("AttnKernel.h", "ATTN_MAX_WIDTH")


@pytest.mark.parametrize("page", TEXTS.keys() - OF_TESTS)
def test_equal_bits_are_promised_where_there_is_a_kernel(page):
    """matmul's bits, and so those of composed inputs, depend on threads, strides and the batch."""
    assert [
        x for x in paragraphs(TEXTS[page], *BITS) if not re.search(rf"\b{width()}\b|Elsewhere", x)
    ] == []


def test_promises_of_equal_bits_are_seen():
    seen = {page for page, text in TEXTS.items() if paragraphs(text, *BITS)}
    assert seen - OF_TESTS == {
        *("docs/source/notes/attn_operator.md", "docs/source/notes/attn_output.md"),
        *("site/ring.md", name(DOCSTRINGS), name(RING)),
    }


@pytest.mark.parametrize("page", TEXTS)
def test_the_width_of_the_kernels(page):
    said = re.findall(r"(?:more than|at most|above|up to) (\d+)\s+columns", TEXTS[page])
    assert {*said} <= {width()}


def test_what_takes_the_whole_matrix():
    """test_memory of test_attn_output_third_order_kernel.py measures that the others don't."""
    (said,) = paragraphs(TEXTS[name(DOCSTRINGS)], "take the whole matrix")
    composed = re.search(r"[^.:]*whole matrix[^.]*", said)[0]
    for what in ("complex", "another device", f"{width()} columns", "fourth derivatives"):
        assert what in composed
    assert "second" not in composed


@pytest.mark.parametrize(
    ("commit", "says", "file", "name"),
    [
        ("22-cpu-forward", r"more than (\d+) columns", "AttnKernel.h", "ATTN_MAX_WIDTH"),
        ("20-cpu-few", r"up to (\d+) rows of floats", "AttnDot.h", "MAX_ROWS"),
        ("20-cpu-few", r"up to (\d+), `q` is transposed", "AttnScores.h", "FEW_ROWS"),
        ("26-attn-output-inductor", r"`d` and `e` up to (\d+)", "AttnKernel.h", "ATTN_MAX_WIDTH"),
    ],
)
def test_a_message_has_the_constants_of_the_code(commit, says, file, name):
    (message,) = (c.body for c in COMMITS if c.folder.name == commit)
    assert re.findall(says, " ".join(message.split())) == [constant(file, name)]


def test_no_message_ends_the_series_but_the_last():
    assert [str(c) for c in COMMITS[:-1] if re.search(r"\bends th(is|e) series", c.body)] == []


def test_where_the_bits_of_the_package_differ():
    """Each capability in which the package's column differs from the fork's is excepted."""
    page = TEXTS["site/ways.md"]
    (said,) = paragraphs(page, "same bits")
    assert "AMX" in said
    assert "| the same in second derivatives | yes | yes |" in page
    assert "| double backward, forward AD | yes | yes |" in page


def test_the_rules_of_error():
    """The page names each factor of an error that a test allows."""
    files = sorted((ROOT / "test").glob("test_attn*.py"))
    tests = "".join(file.read_text(encoding="utf-8") for file in files)
    factors = re.findall(r"([\d.]+) \* \(?(?:y - z\)\.norm|abs\(plain|plain\))", tests)
    words = {"2": "twice", "1.5": "one and a half times"}
    (said,) = paragraphs(TEXTS["site/testing.md"], "error of the plain computation")
    assert {words[factor] for factor in factors} == {x for x in words.values() if x in said}


def test_what_can_be_sent_upstream():
    """PyTorch takes what a person answers for: wherever the sending is spoken of, it says so."""
    for page, said in (("README.md", "can be sent upstream"), ("site/stack.md", "## Sending it")):
        _, _, rest = TEXTS[page].partition(said)
        assert "a person who answers for it" in " ".join(rest.split())[:400]
