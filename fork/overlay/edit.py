"""The overlay: whole files and anchored edits, resolved against a pristine upstream.

An edit file `NAME.edit.EXT` holds the lines to add to upstream's `NAME.EXT`, in that file's own
language. Comments starting with `@@` say where each block goes:

    # @@ before: ANCHOR        the block goes before the one line that starts with ANCHOR
    # @@ after: A || B         after the line that starts with A, or with B in releases without A
    # @@ only: torch>=2.8      right below: this block only in these releases; or `source`, `wheel`:
                               only there. Before any block: all of the file
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from fork.errors import ForkError
from fork.overlay.upstream import Upstream

MARK = re.compile(
    r"^\s*(?:\#|//|\.\.|<!--|%)\s*@@\s*(?P<word>[\w-]+):?\s*(?P<rest>.*?)\s*(?:-->)?\s*$"
)
EDIT = re.compile(r"^(?P<stem>.+)\.edit(?P<suffix>\.[^./]+)$")


def target_of(path: str) -> str | None:
    """Returns the upstream file that an edit file's path names; None for a whole file."""
    folder, _, name = path.rpartition("/")
    found = EDIT.match(name)
    if not found:
        return None
    return (
        f"{folder}/{found['stem']}{found['suffix']}" if folder else found["stem"] + found["suffix"]
    )


def is_edit(path: str) -> bool:
    return target_of(path) is not None


def is_source(path: str) -> bool:
    """Returns True for C++ or CUDA of PyTorch's libraries: not, say, of a benchmark."""
    return path.endswith((".cpp", ".cu")) and path.startswith(("aten/", "torch/"))


def only(text: str, where: str) -> str | SpecifierSet:
    """Parses where an edit or a block holds: the kind of an upstream, or a range of releases."""
    if text in ("source", "wheel"):
        return text
    if text.startswith("torch"):
        with suppress(InvalidSpecifier):
            return SpecifierSet(text.removeprefix("torch"))
    raise ForkError(f"{where}: '@@ only: {text}' is neither 'source', 'wheel' nor 'torch>=X.Y'")


@dataclass
class Held:
    """An edit, or a block of one, that can be limited to some upstreams: see `only`."""

    only: list[str | SpecifierSet] = field(default_factory=list, kw_only=True)

    def holds(self, upstream: Upstream) -> bool:
        return all(
            o == upstream.kind
            if isinstance(o, str)
            else o.contains(upstream.release, prereleases=True)
            for o in self.only
        )


@dataclass
class Block(Held):
    """Lines to add at one place of one file."""

    side: str  # "before" or "after"
    anchors: tuple[str, ...]
    line: int  # of the mark in the edit file
    lines: list[str] = field(default_factory=list)


