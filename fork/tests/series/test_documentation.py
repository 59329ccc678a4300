"""Tests of what is made of Sphinx's warnings. A script that prints given ones replaces Sphinx."""

import sys

import pytest

from fork.errors import ForkError
from fork.series.documentation import lint, requirements
from fork.tests.conftest import write_files

DOCS = {
    "docs/requirements.txt": (
        "sphinx==5.0.0\n-e git+https://x.invalid/theme.git#egg=theme\n# why\ntensorboard==2.10.0\n"
    ),
    "docs/source/conf.py": "",
    "docs/source/notes/other.rst": "other\n",
    "docs/source/notes/attn.md": "a\nb\n",
    "docs/source/torch.rst": "torch\n    attn\n    baddbmm\n",
    "torch/_torch_docs.py": "add_docstr(\n    torch.attn,\n    None,\n)\nadd_docstr(torch.abs)\n",
}
ADDED = {
    "docs/source/notes/attn.md": {1, 2},
    "docs/source/torch.rst": {2},
    "torch/_torch_docs.py": {1, 2, 3, 4},
}
SPHINX = f"""#!{sys.executable}
import os, pathlib, sys
pages, out = map(pathlib.Path, sys.argv[-2:])
found = sorted(page.relative_to(pages).as_posix() for page in pages.rglob("*.*"))
assert found == ["index.rst", "notes/attn.md", "notes/other.rst", "torch.rst"], found
assert pathlib.Path(os.environ["PYTHONPATH"]).name == "site-packages"
for name in {{generated!r}}:
    (pages / "generated").mkdir(exist_ok=True)
    (pages / "generated" / f"torch.{{{{name}}}}.rst").touch()
warnings = {{warnings!r}}.replace("PAGES", str(pages))
pathlib.Path(sys.argv[sys.argv.index("-w") + 1]).write_text(warnings)
print({{says!r}})
sys.exit({{status}})
"""


@pytest.fixture
def run(source, tmp_path):
    """Returns a function that runs Sphinx and returns its messages about our lines."""
    write_files(source, DOCS)

    def run(warnings="", *, generated=("attn", "baddbmm"), says="", status=0):
        text = SPHINX.format(generated=generated, warnings=warnings, says=says, status=status)
        python = write_files(tmp_path, {"venv/bin/python": text}) / "venv/bin/python"
        python.chmod(0o755)
        found = lint(source, ADDED, tmp_path / "venv", tmp_path / "documentation")
        return [str(one) for one in found]

    return run


def test_the_tools_are_those_of_upstream(source):
    write_files(source, DOCS)
    assert requirements(source) == ["pytorch_sphinx_theme==0.0.19", "sphinx==5.0.0"]


def test_a_tree_without_documentation(source):
    with pytest.raises(ForkError, match="has no docs/requirements.txt"):
        requirements(source)


@pytest.mark.parametrize(
    "warning, found",
    [
        ("", []),
        (
            "PAGES/notes/attn.md:2: WARNING: undefined label: x",
            ["docs/source/notes/attn.md:2: SPHINX warning: undefined label: x"],
        ),
        (
            "PAGES/torch.rst:2:<autosummary>:1: WARNING: what",
            ["docs/source/torch.rst:2: SPHINX warning: what"],
        ),
        ("PAGES/torch.rst:3: WARNING: not our line", []),
        ("PAGES/notes/other.rst:1: WARNING: not our page", []),
        ("WARNING: failed to reach any of the inventories", []),
        (
            "/x/torch/__init__.py:docstring of torch.attn:7: WARNING: what",
            ["docstring of torch.attn:7: SPHINX warning: what"],
        ),
        ("/x/torch/__init__.py:docstring of torch.baddbmm:7: WARNING: what", []),
        (
            "WARNING: [autosummary] failed to import torch.attn.",
            ["torch.attn:0: SPHINX autosummary: is not in torch"],
        ),
        ("WARNING: [autosummary] failed to import torch.baddbmm.", []),
    ],
)
def test_what_is_said_of_our_lines(run, warning, found):
    assert run(warning) == found


def test_a_docstring_that_no_page_asks_for(run):
    assert run(generated=["baddbmm"]) == [
        "torch/_torch_docs.py:1: SPHINX coverage: no page lists torch.attn"
    ]


def test_a_sphinx_that_breaks(run):
    with pytest.raises(ForkError, match="Sphinx: .*theme error"):
        run(says="theme error: no theme", status=2)
