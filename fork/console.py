"""What the user sees of a long run: a line per step with its seconds, and errors in one line."""

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fork.errors import ForkError, cause

console = Console(highlight=False, markup=False, soft_wrap=True)
SILENCE = 30.0  # seconds without a line, at most, of a step whose output goes to a log
# A line that Ninja prints for a step: steps done, steps in all, and what it makes.
NINJA = re.compile(r"\[(\d+)/(\d+)\] .*?([^/ ]+)$")


def print_wide(renderable: RenderableType) -> None:
    """Prints without breaking a line, even where the width is unknown, as in a log."""
    wide = max(console.width, 120)
    Console(width=wide, highlight=False, markup=False, soft_wrap=True).print(renderable)


def new_table(title: str, **kwargs) -> Table:
    """Makes a narrow table, so that a row fits in a terminal."""
    return Table(title=title, title_justify="left", box=SIMPLE, padding=0, **kwargs)


class Step:
    """A running step; `done` becomes its closing words, `tell` shows how far it is."""

    def __init__(self, progress: Progress, title: str):
        self._progress = progress
        self._title = title
        self._task = progress.add_task(title, total=None)
        self.done = ""

    def tell(self, text: str = "", *, done: int | None = None, total: int | None = None) -> None:
        """Shows `text` behind the title, and the share that is `done`; what isn't named stays."""
        words = {"description": f"{self._title}: {text}"} if text else {}
        self._progress.update(self._task, completed=done, total=total, **words)


@contextmanager
def _reports(progress: Progress) -> Iterator[None]:
    """Prints a line every SILENCE seconds while the block runs: how far the step is."""
    start, ended = time.monotonic(), threading.Event()

    def report() -> None:
        while not ended.wait(SILENCE):
            for task in progress.tasks:
                share = "" if task.total is None else f"{task.percentage:.0f}%, "
                about = f" ({share}{time.monotonic() - start:.0f} s)"
                console.print(Text.assemble(f"  {task.description}", (about, "dim")))

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def step(title: str) -> Iterator[Step]:
    """Shows `title` and the time while the block runs, and a line with its seconds when it ends.

    A terminal shows a line that changes. A log gets a plain line every SILENCE seconds instead, so
    that a reader sees that the step goes on.
    """
    start = time.monotonic()
    columns = (
        *(SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=20)),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
    )
    # What is printed while the block runs appears above the line.
    settings = {"console": console, "transient": True, "disable": not console.is_terminal}
    with Progress(*columns, **settings) as progress:
        running = Step(progress, title)
        try:
            with nullcontext() if console.is_terminal else _reports(progress):
                yield running
        except BaseException:
            progress.stop()
            console.print(Text.assemble(("x", "red"), f" {title}"))
            raise
    words = f" {title}: {running.done}" if running.done else f" {title}"
    seconds = f" ({time.monotonic() - start:.1f} s)"
    console.print(Text.assemble(("+", "green"), words, (seconds, "dim")))


class NinjaSteps:
    """Counts Ninja's steps in the lines of its output, and tells how far it is."""

    def __init__(self, doing: Step):
        self.doing = doing
        self.done = self._before = 0

    def go_on(self) -> None:
        """Counts the steps of a further run of Ninja after those that are done."""
        self._before = self.done

    def __call__(self, line: str) -> None:
        if found := NINJA.match(line.strip()):
            self.done, total = (self._before + int(n) for n in found.groups()[:2])
            self.doing.tell(f"{self.done} of {total}: {found[3]}", done=self.done, total=total)

    def __str__(self) -> str:
        return f"{self.done} steps" if self.done else "nothing to do"


def stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:  # unshare waits for its child instead
        process.kill()


def output(command: Sequence[str], package: str, wrong: str = "", **kwargs) -> bytes:
    """Returns what `command` prints; `package` has it, should it be missing.

    Raises ForkError: `wrong`, by default the command's name, then its own reason.
    """
    try:
        done = subprocess.run(command, capture_output=True, **kwargs)
    except FileNotFoundError:
        raise ForkError(f"{command[0]}: not found: install the package {package}") from None
    if done.returncode:
        why = cause(done.stderr.decode(errors="replace")) or f"exit {done.returncode}"
        raise ForkError(f"{wrong or command[0]}: {why}")
    return done.stdout


def run(
    command: list, log: Path, wrong: str, *, line: Callable[[str], None] | None = None, **kwargs
) -> None:
    """Runs `command` with its output in the file `log`; `line` sees each line as it comes.

    Raises ForkError: `wrong`, then the line of the output that says why, and where the log is.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            log.open("w", encoding="utf-8", buffering=1) as out,
            subprocess.Popen(
                [str(c) for c in command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                **kwargs,
            ) as process,
        ):
            try:
                for text in process.stdout:
                    out.write(text)
                    if line is not None:
                        line(text)
            except BaseException:
                stop(process)
                raise
    except OSError as e:
        raise ForkError(f"{wrong}: {e}") from None
    if process.returncode:
        why = (
            cause(log.read_text(errors="replace", encoding="utf-8"))
            or f"exit status {process.returncode}"
        )
        raise ForkError(f"{wrong}: {why} (all of it: {log})")
