"""Tests of edits: where blocks go, which are refused, and with which words."""

import pytest

from fork.errors import ForkError
from fork.overlay import Edit, Upstream, resolve, target_of, wheel_place

TEXT = "one\n\n  two(a)\ntwo(b)\n\nthree\n"


@pytest.mark.parametrize(
    "path, target",
    [
        ("torch/overrides.edit.py", "torch/overrides.py"),
        ("build_variables.edit.bzl", "build_variables.bzl"),
        ("aten/src/ATen/native/Attn.cpp", None),
        ("torch/edit.py", None),
    ],
)
def test_target(path, target):
    assert target_of(path) == target


@pytest.mark.parametrize(
    "edit, expected",
    [
        ("# @@ before: two(b)\nnew", "one\n\n  two(a)\nnew\ntwo(b)\n\nthree\n"),
        ("# @@ after: two(a)\nnew", "one\n\n  two(a)\nnew\ntwo(b)\n\nthree\n"),
        # The anchor begins a paragraph, so the block becomes a paragraph before it.
        ("// @@ before: three\nnew\n\n", "one\n\n  two(a)\ntwo(b)\n\nnew\n\nthree\n"),
        (".. @@ after: three\n\nnew", TEXT + "\nnew\n"),
        ("<!-- @@ after: one -->\nnew", "one\nnew" + TEXT[3:]),
        ("# @@ after: zero || one\nnew", "one\nnew" + TEXT[3:]),
        ("# @@ after: one\nx\n# @@ before: two(b)\ny", "one\nx\n\n  two(a)\ny\ntwo(b)\n\nthree\n"),
        (
            "# @@ after: one\n# @@ only: torch>=2.8\nx\n# @@ after: three\ny",
            "one\nx" + TEXT[3:] + "y\n",
        ),
        ("# @@ after: one\n# @@ only: source\nx\n# @@ after: three\ny", TEXT + "y\n"),
    ],
)
def test_apply(edit, expected, unpacked):
    upstream = Upstream(unpacked)
    parsed = Edit.parse("a.edit.txt", edit)
    assert parsed.apply(TEXT, upstream) == expected
    assert parsed.apply(expected, upstream) is None  # the block is there already


def test_a_block_is_as_far_from_the_next_paragraph_as_upstreams_are(unpacked):
    edit = Edit.parse("a.edit.py", "# @@ before: def b\ndef new")
    expected = "def a\n\n\ndef new\n\n\ndef b\n"
    assert edit.apply("def a\n\n\ndef b\n", Upstream(unpacked)) == expected
    assert edit.apply(expected, Upstream(unpacked)) is None


def test_apply_to_text_without_final_newline(unpacked):
    assert (
        Edit.parse("a.edit.txt", "# @@ after: one\nnew").apply("one", Upstream(unpacked))
        == "one\nnew\n"
    )


