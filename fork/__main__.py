"""The commands: `python -m fork --help`."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
from rich.table import Table

from fork import base as bases
from fork import (
    cuda,
    documentation,
    gpu,
    review,
    sanitizers,
    source,
    source_build,
    suites,
    torchbind,
)
from fork.absorb import absorb
from fork.bootstrap import make_venv
from fork.branch import commits, export
from fork.console import console, print_wide, step
from fork.errors import ForkError
from fork.git import Git
from fork.graft import NATIVE, Graft
from fork.install import install
from fork.overlay import EDIT, resolve
from fork.stack import BUILT, Commit, Stack, apply, copy_pristine, files_under
from fork.upstream import Upstream

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
CACHE = BUILD / "bases"
ANCHORS = BUILD / "anchors"
VENV = ROOT / ".venv"


class Group(click.Group):
    """Turns a ForkError, a full disk and Ctrl-C into one line and an exit status."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (ForkError, OSError) as e:
            console.print(f"error: {e}", markup=False)
            sys.exit(1)
        except KeyboardInterrupt:
            console.print("stopped; run it again to go on")
            sys.exit(130)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Carries torch.attn on top of PyTorch: checks and applies the stack, grafts it on a wheel."""


def upstreams_at_hand() -> list[Upstream]:
    """Every pristine PyTorch there is: bases, wheels, source trees, the installed torch."""
    places = [p.parent for p in sorted(CACHE.glob(f"*/{bases.UNPACKED}"))]
    unpacked = {p.name for p in places}
    places += [p for p in sorted(CACHE.glob("*.whl")) if p.stem not in unpacked]
    places += sorted(ANCHORS.glob("*.whl"))
    places += [p.parent for p in sorted((BUILD / "source").glob("*/version.txt"))]
    for entry in map(Path, sys.path):
        if (entry / "torch" / "version.py").is_file() and "attn" not in (
            entry / "torch" / "version.py"
        ).read_text():
            places.append(entry)
            break
    return sorted(map(Upstream, places), key=lambda u: u.release)


@main.command()
@click.option(
    "--upstream",
    "paths",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="A further PyTorch to resolve against: a source tree, an unpacked wheel or a .whl file.",
)
@click.option(
    "--fetch", is_flag=True, help="First download a small wheel of every supported release."
)
def check(paths: tuple[Path, ...], fetch: bool) -> None:
    """Check the stack's rules, and that it resolves against every PyTorch at hand.

    At hand are the bases and sources below build/, the installed torch if it is pristine, and
    what --upstream names. Every commit is resolved; every anchor must match exactly one line.
    """
    stack = Stack(ROOT)
    if problems := stack.problems():
        report(problems)  # a tree with files missing cannot be resolved
    console.print(f"{len(stack.commits)} commits, {len(stack.tree())} files: sound")
    if fetch:
        bases.fetch_anchors(ANCHORS)
    upstreams = upstreams_at_hand() + [Upstream(p) for p in paths]
    for upstream in upstreams:
        found: dict[str, str] = {}  # what does not fit -> the first commit that has it
        for commit in stack.commits:
            try:
                resolve(stack.tree(commit.number), upstream)
            except ForkError as e:
                found.setdefault(str(e), str(commit))
        console.print(
            f"{upstream}: {'all anchors match' if not found else 'does not fit'}", markup=False
        )
        problems += [f"{commit}: {what}" for what, commit in found.items()]
    if not upstreams:
        console.print("no PyTorch at hand to resolve against: name one with --upstream")
    report(problems)


def report(problems: list[str]) -> None:
    """Prints each problem once and exits with status 1; does nothing if there is none."""
    for problem in dict.fromkeys(problems):
        console.print(f"error: {problem}", markup=False)
    if problems:
        sys.exit(1)


@main.command()
def stack() -> None:
    """Print the series: a line per commit."""
    series = Stack(ROOT)
    table = Table(box=None, pad_edge=False)
    for title, justify in (
        ("commit", "left"),
        ("title", "left"),
        ("files", "right"),
        ("lines added", "right"),
        ("xfails held", "right"),
        ("paid", "right"),
    ):
        table.add_column(title, justify=justify)
    for commit in series.commits:
        before, after = series.debts(commit.number - 1), series.debts(commit.number)
        table.add_row(
            commit.folder.name,
            commit.title,
            str(len(commit.files) + len(commit.removes)),
            str(series.lines_added(commit)),
            str(after.total()),
            str((before - after).total()),
        )
    print_wide(table)


@main.command()
@click.argument("number", type=int)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--upstream",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The pristine PyTorch to copy: a source tree or an unpacked wheel.",
)
def tree(number: int, directory: Path, upstream: Path) -> None:
    """Write upstream plus commits 1 to NUMBER into the new folder DIRECTORY."""
    written = make_tree(number, directory, upstream)
    console.print(f"{directory}: {len(written)} files changed or added", markup=False)


def make_tree(number: int, directory: Path, upstream: Path) -> list[str]:
    """A copy of `upstream` with commits 1 to `number` in the new folder `directory`."""
    series = Stack(ROOT)
    resolve(series.tree(number), Upstream(upstream))  # an error comes before the copy
    copy_pristine(Upstream(upstream), directory)
    return apply(series, directory, number)


@main.command("apply")
@click.argument("tree", type=click.Path(exists=True, file_okay=False, path_type=Path))
def apply_command(tree: Path) -> None:
    """Put the tip of the stack onto the PyTorch source TREE: all of it or nothing.

    A tree that has it already is left as it is.
    """
    written = apply(Stack(ROOT), tree)
    if written:
        console.print(f"{tree}: {len(written)} files changed or added", markup=False)
    else:
        console.print(f"{tree}: has the stack already; nothing to do", markup=False)


_upstream = partial(
    click.option,
    "--upstream",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    envvar="UPSTREAM",
)
CHECKOUT = click.argument(
    "tree", type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path)
)
BRANCH = click.option(
    "--branch", default="attn", show_default=True, help="The branch that the commits are on."
)


@main.command("commits")
@CHECKOUT
@BRANCH
def commits_command(tree: Path, branch: str) -> None:
    """Make the stack real commits of the checkout TREE, on a branch, and check that out.

    They stand on the commit that is checked out. A source tree without git becomes a checkout. The
    same stack on the same commit has the same hashes.
    """
    series = Stack(ROOT)
    upstream, made = commits(series, tree, branch)
    for commit, name in zip(series.commits, made, strict=True):
        console.print(f"{name[:12]} {commit.subject(len(made))}", markup=False)
    console.print(f"branch {branch}: {len(made)} commits on {upstream}", markup=False)


@main.command("export")
@click.argument("directory", type=click.Path(path_type=Path))
@_upstream(help="The pristine source tree to make them for.  [default: Debian 13's source package]")
def export_command(directory: Path, upstream: Path | None) -> None:
    """Write the stack as patches for `git am`, and their list, into DIRECTORY."""
    made = export(Stack(ROOT), Upstream(upstream or source_tree()), directory)
    console.print(f"{directory}: {len(made)} patches", markup=False)


@main.command("absorb")
@CHECKOUT
def absorb_command(tree: Path) -> None:
    """Take what was changed in the stack's commits in the checkout TREE back into this clone.

    Amend a commit, or rebase (git rebase -i), then run this: files, edits and messages follow.
    """
    changed = absorb(Stack(ROOT), tree)
    for path in changed:
        console.print(path, markup=False)
    console.print(f"{len(changed)} files changed" if changed else "nothing to absorb")


@main.command("source")
@_upstream(
    help="A checkout of PyTorch to build with your own tools.  [default: Debian 13's source]"
)
@click.option(
    "--python",
    default="python3",
    show_default=True,
    help="What builds a checkout: has what its requirements.txt names.",
)
@BRANCH
def source_command(upstream: Path | None, python: str, branch: str) -> None:
    """Build PyTorch whole, with the stack on it, and run the lab's suites there (`make source`).

    It goes on where an earlier run stopped. Without --upstream, Debian's source package is built in
    a Debian of its own below build/, for which it wants to be run by root.
    """
    folder = BUILD / "from-source"
    with alone(folder.name):  # for hours
        if upstream is None:
            place = source_build.debian(folder, BUILD / "source")
        else:
            place = source_build.checkout(upstream, python, folder / "logs")
        cost = source_build.build(place, Stack(ROOT), branch)
        source_build.check(place)
        results = source_build.test(place)
    print_wide(suites.table(results[: len(suites.LAB)], results[len(suites.LAB) :]))
    print_wide(source_build.table(cost))
    finish(results)


@contextmanager
def _remarks(title: str, found: list[review.Lint]) -> Iterator[list[review.Lint]]:
    here: list[review.Lint] = []
    with step(title) as doing:
        yield here
        doing.done = f"{len(here)} remarks"
    for lint in here:
        console.print(f"  {lint}", markup=False)
    found += here


@main.command("review")
@_upstream(
    help="A checkout of PyTorch to make the commits in.  [default: a copy of Debian 13's source]"
)
@BRANCH
def review_command(upstream: Path | None, branch: str) -> None:
    """Run upstream's own linters on what each commit adds, and its Sphinx on the tip's pages.

    In a checkout, in which the commits are made. Docstrings are those of the torch.attn installed.
    """
    folder, venv = BUILD / "review", BUILD / "venv-review"
    tree = upstream or folder / "pytorch"
    with alone(folder.name):
        if not tree.exists():
            copy_pristine(Upstream(source_tree()), tree)
        series = Stack(ROOT)
        base, made = commits(series, tree, branch)
        wanted = folder / "requirements.txt"
        tools = [*review.requirements(tree), *documentation.requirements(tree)]
        wanted.write_text("\n".join(tools) + "\n")
        make_venv(venv, wanted)
        git, found = Git(tree), []
        for commit, before, name in zip(series.commits, [base.commit, *made], made, strict=False):
            log = folder / "lintrunner.log"
            git("checkout", "--quiet", "--detach", name)
            with _remarks(commit.folder.name, found) as here:
                here += review.lint(tree, base.commit, before, venv, log)
        git("checkout", "--quiet", branch)
        added = review.added_lines(git, base.commit)
        with _remarks("documentation", found) as here:
            here += documentation.lint(tree, added, venv, folder / "documentation")
    console.print(f"{len(found)} remarks; not run: {', '.join(sorted(review.LEFT_OUT))}")
    sys.exit(1 if found else 0)


def _base(default):
    return click.option(
        "--base",
        "release",
        default=default,
        show_default=True,
        envvar="ATTN_BASE",
        help="Release of torch to graft onto, the path of its wheel, or `installed`.",
    )


BASE = _base(bases.default_release())


def _graft_options(command):
    return click.option("--commit", type=int, help="Graft commits 1 to this one.  [default: all]")(
        BASE(command)
    )


@main.command("graft")
@_graft_options
@click.option("--compress", is_flag=True, help="Deflate the wheel: smaller, but slower to make.")
def graft_command(release: str, commit: int | None, compress: bool) -> None:
    """Build a wheel of torch that has the operator."""
    with alone():
        wheel = Graft(Stack(ROOT), bases.get(release, CACHE), commit).build(compress)
    console.print(wheel, markup=False)


@contextmanager
def alone(*within: str) -> Iterator[None]:
    """Holds the lock of build/ or of a folder in it: the second of two runs waits for the first."""
    folder = BUILD.joinpath(*within)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("  waiting for another run in this clone")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def graft_into(venv: Path, release: str, commit: int | None) -> Graft:
    """Grafts `commit` onto `release` and installs the wheel in the virtual environment `venv`."""
    with alone():
        graft = Graft(Stack(ROOT), bases.get(release, CACHE), commit)
        install(graft.build(), graft.fingerprint, venv)
    return graft


@main.command("install")
@_graft_options
@click.option("--example", is_flag=True, help="Then run the lab's example.")
def install_command(release: str, commit: int | None, example: bool) -> None:
    """Graft, and install the wheel in .venv (`make attn`)."""
    graft = graft_into(VENV, release, commit)
    if example and NATIVE not in graft.tree:
        console.print(f"commit {commit} has no operator yet, so there is no example to run")
    elif example:
        sys.exit(
            subprocess.run([VENV / "bin" / "python", "-m", "fork.example"], cwd=ROOT).returncode
        )


@main.command("test")
@BASE
def test_command(release: str) -> None:
    """Run the fork's tests, the operator's tests on the tip, and the checks (`make test`)."""
    graft_into(VENV, release, None)
    python = VENV / "bin" / "python"
    env = suites.environment() | {"ATTN_BASE": release}  # whose wheel the fork's tests look at
    failed = []
    for command in (
        [python, "-m", "pytest", "-q", "fork/tests"],
        *([python, f"test/{name}"] for name in suites.own(ROOT)),
        [python, "-m", "fork", "check"],
    ):
        words = " ".join(["python", *map(str, command[1:])])
        console.rule(words)
        if subprocess.run(command, cwd=ROOT, env=env).returncode:
            failed.append(words)
    console.rule()
    for words in failed:
        console.print(f"failed: {words}", markup=False)
    sys.exit(1 if failed else 0)


@main.command("test-sanitizers")
def test_sanitizers() -> None:
    """Run the operator's tests with sanitizers in its library (`make test-sanitizers`).

    AddressSanitizer and UndefinedBehaviorSanitizer, once for each set of instructions that the
    machine has kernels for. The environment is .venv, but for the library.
    """
    runtime = sanitizers.runtime()
    graft = graft_into(VENV, bases.default_release(), None)
    with alone():
        library = graft.build_sanitized()
    logs, python = BUILD / "sanitizers", VENV / "bin" / "python"
    site = logs / "site-packages"
    sanitizers.link_site(next(VENV.glob("lib/python3*/site-packages")), library, site)
    variables = sanitizers.environment(runtime, site)
    env = suites.environment() | variables
    results = []
    for capability in sanitizers.capabilities(
        python, library, logs / "probe.log", env=env, cwd=ROOT / "test"
    ):
        console.rule(f"ATEN_CPU_CAPABILITY={capability}", align="left")
        ran = suites.run(
            python,
            ROOT,
            sanitizers.chosen(suites.own(ROOT)),
            log_dir=logs / capability,
            variables=variables | {"ATEN_CPU_CAPABILITY": capability},
        )
        for line in suites.all_failures(ran):
            console.print(line)
        results += ran
    console.rule()
    finish(results)


def finish(results: list[suites.Result], status: int = 0) -> None:
    """Prints how many tests passed and failed, and exits, with `status` if none failed."""
    counts = suites.tally(results)
    passed = counts["passed"] + counts["xfailed"]
    console.print(f"{passed} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    sys.exit(status if all(r.ok for r in results) else 1)


SUITES_UPSTREAM = _upstream(
    help="A source tree of the release to test on.  [default: Debian 13's source package]"
)


@main.command("test-upstream")
@click.option("--commit", type=int, help="Test commits 1 to this one.  [default: all]")
@SUITES_UPSTREAM
@click.option("--suite", "only", multiple=True, help="Run this suite only; may be repeated.")
def test_upstream(commit: int | None, upstream: Path | None, only: tuple[str, ...]) -> None:
    """Run PyTorch's own suites for attn, with the overlay applied (`make test-upstream`)."""
    series = Stack(ROOT)
    chosen = series.commits[-1] if commit is None else series.commit(commit)
    wanted = {name: suites.SUITES.get(name, ()) for name in only} or suites.SUITES
    results, own = run_commit(chosen, *suites_place(upstream), wanted, with_own=not only)
    print_wide(suites.table(results, own))
    if not results:
        console.print(f"{chosen} has no operator yet: none of upstream's tests is ours")
    finish(results + own)


