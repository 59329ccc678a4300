"""Two hashes of what is tested: of what goes in, and of what comes out without a compiler.

What passed is kept by the first one, which needs no base. Where that is unknown, the second one may
be known: a change of fork/ that makes the same files voids nothing.
"""

import ast
import functools
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path

from fork.graft import Graft, made_of
from fork.overlay import NATIVE, Commit, Stack, is_edit, operators, suites_release, target_of
from fork.suites.plan import HERE, REQUIREMENTS, TEST, Plan
from fork.suites.run import command

# The files that decide how tests are run and counted.
RUNNER = (HERE / "run.py", HERE / "results.py", REQUIREMENTS)
CUDA = "aten/src/ATen/native/cuda/"  # compiled by tests, where no nvcc is
IMPORT = re.compile(r"^\s*(?:from|import) (\w+)", re.M)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def key(stack: Stack, commit: Commit) -> str:
    """A hash of what the commit is made of and tested with, the same on every machine."""
    return key_of(Plan.of(stack, commit), stack, commit, suites_release())


def key_of(plan: Plan, stack: Stack, commit: Commit, where: str) -> str:
    """A hash of what commits 1 to `commit` are made of, of a plan to test them, and of `where`.

    Not in it: comments and docstrings of Python files, what no test on a CPU sees, such as
    documentation and kernels for CUDA, and tests that are not in the plan.
    """
    tree = stack.tree(commit.number)
    files = tests_of(plan, tree)
    if plan or NATIVE in tree:
        files |= made_of(stack.root, tree)
        files |= {f"fork/suites/{file.name}": file for file in RUNNER}
    scripts = [[c.folder, *c.words] for c in plan.scripts]
    return digest([where, plan.upstream, plan.own, scripts], contents(files))


def key_made(plan: Plan, stack: Stack, commit: Commit, graft: Graft) -> str:
    """A hash of what is compiled, shipped and run for the plan, of a graft that is prepared."""
    ops = operators(stack.root / NATIVE)
    report = Path("report.xml")
    suites = {**{name: (*ops, *walks) for name, walks in plan.upstream.items()}, **plan.own}
    commands = [list(map(str, command(name, of, report))) for name, of in suites.items()]
    scripts = [[c.folder, *c.words] for c in plan.scripts]
    tree = stack.tree(commit.number)
    files = {**tests_of(plan, tree), REQUIREMENTS.name: REQUIREMENTS}
    files |= {path: file for path, file in tree.items() if path.startswith(CUDA)}
    return digest([graft.base.version, commands, scripts], {**graft.inputs(), **contents(files)})


def digest(about: list, files: Mapping[str, bytes]) -> str:
    """A hash of files by their names, and of what else is said `about` them."""
    hashes = {path: hashlib.sha256(text).hexdigest() for path, text in files.items()}
    text = json.dumps([*about, hashes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def contents(files: Mapping[str, Path]) -> dict[str, bytes]:
    """What the files say; of Python files, the code."""
    return {
        path: code(file.read_text(encoding="utf-8")).encode()
        if path.endswith(".py") and not is_edit(path)
        else file.read_bytes()
        for path, file in files.items()
    }


@functools.cache
def code(text: str) -> str:
    """A Python file without its comments, docstrings and empty lines, which strings keep."""
    lines = dict(enumerate(text.splitlines(), 1))
    try:
        tree = ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (SyntaxError, tokenize.TokenError):
        return text
    for token in tokens:
        at = token.start[0]
        if token.type == tokenize.COMMENT:
            lines[at] = lines[at][: token.start[1]].rstrip()
        if token.type in (tokenize.COMMENT, tokenize.NL) and not lines.get(at, "x").strip():
            del lines[at]
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            said = node.body[0]
            around = lines[said.lineno][: said.col_offset], lines[said.end_lineno]
            if not around[0].strip() and not around[1].encode()[said.end_col_offset :].strip():
                for at in range(said.lineno, said.end_lineno + 1):
                    lines.pop(at, None)
    return "\n".join(lines.values())


def tests_of(plan: Plan, tree: Mapping[str, Path]) -> dict[str, Path]:
    """The overlay's files that the plan runs, and those that these read or import."""
    return {path: file for path, file in tree.items() if _is_seen(path, plan, tree)}


def _is_seen(path: str, plan: Plan, tree: Mapping[str, Path]) -> bool:
    """Whether a file of the overlay is one of the plan's, or is read by one of these."""
    if path.startswith(TEST):
        return target_of(path) is not None or path in _with_imports(plan, tree)
    return any(path.startswith(f"{Path(c.file).parent}/") for c in plan.scripts)


def _with_imports(plan: Plan, tree: Mapping[str, Path]) -> set[str]:
    """The overlay's test files that the plan runs, those that they import, and the folders beside
    them that they name."""
    found: set[str] = set()
    folders = {x.split("/")[1] for x in tree if x.startswith(TEST) and x.count("/") > 1}
    names = [*plan.upstream, *plan.own, *(c.file.removeprefix(TEST) for c in plan.scripts)]
    while names:
        path = TEST + names.pop()
        if path in tree and path not in found:
            found.add(path)
            text = tree[path].read_text(encoding="utf-8")
            names += [f"{name}.py" for name in IMPORT.findall(text)]
            beside = tuple(f"{TEST}{name}/" for name in folders if f'"{name}"' in text)
            found |= {other for other in tree if beside and other.startswith(beside)}
    return found
