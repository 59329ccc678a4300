"""Git: commands in a checkout, and one of its commits as a pristine PyTorch to read from."""

import os
from pathlib import Path

from fork.console import output
from fork.errors import ForkError
from fork.overlay import Upstream


class Git:
    """Runs git in the checkout (or bare repository) `folder`, with the user's settings or none.

    Hooks never run, as one that fails leaves half of what a command does. What they keep in order,
    such as submodules, the stack does not change.
    """

    def __init__(self, folder: Path, settings: bool = True):
        self.folder = folder
        none = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        self._variables = {} if settings else none
        self._blobs: dict[str, bytes] = {}

    def bytes(self, *args: str, stdin: bytes = b"") -> bytes:
        """Returns what the command prints; raises ForkError with git's own reason if it fails."""
        # A hook or a rebase that runs us sets GIT_*: these would name another repository or index.
        env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | self._variables
        command = ["git", "-C", str(self.folder), "-c", f"core.hooksPath={os.devnull}", *args]
        return output(command, "git", f"{self.folder}: git {args[0]}", input=stdin, env=env)

    def __call__(self, *args: str, stdin: bytes = b"") -> str:
        return self.bytes(*args, stdin=stdin).decode(errors="replace").strip()

    def commit(self, name: str) -> str | None:
        """The hash of the commit that `name` stands for; None if there is none."""
        # It succeeds where the commit is missing, and fails where git refuses the folder.
        said = self("cat-file", "--batch-check", stdin=f"{name}^{{commit}}\n".encode())
        return None if said.endswith(" missing") else said.split()[0]

    def blob(self, name: str) -> bytes:
        if name not in self._blobs:
            self._blobs[name] = self.bytes("cat-file", "blob", name)
        return self._blobs[name]

    def blobs(self, commit: str) -> dict[str, tuple[str, str]]:
        """Path -> (mode, hash) of every file of the commit; submodules aside."""
        entries = self.bytes("ls-tree", "-r", "-z", commit).decode(errors="surrogateescape")
        found = {}
        for entry in entries.split("\0")[:-1]:
            about, _, path = entry.partition("\t")
            mode, kind, blob = about.split()
            if kind == "blob":
                found[path] = mode, blob
        return found


class Revision(Upstream):
    """A commit of a checkout, as a pristine source tree."""

    def __init__(self, git: Git, commit: str):
        self.git = git
        self.commit = commit
        self.root = git.folder
        self.kind = "source"
        self.blobs = git.blobs(commit)
        if not {"version.txt", "aten/src/ATen/native/native_functions.yaml"} <= set(self.blobs):
            raise ForkError(f"{self.root}: not PyTorch: commit {commit[:12]} has no aten/")

    def __str__(self) -> str:
        return f"torch {self.version} (commit {self.commit[:12]} of {self.root.name})"

    def _read_packed(self, packed: str) -> str | None:
        if packed not in self.blobs:
            return None
        return self.git.blob(self.blobs[packed][1]).decode()

    def mode(self, path: str) -> str:
        return self.blobs[path][0]
