"""Runs upstream's linters and Sphinx on the stack's commits."""

from collections.abc import Callable
from pathlib import Path

from fork import paths
from fork.bootstrap import make_venv
from fork.console import console, step
from fork.overlay import Stack, Upstream, copy_pristine
from fork.series import documentation, linters
from fork.series.branch import commits
from fork.series.git import Git
from fork.series.linters import LEFT_OUT, Lint, added_lines


def review(stack: Stack, tree: Path | None, branch: str, pristine: Callable[[], Path]) -> bool:
    """Returns True if upstream's linters and Sphinx report nothing; prints what they report.

    The linters look at each commit, Sphinx at the pages of the tip. The commits are made in the
    checkout `tree`; by default in a copy of the source that `pristine` returns.
    """
    folder, venv = paths.BUILD / "review", paths.BUILD / "venv-review"
    tree = tree or folder / "pytorch"
    with paths.alone(folder.name):
        if not tree.exists():
            copy_pristine(Upstream(pristine()), tree)
        # All that is needed is there before the checkout changes.
        wanted = folder / "requirements.txt"
        tools = [*linters.requirements(tree), *documentation.requirements(tree)]
        wanted.write_text("\n".join(tools) + "\n", encoding="utf-8")
        make_venv(venv, wanted)
        base, made = commits(stack, tree, branch)
        git, remarks = Git(tree), 0
        pairs = zip(stack.commits, [base.commit, *made], made, strict=False)
        try:
            for commit, before, name in pairs:
                git("checkout", "--quiet", "--detach", name)
                with step(commit.folder.name) as doing:
                    found = linters.lint(tree, base.commit, before, venv, folder / "lintrunner.log")
                    doing.done = f"{len(found)} remarks"
                remarks += _say(found)
        finally:
            git("checkout", "--quiet", branch)
        with step("documentation") as doing:
            added = added_lines(git, base.commit)
            found = documentation.lint(tree, added, venv, folder / "documentation")
            doing.done = f"{len(found)} remarks"
        remarks += _say(found)
    console.print(f"{remarks} remarks; not run: {', '.join(sorted(LEFT_OUT))}")
    return not remarks


def _say(found: list[Lint]) -> int:
    for lint in found:
        console.print(f"  {lint}")
    return len(found)
