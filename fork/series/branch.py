"""The stack as real commits: a branch of a checkout, and patches for `git am`."""

import tempfile
from collections.abc import Iterator, Set
from pathlib import Path

from fork.errors import ForkError
from fork.overlay import Stack, Upstream, resolve
from fork.paths import atomically
from fork.project import PROJECT
from fork.series.found import Found, series_of
from fork.series.git import Git, Revision

# The author and the dates are always the same, so that the hashes are.
EMAIL = f"torch-{PROJECT}@example.invalid"
IDENTITY = f"torch.{PROJECT} <{EMAIL}>"
EPOCH = 1767225600  # 2026-01-01, in UTC; each commit is a minute after the one before it
PENDING = "refs/fork/pending"  # holds the new commits until the branch does
SERIES = "series"
# These options keep out of a patch what differs between versions of git.
FORMAT = ("--keep-subject", "--zero-commit", "--full-index", "--no-signature", "--no-stat")


def write_commits(git: Git, stack: Stack, upstream: Upstream, base: str | None) -> list[str]:
    """Makes the stack's commits on top of `base`, whose files `upstream` has; their hashes.

    Without a base, on top of a commit that has only the files that the stack edits. The
    working tree and the branches stay as they are; PENDING is the last one.
    """
    stream = b"".join(_stream(stack, upstream, base))
    # A run that was killed may have left PENDING behind: --force overwrites it.
    marks = git("fast-import", "--quiet", "--force", "--cat-blob-fd=1", stdin=stream)
    return marks.split()


def _stream(stack: Stack, upstream: Upstream, base: str | None) -> Iterator[bytes]:
    """Yields the stack in the form that `git fast-import` reads."""
    trees = _trees(stack, upstream)
    before: dict[str, bytes] = {}
    if base is None:
        touched = sorted(set().union(*trees))
        pristine = {p: old.encode() for p in touched if (old := upstream.read(p)) is not None}
        yield _commit(0, f"PyTorch {upstream.version}: the files that the stack edits\n")
        yield from (_file(upstream, path, content) for path, content in pristine.items())
    for commit, after in zip(stack.commits, trees, strict=True):
        yield _commit(commit.number, commit.message(len(stack.commits)))
        if commit.number == 1 and base is not None:
            yield f"from {base}\n".encode()
        for path in sorted(before | after):
            old = upstream.read(path)
            if path in after and after[path] != before.get(path):
                yield _file(upstream if old is not None else None, path, after[path])
            elif path not in after and old is not None:
                yield _file(upstream, path, old.encode())
            elif path not in after:
                yield f"D {path}\n".encode()
        yield f"\nget-mark :{commit.number}\n".encode()
        before = after


def _trees(stack: Stack, upstream: Upstream) -> list[dict[str, bytes]]:
    """Returns for each commit the files that differ from upstream's."""
    if present := resolve(stack.tree(), upstream).present:
        raise ForkError(f"{upstream}: not pristine: it holds {present[0]} already")
    return [resolve(stack.tree(commit.number), upstream).written for commit in stack.commits]


def _commit(number: int, message: str) -> bytes:
    who = f"{IDENTITY} {EPOCH + 60 * number} +0000"
    text = message.encode()
    head = f"commit {PENDING}\nmark :{number or 999}\nauthor {who}\ncommitter {who}\n"
    return f"{head}data {len(text)}\n".encode() + text


def _file(upstream: Upstream | None, path: str, content: bytes) -> bytes:
    mode = upstream.mode(path) if upstream is not None else "100644"
    return f"M {mode} inline {path}\ndata {len(content)}\n".encode() + content + b"\n"


def commits(stack: Stack, tree: Path, branch: str) -> tuple[Revision, list[str]]:
    """Puts the stack on the branch `branch` of the checkout `tree`, and checks it out.

    A source tree without git becomes a checkout first. Returns what the stack stands on, and the
    hashes. On any error, branch and working tree are as they were.
    """
    git = Git(tree)
    if not (tree / ".git").exists() or git.commit("HEAD") is None:
        upstream = Upstream(tree)
        edited = set().union(*_trees(stack, upstream))  # an error comes before git does
        _make_checkout(git, upstream, edited)
    refuse_unfinished(git)
    base, _ = series_of(git, "HEAD")
    _refuse_edited(git, stack, branch, base)
    upstream = Revision(git, base)
    try:
        made = write_commits(git, stack, upstream, base)
        _refuse_untracked(git, made[-1])
        git("checkout", "--quiet", "-B", branch, made[-1])
    finally:
        if git.commit(PENDING):
            git("update-ref", "-d", PENDING)
    return upstream, made


