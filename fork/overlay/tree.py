"""The stack put onto a copy of PyTorch or a source tree: all of it or nothing."""

import os
import shutil
from pathlib import Path

from fork import paths
from fork.errors import ForkError
from fork.overlay.edit import resolve
from fork.overlay.stack import Stack
from fork.overlay.upstream import Upstream


def make_tree(stack: Stack, number: int, directory: Path, upstream: Upstream) -> list[str]:
    """A copy of `upstream` with commits 1 to `number` in the new folder `directory`."""
    resolve(stack.tree(number), upstream)  # an error comes before the copy
    copy_pristine(upstream, directory)
    return apply(stack, directory, number)


def copy_pristine(upstream: Upstream, into: Path) -> None:
    """A copy of the upstream folder `into`, which must not exist."""
    if upstream.root.suffix == ".whl":
        raise ForkError(f"{upstream.root}: unpack the wheel first (`python -m wheel unpack`)")
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise ForkError(f"{into}: is there already; name a new folder")
    if into.resolve().is_relative_to(upstream.root.resolve()):
        raise ForkError(f"{into}: lies inside the upstream that it is a copy of")
    with paths.atomically(into) as partial:
        ignore = shutil.ignore_patterns(".git", "__pycache__")
        shutil.copytree(upstream.root, partial, symlinks=True, ignore=ignore)


def write(files: dict[str, bytes], root: Path) -> list[str]:
    """Writes all of `files` below `root`, or nothing: new files lie ready before any moves."""
    staged: list[tuple[Path, Path]] = []
    try:
        for path, content in files.items():
            place = root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            new = place.with_name(f".{place.name}.new")
            staged.append((new, place))
            new.write_bytes(content)
            if place.exists():
                shutil.copymode(place, new)
        for new, place in staged:
            os.replace(new, place)
    except OSError as e:
        raise ForkError(f"{root}: cannot be written: {e}") from None
    finally:
        for new, _ in staged:
            new.unlink(missing_ok=True)
    return sorted(files)


def apply(stack: Stack, root: Path, number: int | None = None) -> list[str]:
    """Puts commits 1 to `number` onto the pristine tree at `root`; [] if they are there already."""
    upstream = Upstream(root)
    written = resolve(stack.tree(number), upstream).written
    return write({upstream.place(path): content for path, content in written.items()}, root)
