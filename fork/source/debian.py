"""PyTorch's pristine source tree, from the source package `pytorch` of Debian 13 (trixie)."""

import os
import shutil
import tempfile
from pathlib import Path

from fork import paths
from fork.console import console, output, step
from fork.errors import ForkError

RELEASE = "2.6.0"
PACKAGE = "pytorch"
SUITE = "trixie"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

# Present in every whole tree: from the two ends of PyTorch's tarball, and from Debian's.
MARKS = ("CMakeLists.txt", "test/test_ops.py", "version.txt", "debian/patches/series")


def pristine() -> Path:
    """PyTorch's pristine source tree below build/, fetched if it is not there."""
    with step(f"source of PyTorch {RELEASE}"):
        return fetch(paths.SOURCES)


def fetch(into: Path) -> Path:
    """The source tree in the folder `into`; downloaded and unpacked only if it is not there yet."""
    into = into.resolve()
    tree = into / f"{PACKAGE}-{RELEASE}"
    try:
        with paths.alone(into):
            if not whole(tree):
                for stale in into.glob(f"{tree.name}.part-*"):
                    shutil.rmtree(stale, ignore_errors=True)
                # A new name: the tar of a fetch that was killed may still write to the old one.
                with tempfile.TemporaryDirectory(prefix=f"{tree.name}.part-", dir=into) as name:
                    part = Path(name)
                    unpacked = unpack(download(part), part / "tree")
                    shutil.rmtree(tree, ignore_errors=True)
                    unpacked.rename(tree)
    except OSError as e:
        raise ForkError(f"{e.filename or into}: {e.strerror or e}") from None
    return tree


def whole(tree: Path) -> bool:
    return all((tree / mark).is_file() for mark in MARKS)


def download(part: Path) -> Path:
    """The package's .dsc in `part`, beside its tarballs; apt checks signature and sums."""
    if not KEYRING.is_file():
        raise ForkError(f"{KEYRING}: missing: install the package debian-archive-keyring")
    # apt run as root downloads as the user _apt, who must get through to here.
    part.chmod(0o755)
    (part / "lists/partial").mkdir(parents=True)
    (part / "cache/archives/partial").mkdir(parents=True)
    console.print(f"PyTorch {RELEASE}: downloading the source")
    refused = None
    for uri in mirrors():
        apt = private_apt(part, uri)
        try:
            run([*apt, "update"], part)
            break
        except ForkError as e:
            # Not every archive on the machine's list carries trixie; the first reason is the best.
            refused = refused or e
    else:
        raise ForkError(f"no Debian {SUITE} source index: {refused}")
    run([*apt, "source", "--download-only", "--only-source", PACKAGE], part)
    found = next(part.glob(f"{PACKAGE}_{RELEASE}+*.dsc"), None)
    if found is None:
        raise ForkError(f"apt-get source {PACKAGE}: this is not PyTorch {RELEASE}")
    return found


def mirrors() -> list[str]:
    """The archives with a component `main` that this machine's apt is set to use, Debian first."""
    listed = run(["apt-get", "indextargets", "--format", "$(LABEL)\t$(COMPONENT)\t$(REPO_URI)"])
    rows = [line.split("\t") for line in listed.splitlines() if line.count("\t") == 2]
    # The label is known only after an `apt-get update`, so it sorts the archives, no more.
    rows.sort(key=lambda row: row[0] != "Debian")
    uris = list(dict.fromkeys(uri for _, component, uri in rows if component == "main"))
    if not uris:
        raise ForkError("apt has no archive with a component main: is this a Debian machine?")
    return uris


def private_apt(part: Path, uri: str) -> list[str]:
    """An apt-get that touches nothing of the system's but its settings, such as a proxy."""
    (part / "debian.sources").write_text(
        f"Types: deb-src\nURIs: {uri}\nSuites: {SUITE}\nComponents: main\nSigned-By: {KEYRING}\n",
        encoding="utf-8",
    )
    # The machine may have hooks on `update` that clean or refill the system's caches: clear them.
    (part / "apt.conf").write_text(
        "#clear APT::Update;\n"
        'APT::Update::Error-Mode "any";\n'
        # An archive or a proxy that says nothing is tried twice, which takes a minute.
        'Acquire::Retries "1";\n'
        'Acquire::http::Timeout "15";\n'
        'Acquire::https::Timeout "15";\n'
        f'Dir::Etc::SourceList "{part}/debian.sources";\n'
        'Dir::Etc::SourceParts "-";\n'
        f'Dir::State::Lists "{part}/lists";\n'
        f'Dir::Cache "{part}/cache";\n',
        encoding="utf-8",
    )
    return ["apt-get", f"--config-file={part}/apt.conf", "--quiet"]


def unpack(dsc: Path, tree: Path) -> Path:
    # Debian's patches stay unapplied (in debian/): some change test/ and torch/_inductor.
    run(["dpkg-source", "--skip-patches", "--extract", dsc.name, str(tree)], dsc.parent)
    if not whole(tree):
        raise ForkError(f"{dsc.name}: unpacked, but not PyTorch's source tree")
    return tree


def run(command: list[str], cwd: Path | None = None) -> str:
    package = {"apt-get": "apt", "dpkg-source": "dpkg-dev"}[command[0]]
    return output(command, package, cwd=cwd, env={**os.environ, "LC_ALL": "C"}).decode()
