"""What each commit of the stack is tested with."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import dropwhile, groupby
from pathlib import Path

from typing_extensions import Self

from fork.errors import ForkError
from fork.overlay import NATIVE, Commit, Stack, operators, target_of
from fork.suites.files import LAB, SUITES, is_test_file, own_patterns

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"

TEST = "test/"
# The places where the overlay tells PyTorch of an operator. The lab's suites test what is there.
REGISTERS = (
    *("aten/src/ATen/autocast_mode", "aten/src/ATen/functorch/"),
    *("tools/autograd/", "torch/", "torchgen/"),
)
KERNELS = "torch/_native/"  # but these are kernels
# `make test-stack` leaves out a command of a test plan that says one of these.
LEFT_OUT = re.compile(r"PYTORCH_TEST_WITH_SLOW=1|PYTORCH_TESTING_DEVICE_ONLY_FOR=cuda|\bGPU\b")


@dataclass(frozen=True)
class Command:
    """One command of a test plan: `python test/test_ops.py -k bmm`."""

    folder: str  # where it is given, below the source tree
    file: str  # what it runs, in the source tree
    words: tuple[str, ...]  # what follows `python`
    args: tuple[str, ...]  # those after the file
    left_out: bool = False

    def __str__(self) -> str:
        return " ".join([self.file, *self.args])

    @property
    def is_script(self) -> bool:
        """Whether it runs no tests of unittest's: then its exit status says whether it passed."""
        return not (self.file.startswith(TEST) and is_test_file(self.file.removeprefix(TEST)))


def commands(commit: Commit) -> list[Command]:
    """Returns the commands in a test plan's code blocks, without the build of the documentation."""
    prose, *parts = re.split(r"^```\n(.*?)^```$", commit.section("Test plan"), flags=re.M | re.S)
    blocks, words = parts[::2], [prose, *parts[1::2]]
    if lost := re.search(r"^    (\S.*)", "\n".join(words), re.M):
        raise ForkError(f"{commit}: its test plan has a command outside a code block: {lost[1]}")
    lines = (line for block in blocks for line in block.splitlines() if line)
    return [command for line in lines for command in _commands(commit, line)]


def _commands(commit: Commit, line: str) -> Iterator[Command]:
    left_out, folder = bool(LEFT_OUT.search(line)), ""
    parts = groupby(shlex.split(line, comments=True), "&&".__eq__)
    for part in (list(words) for between, words in parts if not between):
        # Only a command that is left out may set variables: every run has the same ones.
        words = [*dropwhile(re.compile(r"\w+=").match, part)] if left_out else part
        match words:
            case ["cd", folder]:
                folder += "/"
            case ["make", "html"]:
                pass
            case ["python", "-m", module, *args]:
                file = f"{folder}{module.replace('.', '/')}.py"
                yield Command(folder, file, (*words[1:],), (*args,), left_out)
            case ["python", file, *args] if file.endswith(".py"):
                yield Command(folder, f"{folder}{file}", (*words[1:],), (*args,), left_out)
            case _:
                raise ForkError(f"{commit}: its test plan has a command of no known form: {line}")


@dataclass(frozen=True)
class Plan:
    """What a commit is tested with; suites as in `files.py`, below test/."""

    upstream: dict[str, tuple[str, ...]]
    own: dict[str, tuple[str, ...]]
    scripts: tuple[Command, ...] = ()

    @classmethod
    def of(cls, stack: Stack, commit: Commit) -> Self:
        """What its test plan names, and the test files that it adds or changes.

        The lab's suites too, at the tip and if it changes what they see.
        """
        tree = stack.tree(commit.number)
        named = [c for c in commands(commit) if not c.left_out]
        scripts = tuple(c for c in named if c.is_script)
        suites: dict[str, tuple[str, ...]] = {}
        changed = (*commit.files, *commit.removes)
        registers = any(p.startswith(REGISTERS) and not p.startswith(KERNELS) for p in changed)
        if NATIVE in tree and (registers or commit is stack.commits[-1]):
            suites |= LAB
        for path in changed:
            file = target_of(path) or path
            is_test = file.startswith(TEST) and file.endswith(".py")
            if is_test and (path in tree or file != path):
                suites.setdefault(file.removeprefix(TEST), ())
        for script in scripts:
            suites.pop(script.file.removeprefix(TEST), None)
        ops = operators(stack.root / NATIVE)
        for command in named:
            if not command.is_script:
                name = command.file.removeprefix(TEST)
                suites[name] = (*suites.get(name, ()), *walks(commit, command, ops))
        is_own = {name: any(fnmatchcase(name, p) for p in own_patterns(ops)) for name in suites}
        # Each test is named once, though the table may have one that the test plan has too.
        known = {
            name: tuple(dict.fromkeys([*SUITES.get(name, ()), *walks]))
            for name, walks in suites.items()
            if not is_own[name]
        }
        return cls(known, {n: () for n in sorted(suites) if is_own[n]}, scripts)

    def __bool__(self) -> bool:
        return bool(self.upstream or self.own or self.scripts)


def walks(commit: Commit, command: Command, ops: list[str]) -> tuple[str, ...]:
    """Which tests a command selects beside those of the operators, as in `files.py`."""
    match command.args:
        case ():
            return ("*",)
        case ("-k", op) if op in ops:
            return ()
        case (test,) if re.fullmatch(r"\w+(\.\w+)?", test):
            return (test if "." in test else f"{test}.*",)
    raise ForkError(f"{commit}: its test plan selects tests in no known way: {command}")


def problems(stack: Stack) -> list[str]:
    """Finds commands of no known form in the test plans, and files that are not there."""
    found = []
    for commit in stack.commits:
        try:
            Plan.of(stack, commit)
            tree = stack.tree(commit.number)
            for command in commands(commit):
                suite = command.file.removeprefix(TEST)
                if command.file not in tree and suite not in SUITES:
                    where = "in the stack up to there, nor in fork/suites/files.py"
                    found.append(f"{commit}: its test plan names {command.file}, not {where}")
        except ForkError as e:
            found.append(str(e))
    return found
