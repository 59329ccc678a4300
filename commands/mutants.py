"""Mutants: faults put into the operator, one at a time, each of which one test must notice."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import click
import yaml

from fork import paths
from fork.commands import Command
from fork.console import console, output, run, step
from fork.errors import ForkError
from fork.graft import graft_into
from fork.overlay import default_release, resolve, target_of, wheel_place
from fork.suites import environment, with_triton

TABLE = Path(__file__).with_suffix(".yaml")
CPU_FLAGS = Path("/proc/cpuinfo")
# A test that hangs has noticed. The longest takes a minute.
LIMIT = 600.0
LIBRARY = "libtorch.so"
# In a command that compiles: what it makes; of a kernel, its name and the set of instructions.
OBJECT = re.compile(r" -o (\S+\.o) -c ")
KERNEL = re.compile(r"(\w+)\.(\w+)\.cpp\.o$")
# Prints the best instruction set, and where torch is.
PROBE = """
import torch
print(torch.backends.cpu.get_cpu_capability().replace("NO AVX", "DEFAULT"), torch.__file__)
"""


class Mutant(NamedTuple):
    """A fault, and the test that notices it; the table says what each field is."""

    name: str
    file: str
    line: str
    becomes: str
    test: str
    compiled_by: str = "graft"
    kernel: str = "AttnKernel"
    needs: str = ""

    def text(self, root: Path) -> str:
        """Returns the file with the fault in it."""
        lines = (root / self.file).read_text(encoding="utf-8").splitlines(keepends=True)
        found = [i for i, line in enumerate(lines) if line.strip() == self.line]
        if len(found) != 1:
            raise ForkError(f"{self.name}: {len(found)} lines of {self.file} are `{self.line}`")
        lines[found[0]] = lines[found[0]].replace(self.line, self.becomes)
        return "".join(lines)


@click.command("test-mutants", cls=Command, section="Test", example="--only a-lost-hand-in")
@click.option("--only", multiple=True, help="This mutant alone; may be repeated.")
def test_mutants(only: tuple[str, ...]) -> None:
    """Put each fault of a table into the operator, and see a test fail (`make test-mutants`).

    The table is commands/mutants.yaml. Of the kernels, those for this machine's best set of
    instructions are compiled again. Exits with status 1 if a mutant survives.
    """
    mutants = chosen(read_table(), only)
    graft = graft_into(paths.VENV, default_release())
    with paths.alone("mutants"):
        sys.exit(run_all(mutants, Lab(paths.BUILD / "mutants", paths.VENV, graft)))


def read_table(file: Path = TABLE) -> list[Mutant]:
    return [Mutant(**entry) for entry in yaml.safe_load(file.read_text(encoding="utf-8"))]


def chosen(mutants: Sequence[Mutant], only: Sequence[str]) -> list[Mutant]:
    """Returns the mutants that `only` names, or all."""
    if unknown := {*only} - {mutant.name for mutant in mutants}:
        raise ForkError(f"no mutant is called {', '.join(sorted(unknown))}")
    return [mutant for mutant in mutants if not only or mutant.name in only]


def run_all(mutants: Sequence[Mutant], lab: "Lab") -> int:
    """Runs the tests without a fault, then with each; returns the exit status."""
    seen = [mutant for mutant in mutants if has(mutant.needs)]
    by_file = defaultdict(list)
    for mutant in seen:
        file, *_, name = shlex.split(mutant.test)
        by_file[file].append(name)
    for file, names in by_file.items():
        with step(f"{file} without a fault"):
            either = " or ".join(f"({name})" for name in dict.fromkeys(names))
            if lab.failed(f'{file} -k "{either}"', "none"):
                raise ForkError(f"{file} fails without a fault: {lab.log('none')}")
    survived = 0
    for mutant in mutants:
        start = time.monotonic()
        if mutant in seen:
            with lab.mutated(mutant):
                is_caught = lab.failed(mutant.test, mutant.name)
            survived += not is_caught
            verdict = "caught" if is_caught else "SURVIVED"
        else:
            verdict = f"not seen here, without {mutant.needs}"
        seconds = time.monotonic() - start
        console.print(f"{verdict:9} {mutant.name}: {mutant.test} ({seconds:.0f} s)")
    return int(survived > 0)


def has(flag: str) -> bool:
    """Returns whether the processor has what a mutant needs."""
    return not flag or flag in CPU_FLAGS.read_text(encoding="utf-8").split()


def status_of(command: Sequence, folder: Path, env: Mapping[str, str], log: Path) -> int | None:
    """A command's exit status, None if it ran too long; ends whatever it has started."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def shell(line: str, folder: Path, log: Path) -> None:
    """Runs a command of Ninja's in its folder."""
    run(["sh", "-c", line], log, "a mutant cannot be compiled", cwd=folder)


