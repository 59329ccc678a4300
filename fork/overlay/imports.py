"""Whether a release has what the stack's Python files import from PyTorch."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fork.overlay.edit import resolve, target_of
from fork.overlay.upstream import Upstream

IMPORT = re.compile(r"^\s*from (torch|functorch)\b", re.M)
COMPILED = "torch._C."  # such modules have no text
ANY = "*"  # in a module's names: it may have others


def missing_imports(tree: dict[str, Path], upstream: Upstream) -> list[str]:
    """A line for each name that a file of `tree` imports and `upstream` with `tree` lacks.

    Imports in a `try` are left out, and those of test files that the tree edits in a wheel.
    """
    written = {path: text.decode() for path, text in resolve(tree, upstream).written.items()}

    @cache
    def names(module: str) -> set[str]:
        """What `module` has; nothing if it isn't there."""
        stem = module.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if (text := written.get(path, upstream.read(path))) is not None:
                return names_in(ast.parse(text))
        return set()

    files = {}
    for path, file in sorted(tree.items()):
        text, target = file.read_text(encoding="utf-8"), target_of(path)
        if path.endswith(".py") and IMPORT.search(text):
            files[path] = written.get(target, "") if target else text
    return [
        f"{path}: {upstream} has no {name} in {module}"
        for path, text in files.items()
        for module, name in imports_of(ast.parse(text))
        if not names(module) & {ANY, name} and not names(f"{module}.{name}")
    ]


def imports_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that are imported from PyTorch's Python modules, each with its module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and not child.level:
            module = child.module or ""
            if COMPILED not in f"{module}." and module.split(".")[0] in ("torch", "functorch"):
                yield from ((module, x.name) for x in child.names if x.name != ANY)
        elif not isinstance(child, ast.Try):
            yield from imports_of(child)


def names_in(module: ast.Module) -> set[str]:
    """What a module binds, in whichever scope, and ANY if it binds more than its text says."""
    names = {"__name__"}
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(ANY if node.name == "__getattr__" else node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