def _make_checkout(git: Git, upstream: Upstream, edited: Set[str]) -> None:
    git("init", "--quiet", "--initial-branch=main")
    add = ("-c", "core.autocrlf=false", "-c", "core.excludesFile=", "add")
    git(*add, "--all")
    # Upstream has files that its own .gitignore names: --force adds these too.
    git(*add, "--force", "--", *sorted(p for p in edited if upstream.read(p) is not None))
    head = _commit(0, f"PyTorch {upstream.version}, from a source tree without git\n")
    root = git("write-tree")
    git("fast-import", "--quiet", "--force", stdin=head + f"M 040000 {root} \n".encode())
    git("update-ref", "HEAD", PENDING)


def refuse_unfinished(git: Git) -> None:
    """Refuses a checkout with changes that no commit has."""
    for state in ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD"):
        if (git.folder / git("rev-parse", "--git-path", state)).exists():
            raise ForkError(f"{git.folder}: in the middle of a rebase, merge or pick: finish it")
    changed = git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    if changed:
        first = changed.splitlines()[0].split(maxsplit=1)[1]
        raise ForkError(f"{git.folder}: has changes without a commit, in {first}")


def _refuse_edited(git: Git, stack: Stack, branch: str, base: str) -> None:
    """Refuses a branch that holds somebody's work which the stack does not have."""
    tip = git.commit(f"refs/heads/{branch}")
    if tip is None or tip == base:
        return
    begin, ours = series_of(git, tip)
    if not ours:
        raise ForkError(
            f"{git.folder}: the branch {branch} is not the stack's: name another with --branch"
        )
    edited = [commit for commit in ours if commit.committer != EMAIL]
    if edited and not _says(stack, git, begin, ours):
        raise ForkError(
            f"{git.folder}: {edited[0]} of {branch} was changed there: take that over first "
            "(`python -m fork absorb`), or delete the branch"
        )


def _says(stack: Stack, git: Git, base: str, series: list[Found]) -> bool:
    """Returns True if the stack's commits on `base` have the messages and trees of `series`."""
    try:
        upstream = Revision(git, base)
        trees = _trees(stack, upstream)
        return len(trees) == len(series) and all(
            found.parse() == (commit.title, commit.body, commit.trailers)
            and found.changes(git, upstream) == tree
            for commit, tree, found in zip(stack.commits, trees, series, strict=True)
        )
    except ForkError:  # the stack does not fit that base, or a commit is none of a stack
        return False


def _refuse_untracked(git: Git, tip: str) -> None:
    head = git.blobs("HEAD")
    for path in sorted(set(git.blobs(tip)) - set(head)):
        if (git.folder / path).exists():
            raise ForkError(f"{git.folder / path}: git does not know this file; the stack has one")


def export(stack: Stack, upstream: Upstream, directory: Path) -> list[str]:
    """Writes the stack as patches into `directory`, for `git am`; their names.

    The bytes depend on the stack and on upstream's files, nothing else. An earlier export there
    is replaced; a folder with other files is refused.
    """
    listed = directory / SERIES
    earlier = {SERIES, *listed.read_text(encoding="utf-8").split()} if listed.is_file() else set()
    if directory.exists() and (
        not directory.is_dir() or {f.name for f in directory.iterdir()} - earlier
    ):
        raise ForkError(f"{directory}: is there already, and no earlier export")
    names = []
    with tempfile.TemporaryDirectory() as scratch, atomically(directory, folder=True) as out:
        git = Git(Path(scratch), settings=False)
        git("init", "--quiet", "--bare")
        made = write_commits(git, stack, upstream, None)
        for commit, revision in zip(stack.commits, made, strict=True):
            patch = git.bytes("format-patch", "-1", "--stdout", *FORMAT, revision)
            names.append(f"{commit.number:04}{commit.folder.name[2:]}.patch")
            (out / names[-1]).write_bytes(patch)
        (out / SERIES).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    return names