class Lab:
    """A copy of an environment's torch, in which files are exchanged."""

    def __init__(self, folder: Path, venv: Path, graft):
        self.folder, self.graft = folder, graft
        self.python = venv / "bin" / "python"
        self.installed = next(venv.glob("lib/python3*/site-packages"))
        self.site = folder / "site"
        shutil.rmtree(self.site, ignore_errors=True)
        # The copy is made of hard links. A file that is exchanged is removed first, so the
        # environment keeps its own.
        shutil.copytree(self.installed / "torch", self.site / "torch", copy_function=os.link)
        self.env = environment() | {"PYTHONPATH": str(self.site)}
        probe = output([self.python, "-c", PROBE], "torch", cwd=folder, env=self.env)
        self.capability, place = probe.decode().split()
        if Path(place).parent != self.site / "torch":
            raise ForkError(f"torch is that of {place}, not of {self.site}")

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def failed(self, test: str, name: str) -> bool:
        """Runs pytest with the arguments `test`; whether one fails, crashes or hangs."""
        command = [self.python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += shlex.split(test)
        found = with_triton([test.split()[0]]).values()
        places = [str(self.site), *(variables["PYTHONPATH"] for variables in found)]
        env = self.env | {"PYTHONPATH": os.pathsep.join(places)}
        status = status_of(command, paths.ROOT / "test", env, self.log(name))
        if status is not None and status > 1:  # nothing ran: no test has that name, say
            raise ForkError(f"{test}: pytest ends with status {status}: {self.log(name)}")
        return status != 0

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Has the fault in the copy of torch."""
        file = self.folder / "mutant" / Path(mutant.file).name
        file.parent.mkdir(exist_ok=True)
        file.write_text(mutant.text(paths.ROOT), encoding="utf-8")
        target = target_of(mutant.file) or mutant.file
        places = {}
        if (place := wheel_place(target)) is not None:
            written = resolve({mutant.file: file}, self.graft.base.upstream).written
            places[place] = written[target]
        if file.suffix in (".h", ".cpp") and mutant.compiled_by == "graft":
            library = self.build(mutant.file, file, mutant.kernel)
            places[f"torch/lib/{LIBRARY}"] = library.read_bytes()
        with self.exchanged(places):
            yield

    @contextmanager
    def exchanged(self, files: Mapping[str, bytes]) -> Iterator[None]:
        for place, content in files.items():
            (self.site / place).unlink()
            (self.site / place).write_bytes(content)
        try:
            yield
        finally:
            for place in files:
                (self.site / place).unlink()
                os.link(self.installed / place, self.site / place)

    def build(self, path: str, mutated: Path, kernel: str) -> Path:
        """Links the library anew, with the file `mutated` in place of the overlay's `path`.

        Of the kernels only that one is compiled, for the best set of instructions, by Ninja's own
        commands: so the graft's objects stay as they are.
        """
        cmake = self.graft.dir / "cmake"
        ninja = [self.python.with_name("ninja"), "-C", cmake, "-t"]
        *compilations, link = output([*ninja, "commands", LIBRARY], "ninja").decode().splitlines()
        place = wheel_place(path)
        original = str(self.graft.stage / place if place else paths.ROOT / path)
        if place:
            headers = self.folder / "include"
            shutil.rmtree(headers, ignore_errors=True)
            header = headers / Path(place).relative_to("torch/include")
            header.parent.mkdir(parents=True)
            shutil.copy(mutated, header)
        for line in compilations:
            object = found[1] if (found := OBJECT.search(line)) else ""
            is_kernel = KERNEL.search(object)
            if not found or is_kernel and is_kernel.groups() != (kernel, self.capability):
                continue
            if original not in output([*ninja, "deps", object], "ninja").decode().split():
                continue
            made = self.folder / Path(object).name
            # -O1 takes half as long, and no test looks at the speed.
            line = line.replace(f"-o {object} ", f"-O1 -w -o {made} ")
            if place:
                line = line.replace(" -I", f" -I{headers} -I", 1)
            line = line.replace(original, str(mutated))  # a source, or an edit of one
            shell(line, cmake, made.with_suffix(".log"))
            link = link.replace(object, str(made))
        library = self.folder / LIBRARY
        link = link.replace(f"-o {LIBRARY}", f"-o {library}")
        shell(link, cmake, library.with_suffix(".log"))
        return library
