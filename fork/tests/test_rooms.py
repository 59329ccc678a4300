"""The modules of fork/ import only from rooms below, through a room's door, and in no circle."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from fork.paths import ROOT
from fork.tests.conftest import write_files

ROOMS = ("overlay", "series", "graft", "source", "suites")  # each imports only from those before it
# A command has these kinds of statements. Beside the rooms it calls these, to print and to end.
STATEMENTS = {ast.Assign, ast.Expr, ast.For, ast.If, ast.Return, ast.With}
CALLS = {"console", "len", "paths", "print_wide", "report", "sys", "zip"}
README_LINES, README_COLUMNS = 120, 100


def modules(root: Path) -> dict[str, Path]:
    """Returns the files of `root`/fork's modules by their dotted names, without the tests."""
    found = {}
    for file in sorted((root / "fork").rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if parts[1] != "tests" and "stand_ins" not in parts and ".edit" not in file.name:
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


def imports(file: Path, known: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Yields each module of ours that `file` imports, and the name that it takes from it, if any.

    Where a room exports something under the name of one of its modules, that export is meant.
    """
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                module = inner in known and alias.name not in exported(known[node.module])
                yield (inner, "") if module else (node.module, alias.name)


def room_of(module: str) -> str | None:
    part = module.split(".")[1:2]
    return part[0] if part and part[0] in ROOMS else None


def faults(root: Path) -> list[str]:
    """Returns the imports that break the order of the rooms."""
    found, graph = [], defaultdict(set)
    known = modules(root)
    for module, file in known.items():
        for target, name in imports(file, known):
            if target != "fork":
                graph[module].add(target)
            here, there = room_of(module), room_of(target)
            if here == there or there is None or module == "fork.__main__":
                continue
            if here is None or ROOMS.index(here) < ROOMS.index(there):
                found.append(f"{module} imports {target}, which is above it")
            if target.count(".") > 1:
                found.append(f"{module} imports {target}, past the door of its room")
            elif name and name not in exported(known[target]):
                found.append(f"{module} imports {name}, which {target} does not export")
    # A room's door imports its modules, so these must not import from the door: that is a circle.
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        found.append(f"a circle: {' -> '.join(e.args[1])}")
    return found


def exported(door: Path) -> set[str]:
    """Returns the names that a room's __init__.py imports from the room's modules."""
    body = ast.parse(door.read_text(encoding="utf-8")).body
    return {a.name for node in body if isinstance(node, ast.ImportFrom) for a in node.names}


def test_the_order_of_the_rooms():
    assert faults(ROOT) == []


DOOR = {f"fork/{room}/__init__.py": f"from fork.{room}.a import x\n" for room in ROOMS}
INSIDE = {f"fork/{room}/a.py": "x = y = 1\n" for room in ROOMS}


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("series/b.py", "from fork.overlay import x", None),
        ("series/b.py", "from fork import overlay", None),
        ("series/b.py", "def f():\n    from fork.graft import x", "which is above it"),
        ("paths.py", "from fork import overlay", "which is above it"),
        ("suites/b.py", "from fork.graft.a import x", "past the door"),
        ("suites/b.py", "import fork.graft.a", "past the door"),
        ("suites/b.py", "from fork.graft import a", "past the door"),
        ("suites/b.py", "from fork.graft import y", "does not export"),
        ("suites/a.py", "from fork.suites import x", "a circle: "),
        ("suites/a.py", "from fork.suites.a import x", "a circle: "),
    ],
)
def test_an_import_uphill_is_found(tmp_path, file, text, fault):
    write_files(tmp_path, {"fork/__init__.py": "", **DOOR, **INSIDE, f"fork/{file}": text})
    found = faults(tmp_path)
    assert len(found) == bool(fault) and all(fault in line for line in found), found


@pytest.mark.parametrize("room", ROOMS)
def test_a_rooms_door(room):
    """A room's __init__.py says its purpose in one line, and exports only what others use."""
    door = importlib.import_module(f"fork.{room}")
    assert door.__doc__ and "\n" not in door.__doc__
    outside = [f for m, f in modules(ROOT).items() if room_of(m) != room]
    outside += [
        ROOT / "setup.py",
        *(ROOT / "site").rglob("*.py"),
        *(ROOT / "commands").glob("*.py"),
    ]
    used = {
        node.attr if isinstance(node, ast.Attribute) else alias.name
        for file in outside
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for alias in getattr(node, "names", [None])
        if isinstance(node, ast.Attribute) or isinstance(alias, ast.alias)
    }
    unused = exported(Path(door.__file__)) - used
    assert not unused, f"nobody uses {sorted(unused)}"


@pytest.mark.parametrize("room", (*ROOMS, None))
def test_the_readme_names_what_a_room_holds(room):
    """A row for each room; what is below all of them stands in a paragraph."""
    parts = re.split(r"\n(?=\| `)|\n\n", (ROOT / "fork" / "README.md").read_text(encoding="utf-8"))
    begins = f"| `{room}/`" if room else "A room imports from"
    (told,) = (part for part in parts if part.startswith(begins) and "what flows" not in part)
    inside = [f.name for m, f in modules(ROOT).items() if room_of(m) == room]
    hidden = {"__init__.py", "__main__.py"}
    assert [name for name in inside if name not in hidden and f"`{name}`" not in told] == []


def test_each_module_says_its_job_in_a_line():
    for module, file in modules(ROOT).items():
        doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
        assert doc and doc.splitlines()[0].endswith((".", ":")), f"{module}: {doc}"


def test_no_circle_in_the_benchmarks():
    bench = ROOT / "bench"
    files = {".".join(f.relative_to(bench).with_suffix("").parts): f for f in bench.rglob("*.py")}
    graph = {n: {target for target, _ in imports(f, files)} for n, f in files.items()}
    TopologicalSorter(graph).prepare()


def test_no_module_is_called_as_a_folder_beside_it():
    for file in (ROOT / "fork").rglob("*.py"):
        assert not file.with_suffix("").is_dir(), file


def test_a_command_calls_a_room_and_prints():
    """A command only parses its options, calls a room's function, and prints what that returns."""
    file = ROOT / "fork" / "__main__.py"
    rooms = {name or module[5:] for module, name in imports(file, modules(ROOT)) if room_of(module)}
    for command in (
        n
        for n in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(n, ast.FunctionDef)
    ):
        nodes = [node for statement in command.body for node in ast.walk(statement)]
        assert {type(node) for node in nodes if isinstance(node, ast.stmt)} <= STATEMENTS
        local = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for node in nodes:
            if isinstance(node, ast.Call):
                called = re.match(r"\w*", ast.unparse(node))[0]
                assert called in CALLS | rooms | local, f"{command.name} calls {called} itself"


def test_the_readme_stays_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= README_LINES
    assert max(map(len, lines)) <= README_COLUMNS