@pytest.mark.parametrize(
    "anchor", ["before: one", "after: two(a)", "before: three", "after: three"]
)
@pytest.mark.parametrize("cut", [0, 2])  # the second leaves out the last line's end
def test_added_lines_end_as_upstreams_do(anchor, cut, unpacked):
    upstream, edit = Upstream(unpacked), Edit.parse("a.edit.txt", f"# @@ {anchor}\nx\n\ny\n")
    text = TEXT.replace("\n", "\r\n")
    expected = edit.apply(TEXT[: len(TEXT) - cut // 2], upstream).replace("\n", "\r\n")
    assert edit.apply(text[: len(text) - cut], upstream) == expected
    assert edit.apply(expected, upstream) is None


@pytest.mark.parametrize(
    "edit, words",
    [
        ("# @@ before: two\nnew", ["a.edit.txt:1", "'two' starts 2 lines", "a.txt", "2.13.0+cpu"]),
        (
            "\n# @@ before: four || five\nnew",
            ["a.edit.txt:2", "'four' starts 0 lines and 'five' starts 0"],
        ),
        ("# @@ after: one\nx\n# @@ after: one\ny", ["a.edit.txt:3", "second block"]),
    ],
)
def test_anchor_errors(edit, words, unpacked):
    with pytest.raises(ForkError) as e:
        Edit.parse("a.edit.txt", edit).apply(TEXT, Upstream(unpacked))
    assert all(word in str(e.value) for word in words), e.value


@pytest.mark.parametrize(
    "edit, words",
    [
        ("text\n# @@ before: one\nnew", "a.edit.txt:1: text before the first"),
        ("# nothing\n", "a.edit.txt:1: text before the first"),
        ("\n", "without any"),
        ("# @@ before: one\n\n", "a.edit.txt:1: a block that adds nothing"),
        ("# @@ replace: one\nnew", "unknown mark '@@ replace'"),
        ("# @@ before:\nnew", "says nothing"),
        ("# @@ only: windows\n# @@ before: one\nnew", "'@@ only: windows' is neither"),
        ("# @@ only: torch!2\n# @@ before: one\nnew", "is neither"),
        (
            "# @@ before: one\nnew\n# @@ only: source\n",
            "a.edit.txt:3: '@@ only:' must stand right under",
        ),
    ],
)
def test_parse_errors(edit, words):
    with pytest.raises(ForkError, match="a.edit.txt") as e:
        Edit.parse("a.edit.txt", edit)
    assert words in str(e.value)


def test_half_applied_edit_is_refused(unpacked):
    edit = Edit.parse("a.edit.txt", "# @@ after: one\nx\n# @@ after: three\ny")
    with pytest.raises(ForkError, match="holds a part of this edit"):
        edit.apply("one\nx" + TEXT[3:], Upstream(unpacked))


def overlay(tmp_path, **files):
    tree = {}
    for path, text in files.items():
        file = tmp_path / "overlay" / path.replace("/", "_")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        tree[path] = file
    return tree


def test_resolve_maps_places_and_skips_what_a_wheel_lacks(tmp_path, unpacked, source):
    tree = overlay(
        tmp_path,
        **{
            "aten/src/ATen/native/Attn.cpp": "int attn;\n",
            "aten/src/ATen/native/native_functions.edit.yaml": "# @@ before: - func: bmm(\nx\n",
            "test/test_ops.edit.py": "# @@ after: pass\nnew\n",
            "torch/attn.py": "x = 1\n",
        },
    )
    packed = resolve(tree, Upstream(unpacked)).written
    assert sorted(packed) == ["aten/src/ATen/native/native_functions.yaml", "torch/attn.py"]
    assert len(resolve(tree, Upstream(source)).written) == 4


@pytest.mark.parametrize(
    "path, text, words",
    [
        ("torch/new.edit.py", "# @@ after: x\ny\n", "has no torch/new.py"),
        ("torch/overrides.py", "other\n", "has this file"),
    ],
)
def test_resolve_errors(path, text, words, tmp_path, unpacked):
    with pytest.raises(ForkError, match=words):
        resolve(overlay(tmp_path, **{path: text}), Upstream(unpacked))


def test_only_excuses_a_missing_file(tmp_path, unpacked):
    tree = overlay(tmp_path, **{"torch/new.edit.py": "# @@ only: torch<2.8\n# @@ after: x\ny\n"})
    assert resolve(tree, Upstream(unpacked)).written == {}


@pytest.mark.parametrize(
    "path, place",
    [
        (
            "aten/src/ATen/native/native_functions.yaml",
            "torchgen/packaged/ATen/native/native_functions.yaml",
        ),
        ("tools/autograd/derivatives.yaml", "torchgen/packaged/autograd/derivatives.yaml"),
        (
            "torch/csrc/autograd/FunctionsManual.h",
            "torch/include/torch/csrc/autograd/FunctionsManual.h",
        ),
        ("aten/src/ATen/autocast_mode.h", "torch/include/ATen/autocast_mode.h"),
        ("torch/_torch_docs.py", "torch/_torch_docs.py"),
        ("torch/csrc/autograd/FunctionsManual.cpp", None),
        ("test/test_ops.py", None),
        ("docs/source/torch.rst", None),
    ],
)
def test_wheel_place(path, place):
    assert wheel_place(path) == place


def test_upstream_kinds(source, unpacked, wheel, tmp_path):
    found = {u.kind: (u.version, str(u.release)) for u in map(Upstream, (source, unpacked, wheel))}
    assert found == {"source": ("2.6.0a0", "2.6.0"), "wheel": ("2.13.0+cpu", "2.13.0")}
    assert Upstream(wheel).read("torch/overrides.py") == Upstream(unpacked).read(
        "torch/overrides.py"
    )
    with pytest.raises(ForkError, match="not PyTorch"):
        Upstream(tmp_path)
    (unpacked / "torch/version.py").write_text(
        "__version__ = '2.13.0+cpu.attn'\n", encoding="utf-8"
    )
    with pytest.raises(ForkError, match="already grafted"):
        Upstream(unpacked)


def test_a_broken_wheel_is_named(tmp_path):
    (tmp_path / "torch.whl").write_text("no zip", encoding="utf-8")
    with pytest.raises(ForkError, match="torch.whl: not a readable wheel"):
        Upstream(tmp_path / "torch.whl")
