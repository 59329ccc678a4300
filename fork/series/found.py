"""The commits of a checkout: which are the stack's, what their messages and their trees say."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from fork.errors import ForkError
from fork.overlay import IS_TRAILER, SECTIONS, TRAILER
from fork.project import PROJECT
from fork.series.git import Git, Revision


@dataclass(frozen=True)
class Found:
    """A commit of a checkout: the stack's if its message names a folder of stack/."""

    hash: str
    committer: str
    message: str

    @property
    def folder(self) -> str | None:
        named = re.search(rf"^{TRAILER}: (\S+)$", self.message, re.M)
        return named[1] if named else None

    @property
    def name(self) -> str:
        """The folder without its number, which is only a place: `absorb` counts anew."""
        return (self.folder or "").partition("-")[2]

    @property
    def title(self) -> str:
        return re.sub(rf"^\[{PROJECT} [\d/]+\] ", "", self.message.partition("\n")[0])

    def __str__(self) -> str:
        return f"{self.hash[:12]} '{self.message.partition(chr(10))[0]}'"

    def parse(self) -> tuple[str, str, tuple[str, ...]]:
        """Makes the title, the body and the trailers of commit.md from the message."""
        text, trailers = self._trailers()
        parts = re.split(rf"^(?:{'|'.join(map(re.escape, SECTIONS[1:]))}):$", text, flags=re.M)
        if len(parts) != len(SECTIONS):
            words = " and ".join(f"'{title}:'" for title in SECTIONS[1:])
            fault = f"{self}: its message wants {words}, each on a line of its own, once"
            squash = "; or squash it into the commit that it belongs to (git rebase -i)"
            raise ForkError(fault if self.folder else fault + squash)
        sections = [
            f"## {t}\n\n{part.rstrip().lstrip(chr(10))}"
            for t, part in zip(SECTIONS, parts, strict=True)
        ]
        return self.title, "\n\n".join(sections) + "\n", trailers

    def _trailers(self) -> tuple[str, tuple[str, ...]]:
        """Returns the text below the title, and the trailers that stand below this text."""
        above, *below = re.split(
            rf"^{TRAILER}: .*$", self.message.partition("\n")[2], maxsplit=1, flags=re.M
        )
        text, _, last = (above if below else above.rstrip()).rpartition("\n\n")
        beside = last.splitlines()
        # A test plan that is one such line stays a test plan.
        if not all(map(IS_TRAILER.fullmatch, beside)) or text.endswith(f"{SECTIONS[-1]}:"):
            text, beside = above, []
        under = [line for line in "".join(below).splitlines() if line.strip()]
        for line in under:
            if not IS_TRAILER.fullmatch(line) or line.startswith(f"{TRAILER}: "):
                raise ForkError(
                    f"{self}: its message has '{line}' below '{TRAILER}:', where only trailers "
                    "such as 'Signed-off-by: NAME' stand: move it above that line, or remove it"
                )
        return text.strip("\n"), (*beside, *under)

    def changes(self, git: Git, upstream: Revision) -> dict[str, bytes]:
        """Returns the files that differ from upstream after this commit, by their paths."""
        blobs = git.blobs(self.hash)
        if gone := sorted(set(upstream.blobs) - set(blobs)):
            raise ForkError(f"{git.folder}: {self} removes {gone[0]}; the overlay only adds lines")
        return {
            path: git.blob(blob[1])
            for path, blob in blobs.items()
            if blob[1] != upstream.blobs.get(path, ("", ""))[1]
        }


def series_of(git: Git, tip: str) -> tuple[str, list[Found]]:
    """The commit that the stack at `tip` begins on, and the commits from there on, in order.

    Those without a folder are new: somebody put them among the stack's, or on top.
    """
    names = git("rev-list", "--first-parent", "--max-count=300", tip).split()
    found = [*_read(git, names)]
    ours = [at for at, commit in enumerate(found) if commit.folder]
    if not ours:
        return git("rev-parse", tip), []
    series = found[ours[-1] :: -1]
    return git("rev-parse", f"{series[0].hash}^"), series


def _read(git: Git, names: list[str]) -> Iterator[Found]:
    """Yields commits as they are stored; `git log` adds signatures and changes the encoding."""
    said = git.bytes("cat-file", "--batch", stdin="\n".join(names).encode())
    for name in names:
        about, _, said = said.partition(b"\n")
        size = int(about.split()[2])
        head, _, message = said[:size].partition(b"\n\n")
        said = said[size + 1 :]
        committer = re.search(rb"^committer .*<(.*)>", head, re.M)[1].decode(errors="replace")
        encoding = re.search(rb"^encoding (.*)", head, re.M)
        yield Found(name, committer, _text(name, message, encoding[1] if encoding else b""))


def _text(name: str, message: bytes, encoding: bytes) -> str:
    # Git declares i18n.commitEncoding even where a message came in UTF-8, so that is tried first.
    for known in ("utf-8", encoding.decode(errors="replace")):
        with suppress(UnicodeDecodeError, LookupError):
            return message.decode(known)
    raise ForkError(f"{name[:12]}: its message is not text in UTF-8 or in the encoding it names")
