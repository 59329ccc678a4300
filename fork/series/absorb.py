"""What was changed in a branch's commits, taken back into the overlay."""

import re
import tempfile
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path

from fork.errors import ForkError
from fork.overlay import (
    MARK,
    TRAILER,
    Commit,
    Edit,
    Stack,
    blank_lines,
    files_under,
    resolve,
    target_of,
    write,
)
from fork.series.branch import refuse_unfinished
from fork.series.found import Found, series_of
from fork.series.git import Git, Revision

# How a file's comments begin, and end, for the marks of an edit that is new.
COMMENTS = {
    **dict.fromkeys((".py", ".pyi", ".yaml", ".yml", ".bzl", ".txt", ".toml", ".in"), ("# ", "")),
    **dict.fromkeys((".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".mm"), ("// ", "")),
    ".rst": (".. ", ""),
    ".md": ("<!-- ", " -->"),
}

Texts = dict[str, str]  # path -> text


def absorb(stack: Stack, tree: Path) -> list[str]:
    """Makes the overlay say what the stack's commits in the checkout `tree` say.

    Files, edits of upstream's files and messages. Returns the paths that were written or removed.
    Before anything is written, the new overlay is resolved again, and must give the branch's trees.
    """
    git = Git(tree)
    base, series = series_of(git, "HEAD")
    refuse_unfinished(git)
    upstream = Revision(git, base)
    known = {commit.name: commit for commit in stack.commits}
    before: Texts = {}
    commits, overlays, wanted = [], [], []
    for number, found in enumerate(series, 1):
        folder = Path(f"{number:02}-{_name(found, known, commits)}")
        title, body, trailers = found.parse()
        commit = known.get(found.name, Commit(number, folder, title, body, (), ()))
        wanted.append(found.changes(git, upstream))
        after = _overlay(stack, commit, before, upstream, wanted[-1])
        files = tuple(sorted(p for p in after if after[p] != before.get(p)))
        removes = tuple(sorted(set(before) - set(after)))
        commits.append(Commit(number, folder, title, body, files, removes, trailers))
        overlays.append(after)
        before = after
    if not commits:
        raise ForkError(f"{git.folder}: no commits of the stack: make them with `commits` first")
    with tempfile.TemporaryDirectory() as scratch:
        _lay_out(commits, overlays, Path(scratch))
        made = Stack(Path(scratch))
        if problems := made.problems():
            raise ForkError(f"{tree}: {problems[0]}")
        for commit, files in zip(made.commits, wanted, strict=True):
            written = resolve(made.tree(commit.number), upstream).written
            different = [p for p in sorted({*written, *files}) if written.get(p) != files.get(p)]
            if different:
                raise ForkError(
                    f"{tree}: {commit}: the overlay cannot say what becomes of {different[0]}"
                )
        return _take_over(Path(scratch), stack)


def _name(found: Found, known: Mapping[str, Commit], before: list[Commit]) -> str:
    """Returns the name of a commit's folder, without the number; a new one is made of the title."""
    words = re.sub(r"[^a-z0-9]+", "-", found.title.lower()).strip("-")
    name = found.name or words
    if found.name and name not in known:
        raise ForkError(f"{found}: the stack has no commit {found.folder}")
    if any(commit.name == name for commit in before):
        raise ForkError(
            f"{found}: two commits are called {name}: if one was split, only one part keeps the "
            f"line '{TRAILER}:'"
        )
    return name


def _overlay(
    stack: Stack, commit: Commit, before: Texts, upstream: Revision, wanted: dict[str, bytes]
) -> Texts:
    """Changes the overlay `before`, for `commit`, so that it gives the files `wanted`.

    Where the stack's own version of a file gives what is wanted, it is taken unchanged.
    """
    versions = {path: stack.file(commit, path).read_text(encoding="utf-8") for path in commit.files}
    overlay = {p: text for p, text in (before | versions).items() if p not in commit.removes}
    given = _resolve(overlay, upstream)
    for path in sorted({*wanted, *given}):
        if wanted.get(path) == given.get(path):
            continue
        text = None
        if path in wanted:
            try:
                text = wanted[path].decode()
            except UnicodeDecodeError:
                raise ForkError(
                    f"{upstream.root}: {path}: the overlay is text, not bytes"
                ) from None
        old = upstream.read(path)
        place, new = path, text
        if old is not None:
            place = edit_of(path)
            goal = old if text is None else text
            new = _known_edit(stack, place, old, goal, upstream) if goal != old else None
            new = new or edit_again(place, overlay.get(place, ""), old, goal, upstream)
        if new is None or (old is not None and not new):
            overlay.pop(place, None)
        else:
            overlay[place] = new
    return overlay


def _resolve(overlay: Texts, upstream: Revision) -> dict[str, bytes]:
    """Applies the overlay to upstream's files, and returns those that it changes."""
    with tempfile.TemporaryDirectory() as scratch:
        files = {path: Path(scratch, str(i)) for i, path in enumerate(overlay)}
        for path, file in files.items():
            file.write_text(overlay[path], encoding="utf-8")
        return resolve(files, upstream).written


def _known_edit(stack: Stack, place: str, old: str, new: str, upstream: Revision) -> str | None:
    """Returns the stack's version of an edit file that makes `new` of `old`, or None."""
    for commit in (c for c in stack.commits if place in c.files):
        text = stack.file(commit, place).read_text(encoding="utf-8")
        edit = Edit.parse(place, text)
        if edit.holds(upstream) and edit.apply(old, upstream) == new:
            return text
    return None


def edit_of(path: str) -> str:
    """Returns the path of the file that edits upstream's `path`."""
    file = Path(path)
    edit = file.with_name(f"{file.stem}.edit{file.suffix}").as_posix()
    if target_of(edit) != path:
        raise ForkError(f"{path}: its name has no ending, so it cannot have an edit file")
    return edit


def edit_again(path: str, text: str, old: str, new: str, upstream: Revision) -> str:
    """Changes `text`, the edit file `path`, so that it makes `new` of `old`.

    Blocks that don't hold for `upstream` stay as they are. Returns "" if no block is left.
    """
    lines, goal = old.splitlines(), new.splitlines()
    edit = Edit.parse(path, text) if text else None
    places = edit.places(lines, upstream) if edit and edit.holds(upstream) else []
    added = _between([start for _, start, _ in places], lines, goal)
    if added is None:
        added = _insertions(path, lines, goal)
    out = text.splitlines()
    blocks = {start: (block, blanks) for block, start, blanks in places}
    # It goes from the last block to the first: a change moves the lines after it.
    for start, (block, blanks) in sorted(blocks.items(), key=lambda b: -b[1][0].line):
        first = block.line + len(block.only)
        last = first + len(block.lines)
        now = added.get(start, [])
        now = now[: len(now) - min(blanks, blank_lines(now))]
        if now:
            out[first:last] = now
        else:
            while last < len(out) and not out[last].strip():
                last += 1
            del out[block.line - 1 : last]
    for start in sorted(set(added) - set(blocks)):
        if out and out[-1].strip():
            out.append("")
        out += _new_block(path, text, start, lines, added[start])
    return "\n".join(out).strip("\n") + "\n" if any(line.strip() for line in out) else ""


def _between(starts: list[int], lines: list[str], goal: list[str]) -> dict[int, list[str]] | None:
    """Returns what `goal` adds at each of `starts`; None if `lines` changed elsewhere too."""
    starts = sorted(starts)
    at = starts[0] if starts else 0
    if not starts or goal[:at] != lines[:at]:
        return None
    found: dict[int, list[str]] = {}
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        kept = lines[start:end]
        tries = range(at, len(goal) - len(kept) + 1)
        if end == len(lines):
            tries = tries[-1:]
        here = next((i for i in tries if goal[i : i + len(kept)] == kept), None)
        if here is None:
            return None
        found[start] = goal[at:here]
        at = here + len(kept)
    return found if at == len(goal) else None


def _insertions(path: str, lines: list[str], goal: list[str]) -> dict[int, list[str]]:
    """Returns what `goal` adds, by the number of the line that it is added before."""
    found = {}
    for kind, start, _, begin, stop in SequenceMatcher(None, lines, goal).get_opcodes():
        if kind == "insert":
            found[start] = goal[begin:stop]
        elif kind != "equal":
            raise ForkError(
                f"{target_of(path)}: upstream's line {start + 1} ({lines[start].strip()!r}) was "
                "changed; the overlay only adds lines"
            )
    return found


def _new_block(path: str, text: str, start: int, lines: list[str], added: list[str]) -> list[str]:
    mark = next((m for line in text.splitlines() if (m := MARK.match(line))), None)
    if mark:
        opens = mark[0][: mark.start("word")].rpartition("@@")[0]
        closes = mark[0][mark.end("rest") :]
    elif Path(path).suffix in COMMENTS:
        opens, closes = COMMENTS[Path(path).suffix]
    else:
        raise ForkError(f"{path}: no comments are known for this kind of file: write it by hand")

    def anchors(at: int) -> bool:
        anchor = lines[at].strip() if 0 <= at < len(lines) else ""
        hits = sum(line.lstrip().startswith(anchor) for line in lines)
        return bool(anchor) and " || " not in anchor and hits == 1

    if anchors(start - 1):
        return [f"{opens}@@ after: {lines[start - 1].strip()}{closes}", *added]
    if anchors(start):
        added = added[: len(added) - min(blank_lines(lines[:start]), blank_lines(added))]
        return [f"{opens}@@ before: {lines[start].strip()}{closes}", *added]
    raise ForkError(
        f"{target_of(path)}:{start + 1}: lines were added here, where neither neighbour is unique "
        f"in the file: write a block in {path} by hand"
    )


def _lay_out(commits: list[Commit], overlays: list[Texts], root: Path) -> None:
    """Writes the stack and the overlay below `root`, each version of a file where it belongs."""
    files: Texts = {}
    last = {path: commit for commit in commits for path in commit.files if path in overlays[-1]}
    for commit, overlay in zip(commits, overlays, strict=True):
        folder = f"stack/{commit.folder.name}"
        files[f"{folder}/commit.md"] = commit.text()
        for path in commit.files:
            files[path if last.get(path) is commit else f"{folder}/{path}"] = overlay[path]
    write({path: text.encode() for path, text in files.items()}, root)


def _take_over(made: Path, stack: Stack) -> list[str]:
    """Replaces the overlay and the stack of `stack`'s repository by those below `made`."""
    new = {path: (made / path).read_bytes() for path in files_under(made)}
    have = {*stack.overlay_files(), *(f"stack/{p}" for p in files_under(stack.root / "stack"))}
    keep = {f"stack/{name}" for name in ("README.md", "results.json", "releases.json")}
    gone = sorted(have - set(new) - keep)
    changed = {
        path: content
        for path, content in new.items()
        if path not in have or (stack.root / path).read_bytes() != content
    }
    write(changed, stack.root)
    for path in gone:
        (stack.root / path).unlink()
        for folder in (stack.root / path).parents:
            if any(folder.iterdir()):
                break
            folder.rmdir()
    return sorted([*changed, *gone])
