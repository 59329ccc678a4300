"""The commands: `python -m fork --help`."""

import sys
from importlib import import_module
from pathlib import Path

try:
    import click

    from fork import graft, options, overlay, paths, series, source, suites
    from fork.commands import Group, report
    from fork.console import console, print_wide
    from fork.overlay import Stack, Upstream, default_release
    from fork.project import PROJECT
except ImportError as e:  # not the Python of .venv
    sys.exit(f"error: {sys.executable}: {e}: `make` sets up one that has all: .venv/bin/python")


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Carries an operator on top of PyTorch: the stack, its graft onto a wheel, tests, speed.

    `python -m fork COMMAND --help` says more of each.
    """


def check_commit(context: click.Context, option: click.Option, number: int | None) -> int | None:
    """Refuses a commit that the stack does not have before a command begins."""
    return None if number is None else Stack(paths.ROOT).commit(number).number


BASE = options.base_option(type=graft.graftable, default=default_release())
COMMIT = options.commit_option(
    callback=check_commit, help="Graft commits 1 to this one.  [default: all]"
)
TEST_COMMITS = options.commit_option(
    callback=check_commit, help="Test commits 1 to this one.  [default: all]"
)


@main.command(section="Build", example="--example --base 2.6.0 --commit 4")
@BASE
@COMMIT
@click.option("--example", is_flag=True, help="Then run example.py.")
def install(base: str, commit: int | None, example: bool) -> None:
    """Graft, and install the wheel in .venv (the Makefile's first target)."""
    made = graft.graft_into(paths.VENV, base, commit)
    if example:
        sys.exit(graft.run_example(made, paths.VENV))


@main.command("graft", section="Build", example="--compress")
@BASE
@COMMIT
@click.option("--compress", is_flag=True, help="Deflate the wheel: smaller, but slower to make.")
def graft_command(base: str, commit: int | None, compress: bool) -> None:
    """Build a wheel of torch that has the operator."""
    with paths.alone():
        wheel = graft.open_graft(base, commit).build(compress)
    console.print(wheel)


@main.command("source", section="Build", example="--upstream ~/pytorch")
@options.upstream_option(
    help="A checkout of PyTorch to build with your own tools.  [default: Debian 13's source]"
)
@click.option(
    "--python",
    default="python3",
    show_default=True,
    help="What builds a checkout: has what its requirements.txt names.",
)
@options.BRANCH
@click.option("--configure", is_flag=True, help="Stop before it compiles: minutes, not hours.")
def source_command(upstream: Path | None, python: str, branch: str, configure: bool) -> None:
    """Build PyTorch whole, with the stack on it, and run the lab's suites there (`make source`).

    It goes on where an earlier run stopped. Without --upstream, Debian's source package is built in
    a Debian of its own below build/, for which it wants to be run by root.
    """
    place = source.checkout(upstream, python) if upstream else None
    with paths.alone("from-source"):  # for hours
        place = source.configured(place, branch)
        if configure:
            return
        cost = source.build_whole(place)
        results, own = suites.run_on_build(place)
    print_wide(suites.table(results, own))
    print_wide(source.table(cost))
    sys.exit(suites.finish(results + own))


@main.command(section="Test", example="--long --base installed")
@BASE
@click.option("--long", is_flag=True, help="With every float and the largest cases.")
@click.option(
    *("--only", "parts"),
    multiple=True,
    type=click.Choice(suites.PARTS),
    help="Run this part only; may be repeated.",
)
def test(base: str, long: bool, parts: tuple[str, ...]) -> None:
    """Run the fork's tests, the operator's tests on the tip, and the checks (`make test`)."""
    failed = suites.run_own(base, long, parts or suites.PARTS)
    report([f"failed: {what}" for what in failed])


@main.command("test-upstream", section="Test", example="--commit 3 --suite test_ops.py")
@TEST_COMMITS
@options.SUITES_UPSTREAM
@click.option("--suite", "only", multiple=True, help="Run this suite only; may be repeated.")
def test_upstream(commit: int | None, upstream: Path | None, only: tuple[str, ...]) -> None:
    """Run PyTorch's own suites for the operators in a tree with them (`make test-upstream`)."""
    results = suites.run_upstream(commit, upstream, only)
    print_wide(suites.table(results))
    sys.exit(suites.finish(results))


@main.command("test-stack", section="Test", example="--minutes 20")
@options.SUITES_UPSTREAM
@click.option("--minutes", type=float, help="Begin no commit that takes longer than is left.")
def test_stack(upstream: Path | None, minutes: float | None) -> None:
    """Build and test each commit of the stack by itself (`make test-stack`).

    What passed is kept in stack/results.json, and not run again until something changes.
    """
    sys.exit(suites.finish_record(*suites.run_stack(upstream, minutes)))


@main.command("test-releases", section="Test", example="--base 2.9.1 --minutes 30")
@options.base_option(type=click.Choice(suites.SUPPORTED), metavar=None, help="This release alone.")
@click.option("--minutes", type=float, help="Begin no release that takes longer than is left.")
def test_releases(base: str | None, minutes: float | None) -> None:
    """Graft and test each release that the fork supports, one by one (`make test-releases`).

    What passed is kept in stack/releases.json, and not run again until something changes. What was
    downloaded for a release is removed after it.
    """
    sys.exit(suites.finish_record(*suites.run_releases(base, minutes)))


@main.command("test-sanitizers", section="Test")
def test_sanitizers() -> None:
    """Run the operator's tests with sanitizers in its library (`make test-sanitizers`).

    AddressSanitizer and UndefinedBehaviorSanitizer, once for each set of instructions that the
    machine has kernels for. The environment is .venv, but for the library.
    """
    sys.exit(suites.finish(suites.run_sanitized(default_release())))


@main.command("test-arm64", section="Test")
def test_arm64() -> None:
    """Run the operator's tests on 64-bit ARM, which QEMU emulates (`make test-arm64`).

    The tip is compiled by a cross compiler. Needed are some of Debian's packages, which are named
    if they are missing, and not root.
    """
    results = suites.run_arm64()
    print_wide(suites.table((), results))
    sys.exit(suites.finish(results))


@main.command(section="Test", example="--fix")
@click.option("--fix", is_flag=True, help="Put into form what a tool can change.")
def lint(fix: bool) -> None:
    """Check the form of all files: ruff, clang-format, mdformat, yamllint (`make lint`)."""
    sys.exit(0 if series.lint(paths.ROOT, fix) else 1)


@main.command(section="Stack")
def stack() -> None:
    """Print the stack: a line per commit."""
    print_wide(series.table(Stack(paths.ROOT)))


@main.command(section="Stack", example="log_cosh '(Tensor self) -> Tensor' --into ~/log_cosh")
@click.argument("name")
@click.argument("schema")
@click.option(
    "--into", type=options.NEW, help="A new folder for the commit, which gets the machinery too."
)
def new(name: str, schema: str, into: Path | None) -> None:
    """Write the skeleton of a commit that adds the operator NAME with that SCHEMA.

    It grafts at once. What is left to do in it says TODO, and a test fails for it. What is left to
    do in the versions that earlier commits keep is printed too.
    """
    target = into or paths.ROOT
    written = overlay.new(paths.ROOT, name, schema, into)
    series.put_in_form(target, [*written, "README.md"] if into else written)
    for path in written:
        console.print(path)
    for line in Stack(target).unfinished():
        if line.startswith("stack/"):
            console.print(f"note: {line}")


@main.command(section="Stack", example="--fetch --upstream ~/pytorch")
@click.option(
    *("--upstream", "others"),
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="A further PyTorch to resolve against: a source tree, an unpacked wheel or a .whl file.",
)
@click.option("--fetch", is_flag=True, help="First download a small wheel of each release.")
def check(others: tuple[Path, ...], fetch: bool) -> None:
    """Check the stack's rules, and that it resolves against every PyTorch at hand.

    At hand are the bases and sources below build/, and what --upstream names. Every commit is
    resolved; every anchor must match exactly one line, and PyTorch must have what the tip's Python
    files import from it.
    """
    stack = Stack(paths.ROOT)
    report(overlay.check(stack, fetch=fetch, others=others) + suites.problems(stack))


@main.command(section="Stack", example="4 /tmp/pytorch-4 --upstream ~/pytorch")
@click.argument("number", type=click.IntRange(min=1))
@click.argument("directory", type=options.NEW)
@options.upstream_option(
    required=True, help="The pristine PyTorch to copy: a source tree or an unpacked wheel."
)
def tree(number: int, directory: Path, upstream: Path) -> None:
    """Write upstream plus commits 1 to NUMBER into the new folder DIRECTORY."""
    written = overlay.make_tree(Stack(paths.ROOT), number, directory, Upstream(upstream))
    console.print(f"{directory}: {len(written)} files changed or added")


@main.command(section="Stack", example="~/pytorch")
@options.CHECKOUT
def apply(tree: Path) -> None:
    """Put the tip of the stack onto the PyTorch source TREE: all of it or nothing.

    A tree that has it already is left as it is.
    """
    written = overlay.apply(Stack(paths.ROOT), tree)
    what = f"{len(written)} files changed or added" if written else "has the stack already"
    console.print(f"{tree}: {what}")


@main.command(section="Stack", example=f"~/pytorch --branch {PROJECT}")
@options.CHECKOUT
@options.BRANCH
def commits(tree: Path, branch: str) -> None:
    """Make the stack real commits of the checkout TREE, on a branch, and check that out.

    They stand on the commit that is checked out. A source tree without git becomes a checkout. The
    same stack on the same commit has the same hashes.
    """
    stack = Stack(paths.ROOT)
    base, made = series.commits(stack, tree, branch)
    for commit, name in zip(stack.commits, made, strict=True):
        console.print(f"{name[:12]} {commit.subject(len(made))}")
    console.print(f"branch {branch}: {len(made)} commits on {base}")


@main.command(section="Stack", example="~/pytorch")
@options.CHECKOUT
def absorb(tree: Path) -> None:
    """Take what was changed in the stack's commits in the checkout TREE back into this clone.

    Amend a commit, or rebase (git rebase -i), then run this: files, edits and messages follow.
    """
    changed = series.absorb(Stack(paths.ROOT), tree)
    for path in changed:
        console.print(path)
    console.print(f"{len(changed)} files changed" if changed else "nothing to absorb")


@main.command(section="Stack", example="patches")
@click.argument("directory", type=options.NEW)
@options.upstream_option(
    help="The pristine source tree to make them for.  [default: Debian 13's source package]"
)
def export(directory: Path, upstream: Path | None) -> None:
    """Write the stack as patches for `git am`, and their list, into DIRECTORY."""
    pristine = Upstream(upstream or source.pristine())
    made = series.export(Stack(paths.ROOT), pristine, directory)
    console.print(f"{directory}: {len(made)} patches")


@main.command(section="Stack", example="--upstream ~/pytorch")
@options.upstream_option(
    help="A checkout of PyTorch to make the commits in.  [default: a copy of Debian 13's source]"
)
@options.BRANCH
def review(upstream: Path | None, branch: str) -> None:
    """Run upstream's own linters on what each commit adds, and its Sphinx on the tip's pages.

    In a checkout, in which the commits are made. Docstrings are those of .venv's torch.
    """
    clean = series.review(Stack(paths.ROOT), upstream, branch, source.pristine)
    sys.exit(0 if clean else 1)


# A project's own commands are in the folder commands/ beside this one, which `new` does not copy.
for file in sorted(paths.ROOT.glob("commands/[!_]*.py")):
    for command in vars(import_module(f"commands.{file.stem}")).values():
        if isinstance(command, click.Command):
            main.add_command(command)


if __name__ == "__main__":
    # What the user's encoding lacks is printed as a question mark.
    sys.stdout.reconfigure(errors="replace")
    main(prog_name="python -m fork")
