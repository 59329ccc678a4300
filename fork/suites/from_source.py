"""The lab's suites and the operator's own tests on a torch that was built from source."""

from collections.abc import Mapping
from pathlib import Path

from fork import paths
from fork.console import run, step
from fork.errors import ForkError
from fork.overlay import NATIVE, operators
from fork.source import Place
from fork.suites.files import LAB, own_files
from fork.suites.results import Result
from fork.suites.run import environment, run_suites

IMPORT = "import torch; print(torch.__file__); print(torch.__version__, {})"


def run_on_build(place: Place) -> tuple[list[Result], list[Result]]:
    """The results of the lab's suites and of the operator's own files: that build, that tree."""
    # Bytecode may be written into a tree that was built in; and it may be a Debian's own.
    variables = {**place.variables, "PYTHONPYCACHEPREFIX": ""}
    check(place, variables)
    wanted, logs = {**LAB, **own_files(place.tree)}, place.logs / "suites"
    ran = run_suites(place.python, place.tree, wanted, log_dir=logs, variables=variables)
    return ran[: len(LAB)], ran[len(LAB) :]


def check(place: Place, variables: Mapping[str, str]) -> None:
    """Raises ForkError unless Python, elsewhere than in the tree, finds the operators in it."""
    said: list[str] = []
    ops = ", ".join(f"torch.ops.aten.{op}" for op in operators(paths.ROOT / NATIVE))
    with step("import torch") as doing:
        env = environment() | {**variables}
        about = {"cwd": place.tree / "test", "env": env, "line": said.append}
        command = [place.python, "-c", IMPORT.format(ops)]
        run(command, place.logs / "import.log", f"torch does not have {ops}", **about)
        file, doing.done = said[-2].strip(), said[-1].strip()
        if not Path(file).is_relative_to(place.tree.resolve()):
            raise ForkError(f"{place.python} imports {file}, not the torch of {place.tree}")