@main.command("test-stack")
@SUITES_UPSTREAM
def test_stack(upstream: Path | None) -> None:
    """Run the lab's suites on each commit of the stack by itself (`make test-stack`).

    A commit that went well is not run again until something that it is made of changes.
    """
    place = suites_place(upstream)
    rows: list[suites.Row] = []
    for commit in Stack(ROOT).commits:
        console.rule(f"{commit.folder.name}: {commit.title}", align="left")
        stamp = BUILD / "stack" / f"{commit.folder.name}.json"
        key = stack_key(commit, place[0])
        row = suites.Row.read(stamp, key)
        if row is not None:
            console.print("  tested already")
        else:
            try:
                results, own = run_commit(commit, *place, suites.LAB, keep_wheel=False)
                row = suites.Row.of(commit.folder.name, results, own)
                for line in suites.all_failures(results + own):
                    console.print(line)
            except ForkError as e:  # the commits after it may be sound
                row = suites.Row(commit.folder.name, error=str(e))
                console.print(f"error: {e}", markup=False)
            if row.ok:
                row.write(stamp, key)
        rows.append(row)
    print_wide(suites.stack_table(rows))
    sys.exit(0 if all(row.ok for row in rows) else 1)


def suites_place(upstream: Path | None) -> tuple[Path, Path]:
    """The pristine source tree that upstream's suites are in, and the environment they run in."""
    release = bases.suites_release()
    upstream = upstream or source_tree()
    found = Upstream(upstream)
    if str(found.release) != release:
        raise ForkError(f"{upstream}: is {found}; the suites run on torch {release}'s wheel")
    venv = BUILD / f"venv-{release}"
    make_venv(venv, ROOT / "fork" / "suites-requirements.txt")
    return upstream, venv


