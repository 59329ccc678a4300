"""Whether the stack keeps its rules, and fits every PyTorch that is at hand."""

from collections.abc import Iterable
from pathlib import Path

from fork import paths
from fork.console import console
from fork.errors import ForkError
from fork.overlay.edit import resolve, target_of
from fork.overlay.imports import missing_imports
from fork.overlay.releases import fetch_anchors
from fork.overlay.stack import Stack
from fork.overlay.upstream import UNPACKED, Upstream
from fork.project import PROJECT


def at_hand() -> list[Upstream]:
    """Returns every pristine PyTorch below build/: wheels and source trees."""
    places = [p.parent for p in sorted(paths.BASES.glob(f"*/{UNPACKED}"))]
    unpacked = {p.name for p in places}
    places += [p for p in sorted(paths.BASES.glob("*.whl")) if p.stem not in unpacked]
    places += sorted(paths.ANCHORS.glob("*.whl"))
    places += [p.parent for p in sorted(paths.SOURCES.glob("*/version.txt"))]
    return sorted(map(Upstream, places), key=lambda u: u.release)


def check(stack: Stack, *, fetch: bool = False, others: Iterable[Path] = ()) -> list[str]:
    """Finds what is wrong with the stack: its rules, and how it fits each PyTorch at hand.

    With `fetch` a small wheel of every supported release is downloaded first; `others` are further
    PyTorches. Prints a line for each. A stack that breaks the rules is not resolved.
    """
    if problems := stack.problems():
        return problems  # without these files no tree can be made
    console.print(f"{len(stack.commits)} commits, {len(stack.tree())} files: sound")
    named = [*map(Upstream, others)]  # what is wrong with one is said before a download
    if fetch:
        fetch_anchors(paths.ANCHORS)
    upstreams = [*at_hand(), *named]
    edited = [target for path in stack.tree() if (target := target_of(path))]
    for upstream in upstreams:
        found: dict[str, str] = {}  # what does not fit -> the first commit in which it doesn't
        for commit in stack.commits:
            try:
                resolve(stack.tree(commit.number), upstream)
            except ForkError as e:
                found.setdefault(str(e), str(commit))
        lacking = sum(upstream.place(target) is None for target in edited)
        untried = f"; {lacking} of {len(edited)} edited files are in no wheel" if lacking else ""
        wrong = [f"{commit}: {what}" for what, commit in found.items()]
        wrong = wrong or missing_imports(stack.tree(), upstream)
        fits = "does not fit" if wrong else "all anchors match"
        console.print(f"{upstream}: {fits}{untried}")
        problems += wrong
    if not upstreams:
        how = f"`make {PROJECT}` gets one, --upstream names one"
        console.print(f"no PyTorch at hand to resolve against: {how}")
    return problems
