"""Tests of what our operators add to the wheel's generated headers."""

import pytest

from fork.errors import ForkError
from fork.graft.headers import merge

# A header with one place for lines, as the generator writes it.
HEADER = """\
#pragma once
// @generated from {0}
#include <vector>

{1}
namespace at {{

}} // namespace at
"""
NONE = HEADER.format("/none", "")
OURS = HEADER.format("/ours", "#include <ATen/ops/attn.h>\n#include <ATen/ops/b.h>")
WHEEL = HEADER.format("/wheel", "#include <ATen/ops/add.h>\n#include <ATen/ops/zeros.h>")
BOTH = HEADER.format(
    "/wheel",
    "#include <ATen/ops/add.h>\n#include <ATen/ops/zeros.h>\n"
    "#include <ATen/ops/attn.h>\n#include <ATen/ops/b.h>",
)


def test_our_lines_follow_the_wheels():
    assert merge("Functions.h", NONE, OURS, WHEEL) == BOTH


def test_a_wheel_may_wrap_a_header():
    before, after = "#if !defined(TORCH_STABLE_ONLY)\n", "\n#else\n#error\n#endif\n"
    assert merge("x.h", NONE, OURS, before + WHEEL + after) == before + BOTH + after


def test_lines_at_the_end():
    assert merge("x.h", "// all\n\n", "// all\n\nattn();\n", "// all\n\nadd();\n") == (
        "// all\n\nadd();\nattn();\n"
    )


def test_lines_like_those_around_them():
    none, wheel = "ns {\n}\n}\n", "ns {\nadd {\n}\n}\n}\n"
    assert merge("x.h", none, "ns {\nattn {\n}\n}\n}\n", wheel) == (
        "ns {\nadd {\n}\nattn {\n}\n}\n}\n"
    )


def test_nothing_to_add():
    assert merge("x.h", NONE, HEADER.format("/ours", ""), WHEEL) is None


@pytest.mark.parametrize(
    "ours, wheel, words",
    [
        (OURS.replace("at {", "at {\nint i;"), WHEEL, "in more than one place"),
        (OURS, "#pragma once\n", "not what its generator makes"),
    ],
)
def test_headers_that_are_not_as_expected(ours, wheel, words):
    with pytest.raises(ForkError, match=f"x.h: .*{words}"):
        merge("x.h", NONE, ours, wheel)