def source_tree() -> Path:
    """The pristine source of PyTorch that Debian has."""
    with step(f"source of PyTorch {source.RELEASE}"):
        return source.fetch(BUILD / "source")


def run_commit(
    commit: Commit,
    upstream: Path,
    venv: Path,
    wanted: Mapping[str, Sequence[str]],
    *,
    with_own: bool = True,
    keep_wheel: bool = True,
) -> tuple[list[suites.Result], list[suites.Result]]:
    """The results of upstream's suites and of the operator's own tests on commits 1 to `commit`.

    Before the commit that adds the operator none of upstream's tests is ours, so none is run.
    """
    release = bases.suites_release()
    directory = BUILD / "trees" / f"{release}-{commit.folder.name}"
    with step(f"source tree with commits 1 to {commit.number}"):
        shutil.rmtree(directory, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        make_tree(commit.number, directory, upstream)
    if NATIVE not in Stack(ROOT).tree(commit.number):
        wanted = {}
    own = suites.own(directory) if with_own else {}
    if not wanted and not own:
        return [], []
    graft = graft_into(venv, release, commit.number)
    if not keep_wheel:  # it is in, and a wheel for each commit fills a disk
        shutil.rmtree(graft.dir / "wheel")
    if "test_fx.py" in wanted:
        torchbind.install(graft.base, directory, venv, BUILD / "torchbind")
    log_dir = BUILD / "suites" / directory.name
    ran = suites.run(venv / "bin" / "python", directory, {**wanted, **own}, log_dir=log_dir)
    results = ran[: len(wanted)]
    if results and not any(r.ran for r in results):
        raise ForkError("none of the tests is of the operator: upstream did not see its OpInfo")
    return results, ran[len(wanted) :]


def stack_key(commit: Commit, upstream: Path) -> str:
    """A hash of what the commit's tests depend on: its files, the graft, the runner."""
    base = bases.get(bases.suites_release(), CACHE)
    graft = Graft(Stack(ROOT), base, commit.number)
    runner = [ROOT / "fork" / name for name in ("suites.py", "suites-requirements.txt")]
    files = [*(file for _, file in sorted(graft.tree.items())), *runner]
    digest = hashlib.sha256(f"{graft.fingerprint} {upstream}".encode())
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


# The options that a command doesn't have are the benchmark's.
_passes_on = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_publish = click.option(
    "--publish", is_flag=True, help="Keep the results in fork/results, for the README."
)
_args = click.argument("args", nargs=-1, type=click.UNPROCESSED)


@main.command("bench", context_settings=_passes_on)
@_publish
@_args
def bench_command(publish: bool, args: tuple[str, ...]) -> None:
    """Measure the operator's speed (`make bench`); ARGS are those of benchmarks/attn/bench.py."""
    venv = BUILD / "venv-bench"
    make_venv(venv, ROOT / "fork" / "bench-requirements.txt")
    graft_into(venv, bases.default_release(), None)
    sys.exit(measure(venv, BUILD / "bench", "cpu", publish, args))


def measure(venv: Path, out: Path, device: str, publish: bool, args: Sequence[str]) -> int:
    """Runs the benchmark with its results in `out`; its exit status."""
    # -E: PYTHONPATH could bring in another torch.
    python = [venv / "bin" / "python", "-E"]
    command = [*python, ROOT / "benchmarks/attn/bench.py", "--out", out, "--device", device]
    status = subprocess.run([*command, *args], cwd=ROOT).returncode
    if publish and not status:
        kept = ROOT / "fork" / "results"
        kept.mkdir(exist_ok=True)
        for file in sorted(out.glob(f"{device}*")):
            shutil.copy2(file, kept)
        console.print(f"{kept.relative_to(ROOT)}: kept for the README")
    return status


@main.command("cuda-check")
def cuda_check() -> None:
    """Compile and link the kernels for CUDA, for each GPU architecture (`make cuda-check`).

    It needs an nvcc, but no GPU: the base is PyPI's default release. A kernel that spills registers
    is an error, as is a symbol that no library has.
    """
    with alone():
        graft = Graft(Stack(ROOT), bases.get(bases.default_release(), CACHE / "cuda", of_pypi=True))
        found = graft.make_kernels()
        sweeps = sorted({kernel.sweep for kernel in found})
        sizes = cuda.shared_memory(graft.nvcc, sweeps, ROOT / "aten/src", graft.dir)
    print_wide(cuda.table(found, dict(zip(sweeps, sizes, strict=True))))
    report(cuda.problems(found, graft.nvcc.architectures))
    names = {kernel.name for kernel in found}
    console.print(f"{len(names)} kernels for {len(graft.nvcc.architectures)} architectures: linked")


@main.command("bench-gpu", context_settings=_passes_on)
@_base("installed")
@click.option("--sanitize", is_flag=True, help="Run compute-sanitizer on the kernels instead.")
@_publish
@_args
def bench_gpu(release: str, sanitize: bool, publish: bool, args: tuple[str, ...]) -> None:
    """Build, test and measure the operator on this machine's GPU (`make bench-gpu`).

    Planned for eight minutes. ARGS are those of benchmarks/attn/bench.py, which measures even if a
    test fails. Results are in build/bench-gpu.
    """
    start = time.monotonic()
    if not gpu.devices():
        raise ForkError("no GPU: NVIDIA's driver is missing, or shows none")
    program = gpu.sanitizer() if sanitize else ""
    with alone():
        Graft(Stack(ROOT), bases.get(release, CACHE)).check_kernels()
    graft_into(VENV, release, None)
    out, python = BUILD / "bench-gpu", VENV / "bin" / "python"
    gpu.check(python, out / "check.log")
    if sanitize:
        gpu.sanitize(program, python, ROOT, out / "sanitizer", suites.environment())
        return
    results = suites.run(
        python,
        ROOT,
        gpu.chosen(suites.own(ROOT)),
        log_dir=out / "tests",
        timeout=gpu.LIMIT,
        variables=gpu.ONLY_CUDA,
    )
    print_wide(suites.table((), results))
    time_left = ("--minutes", str(gpu.minutes_left(start)))  # unless ARGS say
    status = measure(VENV, out, "cuda", publish, (*time_left, *args))
    console.print(f"{(time.monotonic() - start) / 60:.1f} minutes in all")
    finish(results, status)


@main.command()
@click.option("--fix", is_flag=True, help="Mend what can be mended.")
def lint(fix: bool) -> None:
    """Check the form of all files: ruff, clang-format, yamllint."""
    tools = Path(sys.executable).parent
    ruff, clang_format, yamllint = (tools / t for t in ("ruff", "clang-format", "yamllint"))
    ours = files_under(ROOT, skip=BUILT)
    # Edits are fragments of upstream's files, and keep their indentation there.
    whole = [f for f in ours if not EDIT.match(f.rpartition("/")[2])]
    python = [f for f in whole if f.endswith(".py")]
    theirs = ("benchmarks/", "stack/", "test/", "tools/", "torch/")  # PyTorch's width
    upstreams = [f for f in python if f.startswith(theirs)]
    cpp = [f for f in whole if f.endswith((".cpp", ".cu", ".cuh", ".h", ".hpp"))]
    dry = [] if fix else ["--check"]
    commands = (
        [ruff, "check", *(["--fix"] if fix else []), *python],
        [ruff, "format", *dry, *sorted({*python} - {*upstreams})],
        [ruff, "format", *dry, "--line-length", "88", *upstreams],
        [clang_format, *(["-i"] if fix else ["--dry-run", "--Werror"]), *cpp],
        [yamllint, "--strict", *(f for f in ours if f.endswith(".yaml"))],
    )
    failed = [c for c in commands if subprocess.run(c, cwd=ROOT).returncode]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(prog_name="python -m fork")