@dataclass
class Edit(Held):
    """A parsed edit file."""

    path: str
    blocks: list[Block] = field(default_factory=list)

    @classmethod
    def parse(cls, path: str, text: str) -> Edit:
        edit = cls(path)
        for number, line in enumerate(text.splitlines(), 1):
            where = f"{path}:{number}"
            mark = MARK.match(line)
            if mark is None:
                if edit.blocks:
                    edit.blocks[-1].lines.append(line)
                elif line.strip():
                    raise ForkError(f"{where}: text before the first '@@ before:' or '@@ after:'")
                continue
            word, rest = mark["word"], mark["rest"]
            if word not in ("before", "after", "only"):
                raise ForkError(f"{where}: unknown mark '@@ {word}'; known: before, after, only")
            if not rest:
                raise ForkError(f"{where}: '@@ {word}:' says nothing")
            if word != "only":
                anchors = tuple(a.strip() for a in rest.split(" || "))
                edit.blocks.append(Block(word, anchors, number))
            elif edit.blocks and edit.blocks[-1].lines:
                raise ForkError(f"{where}: '@@ only:' must stand right under its block's mark")
            else:
                (edit.blocks or [edit])[-1].only.append(only(rest, where))
        if not edit.blocks:
            raise ForkError(f"{path}: an edit file without any '@@ before:' or '@@ after:'")
        for block in edit.blocks:
            while block.lines and not block.lines[-1].strip():
                block.lines.pop()
            if not block.lines:
                raise ForkError(f"{path}:{block.line}: a block that adds nothing")
        return edit

    def code(self, upstream: Upstream) -> str:
        """Returns what the edit adds for this upstream, without the marks: a generator's input."""
        held = [b for b in self.blocks if b.holds(upstream)] if self.holds(upstream) else []
        return "".join("\n".join(b.lines) + "\n" for b in held)

    def places(self, lines: list[str], upstream: Upstream) -> list[tuple[Block, int, int]]:
        """Finds where each block that holds for `upstream` goes in its file's `lines`.

        A block, the line before which it goes, and how many blank lines follow it.
        """
        found: list[tuple[Block, int, int]] = []
        for block in self.blocks:
            if not block.holds(upstream):
                continue
            at = self._find(block, lines, upstream)
            if block.side == "after":
                found.append((block, at + 1, 0))
            else:  # an anchor that opens a paragraph makes the block before it one of its own
                found.append((block, at, blank_lines(lines[:at])))
        return found

    def apply(self, text: str, upstream: Upstream) -> str | None:
        """Returns `text` with each block in its place; None if all of them already stand there."""
        lines = text.splitlines(keepends=True)
        end = "\r\n" if lines[:1] and lines[0].endswith("\r\n") else "\n"
        inserts: list[tuple[int, list[str]]] = []
        present = 0
        for block, start, blanks in self.places(lines, upstream):
            new = [line + end for line in [*block.lines, *[""] * blanks]]
            stands = lines[start - len(new) : start], lines[start : start + len(new)]
            if new == stands[0 if block.side == "before" else 1]:
                present += 1
                continue
            if any(start == other for other, _ in inserts):
                raise ForkError(
                    f"{self.path}:{block.line}: a second block at one place; make it one"
                )
            inserts.append((start, new))
        if present and inserts:
            raise ForkError(f"{self.path}: {upstream} holds a part of this edit already")
        if present:
            return None
        for start, new in sorted(inserts, reverse=True):  # from the end, so that places stay right
            if start and not lines[start - 1].endswith("\n"):
                lines[start - 1] += end
            lines[start:start] = new
        return "".join(lines)

    def _find(self, block: Block, lines: list[str], upstream: Upstream) -> int:
        counts = []
        for anchor in block.anchors:
            hits = [i for i, line in enumerate(lines) if line.lstrip().startswith(anchor)]
            if len(hits) == 1:
                return hits[0]
            counts.append(f"'{anchor}' starts {len(hits)} lines")
            if hits:
                break
        raise ForkError(
            f"{self.path}:{block.line}: {' and '.join(counts)} of {target_of(self.path)} "
            f"in {upstream}; an anchor must start exactly one"
        )


def blank_lines(lines: list[str]) -> int:
    """How many there are at the end of `lines`."""
    return next((n for n, line in enumerate(reversed(lines)) if line.strip()), len(lines))


@dataclass
class Resolved:
    """An overlay worked out against one upstream, before anything is written."""

    written: dict[str, bytes]  # source path -> new content
    present: list[str]  # overlay files that upstream holds already


def resolve(tree: dict[str, Path], upstream: Upstream) -> Resolved:
    """Returns each file that `tree` (overlay path -> file) changes or adds in `upstream`.

    Raises ForkError naming the edit file, the anchor and the release if anything does not fit.
    """
    out = Resolved({}, [])
    for path, file in sorted(tree.items()):
        target = target_of(path)
        if upstream.place(target or path) is None:
            continue  # a wheel has no tests, documentation or C++ sources
        if target is None:
            old, new = upstream.read(path), file.read_text(encoding="utf-8")
            if old is not None and old.replace("\r\n", "\n") == new:
                out.present.append(path)
            elif old is not None:
                raise ForkError(
                    f"{path}: {upstream} has this file; to change it, write an edit file"
                )
            else:
                out.written[path] = new.encode()
            continue
        edit = Edit.parse(path, file.read_text(encoding="utf-8"))
        if not edit.holds(upstream):
            continue
        old = upstream.read(target)
        if old is None:
            raise ForkError(f"{path}: {upstream} has no {target}; if that is right, say '@@ only:'")
        new = edit.apply(old, upstream)
        if new is None:
            out.present.append(path)
        elif new != old:
            out.written[target] = new.encode()
    if out.present and out.written:
        raise ForkError(
            f"{upstream} is half patched: it holds {out.present[0]} already, "
            f"but not what belongs in {next(iter(out.written))}"
        )
    return out
