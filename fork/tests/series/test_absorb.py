"""Tests that the overlay gets what a reviewer changes in a checkout."""

import pytest

from fork.errors import ForkError
from fork.overlay import Edit, Stack, Upstream
from fork.series.absorb import absorb, edit_again
from fork.series.branch import commits
from fork.tests.conftest import git, write_files
from fork.tests.overlay.test_stack import NATIVE, snapshot
from fork.tests.series.test_branch import CPP

YAML = NATIVE.replace(".edit", "")
OVERRIDES = "torch/overrides.py"
EDIT = "torch/overrides.edit.py"
FIRST, SECOND = "stack/01-implicit", "stack/02-explicit"


@pytest.fixture
def branch(repo, checkout):
    commits(Stack(repo), checkout, "attn")
    return checkout


def put(path, text):
    return lambda tree: write_files(tree, {path: text})


def replace(path, old, new):
    def edit(tree):
        text = (tree / path).read_text(encoding="utf-8")
        assert old in text
        (tree / path).write_text(text.replace(old, new), encoding="utf-8")

    return edit


def drop(path):
    return lambda tree: (tree / path).unlink()


def amend(tree, number, *edits, message=None):
    """Amends commit `number`, 1 or 2; after an amended first, puts the second on top again."""
    tip = git(tree, "rev-parse", "attn")
    git(tree, "checkout", "--quiet", "--detach", "attn" if number == 2 else "attn~1")
    for edit in edits:
        edit(tree)
    git(tree, "add", "--all")
    words = ["--no-edit"] if message is None else [f"--message={message}"]
    git(tree, "commit", "--quiet", "--amend", *words)
    if number == 1:
        git(tree, "cherry-pick", "--strategy-option=theirs", tip)
    git(tree, "checkout", "--quiet", "-B", "attn")


def test_nothing_to_absorb(repo, branch):
    before = snapshot(repo)
    assert absorb(Stack(repo), branch) == []
    assert snapshot(repo) == before


# Which commit is changed, how, and what the overlay's files then say; None: there is no such file.
EDITS = {
    "a whole file": (1, put(CPP, "int reviewed;\n"), {CPP: "int reviewed;\n"}),
    "a whole file that an earlier commit has": (
        2,
        put(CPP, "int reviewed;\n"),
        {CPP: "int reviewed;\n", f"{FIRST}/{CPP}": "int attn;\n"},
    ),
    "a block": (
        2,
        replace(OVERRIDES, "torch.attn: 3,", "torch.attn: 4,"),
        {"torch/overrides.edit.py": "# @@ after: torch.abs:\n    torch.attn: 4,\n"},
    ),
    "a block that a later commit has changed": (
        1,
        replace(YAML, "- func: attn(Tensor q)", "# A note.\n- func: attn(Tensor q)"),
        {
            f"{FIRST}/{NATIVE}": (
                "# @@ before: - func: baddbmm(\n# A note.\n- func: attn(Tensor q) -> Tensor\n"
            ),
            NATIVE: "# @@ before: - func: baddbmm(\n- func: attn(Tensor q, Tensor k) -> Tensor\n",
        },
    ),
    "a block taken out": (
        2,
        replace(OVERRIDES, "    torch.attn: 3,\n", ""),
        {"torch/overrides.edit.py": None},
    ),
    "a new place in an edited file": (
        2,
        replace(OVERRIDES, "    torch.bmm: 2,\n", "    torch.bmm: 2,\n    torch.more: 5,\n"),
        {
            "torch/overrides.edit.py": (
                "# @@ after: torch.abs:\n    torch.attn: 3,\n\n"
                "# @@ after: torch.bmm: 2,\n    torch.more: 5,\n"
            )
        },
    ),
    "a place beside a block": (
        2,
        replace(OVERRIDES, "    torch.attn: 3,\n", "    torch.attn: 3,\n    torch.more: 5,\n"),
        {
            "torch/overrides.edit.py": (
                "# @@ after: torch.abs:\n    torch.attn: 3,\n    torch.more: 5,\n"
            )
        },
    ),
    "a file that was not edited": (
        2,
        replace("test/test_ops.py", "pass\n", "pass\nmore\n"),
        {"test/test_ops.edit.py": "# @@ after: pass\nmore\n"},
    ),
    "a new file": (1, put("test/test_new.py", "new\n"), {"test/test_new.py": "new\n"}),
    "an empty file": (1, put("test/__init__.py", ""), {"test/__init__.py": ""}),
    "a file taken out": (1, drop(CPP), {CPP: None}),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit(repo, branch, name):
    number, edit, expected = EDITS[name]
    before = snapshot(repo)
    amend(branch, number, edit)
    tip = git(branch, "rev-parse", "attn^{tree}")
    changed = absorb(Stack(repo), branch)
    after = snapshot(repo)
    paths = before.keys() | after.keys()
    assert changed == sorted(
        p.relative_to(repo).as_posix() for p in paths if before.get(p) != after.get(p)
    )
    for path, text in expected.items():
        assert (
            (repo / path).read_text(encoding="utf-8") if (repo / path).exists() else None
        ) == text
    stack = Stack(repo)
    assert stack.problems() == []
    # The commits that the overlay now makes replace the reviewer's, and have the same trees.
    git(branch, "checkout", "--quiet", "main")
    commits(stack, branch, "attn")
    assert git(branch, "rev-parse", "attn^{tree}") == tip
    assert absorb(stack, branch) == []


def test_the_list_of_a_commits_files(repo, branch):
    amend(branch, 1, put("test/test_new.py", "new\n"), put(OVERRIDES, EDITED))
    absorb(Stack(repo), branch)
    assert Stack(repo).commit(1).files == (
        *(CPP, NATIVE),
        *("test/test_new.py", "torch/overrides.edit.py"),
    )
    assert (repo / FIRST / "torch/overrides.edit.py").read_text(encoding="utf-8") == (
        "# @@ after: torch.bmm: 2,\n    torch.more: 5,\n"
    )


EDITED = "table = {\n    torch.abs: 1,\n    torch.bmm: 2,\n    torch.more: 5,\n}\n"


def test_a_message(repo, branch):
    text = git(branch, "log", "-1", "--format=%B")
    new = text.replace("Do a thing", "Do it well").replace("because", "because\n\n    of this")
    amend(branch, 2, message=new)
    assert absorb(Stack(repo), branch) == [f"{SECOND}/commit.md"]
    commit = Stack(repo).commit(2)
    assert commit.title == "Do it well"
    assert commit.section("Why") == "because\n\n    of this"


MESSAGE = """{}

why

Review order:

first

Test plan:

run it
"""
LONG = MESSAGE.format("Do a thing")
FILE = "test/attn_thing.py"
SIGNED_OFF = 'Signed-off-by: Some \\ Body <some@body.invalid> # by "hand"'
CHANGE = "Change-Id: I0123's"
GHSTACK = ("ghstack-source-id: 0123", "Pull Request resolved: https://example.invalid/1")
NAMED = "Stack-commit: 02-explicit"
# How a message ends, and the trailers that are taken over.
TRAILERS = {
    "below": (f"run it\n\n{NAMED}\n{SIGNED_OFF}\n{CHANGE}", [SIGNED_OFF, CHANGE]),
    "above": (f"run it\n\n{CHANGE}\n{NAMED}", [CHANGE]),
    "in paragraphs": (f"run it\n\n{NAMED}\n\n\n{GHSTACK[0]}\n\n{GHSTACK[1]}", [*GHSTACK]),
    "a test plan that looks like one": (f"CPU: run it\n\n{NAMED}", []),
    "text beside": (f"run it\n{NAMED}\n{CHANGE}", [CHANGE]),
    "none": (f"run it\n\n{NAMED}\n\n", []),
}


@pytest.mark.parametrize("name", TRAILERS)
def test_trailers(repo, branch, name):
    end, trailers = TRAILERS[name]
    text = git(branch, "log", "-1", "--format=%B").partition("run it")[0]
    amend(branch, 2, message=text + end)
    absorb(Stack(repo), branch)
    stack = Stack(repo)
    assert stack.commit(2).trailers == tuple(trailers)
    assert stack.commit(2).section("Test plan") == end.partition("\n")[0]
    assert absorb(stack, branch) == []
    commits(stack, branch, "attn")
    made = git(branch, "log", "-1", "--format=%B")
    assert made.rpartition("\n\n")[2] == "\n".join([NAMED, *trailers])
    assert absorb(stack, branch) == []


@pytest.mark.parametrize(
    ("plan", "trailers"), [("run it", [CHANGE, SIGNED_OFF]), ("CPU: run it", []), ("run it", [])]
)
def test_trailers_of_a_new_commit(repo, branch, plan, trailers):
    write_files(branch, {FILE: "pass\n"})
    git(branch, "add", FILE)
    text = MESSAGE.format("Add a thing").replace("run it", plan)
    git(branch, "commit", "--quiet", "--message", "\n".join([text, *trailers]))
    absorb(Stack(repo), branch)
    assert Stack(repo).commit(3).trailers == tuple(trailers)
    assert Stack(repo).commit(3).section("Test plan") == plan


# Stands in for gpg: signs everything, and finds every signature good.
SIGNER = """#!/bin/sh
cat > /dev/null
printf '\\n[GNUPG:] SIG_CREATED \\n[GNUPG:] GOODSIG 0 Somebody\\n' >&2
echo '-----BEGIN PGP SIGNATURE-----'
"""
SIGNED = {"commit.gpgSign": "true", "log.showSignature": "true"}
# Git's settings while somebody amends, what the words are, and in which bytes they are committed.
SETTINGS = [
    (SIGNED, "because", "utf-8"),
    ({"i18n.logOutputEncoding": "ISO-8859-1"}, "à cause de", "utf-8"),
    ({"i18n.commitEncoding": "ISO-8859-1"}, "à cause de", "utf-8"),
    ({"i18n.commitEncoding": "ISO-8859-1"}, "à cause de", "iso-8859-1"),
    ({"i18n.commitEncoding": "EUC-JP"}, "両方", "euc-jp"),
]


@pytest.mark.parametrize("stay", [True, False])
@pytest.mark.parametrize(("settings", "words", "encoding"), SETTINGS)
def test_a_message_under_settings_of_git(repo, branch, tmp_path, settings, words, encoding, stay):
    write_files(tmp_path, {"gpg": SIGNER}).joinpath("gpg").chmod(0o700)
    settings = {"gpg.program": str(tmp_path / "gpg"), **settings}
    for key, value in settings.items():
        git(branch, "config", key, value)
    text = git(branch, "cat-file", "commit", "attn").partition("\n\n")[2]
    text = text.replace("because", words).encode(encoding).decode(errors="surrogateescape")
    amend(branch, 2, put(CPP, "int reviewed;\n"), message=text)
    for key in settings if not stay else ():
        git(branch, "config", "--unset", key)
    absorb(Stack(repo), branch)
    assert Stack(repo).commit(2).section("Why") == words
    assert (repo / CPP).read_text(encoding="utf-8") == "int reviewed;\n"


def test_a_message_in_an_unknown_encoding(repo, branch):
    git(branch, "config", "i18n.commitEncoding", "nonsense")
    text = git(branch, "log", "-1", "--format=%B").replace("because", "\udce0 cause de")
    amend(branch, 2, message=text)
    with pytest.raises(ForkError, match="its message is not text in UTF-8"):
        absorb(Stack(repo), branch)


def test_a_message_without_its_number(repo, branch):
    """`git am` cuts it off."""
    text = git(branch, "log", "-1", "--format=%B").removeprefix("[attn 2/2] ")
    amend(branch, 2, message=text)
    assert absorb(Stack(repo), branch) == []


def test_blocks_of_other_releases_stay(repo, checkout):
    edit = (
        "# @@ after: torch.abs:\n# @@ only: torch<2.7\n    torch.attn: 3,\n\n"
        "# @@ after: torch.cat:\n# @@ only: torch>=2.7\n    torch.attn: 9,\n"
    )
    write_files(repo, {"torch/overrides.edit.py": edit})
    later = "# @@ only: torch>=2.7\n# @@ after: x\ny\n"
    write_files(repo, {"torch/later.edit.py": later})
    text = (repo / SECOND / "commit.md").read_text(encoding="utf-8")
    text = text.replace("  - torch/o", "  - torch/later.edit.py\n  - torch/o")
    write_files(repo, {f"{SECOND}/commit.md": text})
    commits(Stack(repo), checkout, "attn")
    amend(checkout, 2, replace(OVERRIDES, "torch.attn: 3,", "torch.attn: 4,\n    torch.more: 5,"))
    assert absorb(Stack(repo), checkout) == ["torch/overrides.edit.py"]
    assert (repo / "torch/overrides.edit.py").read_text(encoding="utf-8") == edit.replace(
        "torch.attn: 3,", "torch.attn: 4,\n    torch.more: 5,"
    )


def binary(tree):
    (tree / "test/data.bin").write_bytes(b"\xff\xfe")


REFUSED = {
    "upstream's line changed": (
        replace(OVERRIDES, "torch.bmm: 2", "torch.bmm: 9"),
        "torch/overrides.py: upstream's line 3 ('torch.bmm: 2,') was changed",
    ),
    "upstream's file removed": (drop("test/test_ops.py"), "removes test/test_ops.py"),
    "bytes": (binary, "test/data.bin: the overlay is text"),
    "no ending": (
        put("Dockerfile", "FROM scratch\nRUN true\n"),
        "Dockerfile: its name has no ending",
    ),
    "an unknown comment": (
        put("setup.cfg", "[a]\nx = 1\n"),
        "setup.edit.cfg: no comments are known",
    ),
    "no unique neighbour": (
        put("test/twins.py", "pass\npass\nmore\npass\npass\n"),
        "test/twins.py:3: lines were added here, where neither neighbour is unique",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_overlay_cannot_say(repo, checkout, name):
    upstreams = {
        "Dockerfile": "FROM scratch\n",
        "setup.cfg": "[a]\n",
        "test/twins.py": "pass\n" * 4,
    }
    write_files(checkout, upstreams)
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message=more of upstream")
    commits(Stack(repo), checkout, "attn")
    edit, words = REFUSED[name]
    amend(checkout, 2, edit)
    before = snapshot(repo)
    with pytest.raises(ForkError) as caught:
        absorb(Stack(repo), checkout)
    assert words in str(caught.value)
    assert snapshot(repo) == before


@pytest.mark.parametrize(
    "steps, words",
    [
        ([("checkout", "main")], "no commits of the stack: make them with `commits` first"),
        (
            [("commit", "--allow-empty", "--amend", "--message=x\n\nStack-commit: 07-other")],
            "the stack has no commit 07-other",
        ),
        ([("commit", "--allow-empty", "--message=fixup")], "or squash it into the commit"),
        (
            [("commit", "--allow-empty", "--reuse-message=attn")],
            "two commits are called explicit: if one was split",
        ),
        (
            [("commit", "--amend", "--message=x\n\nwhy\n\nStack-commit: 02-explicit")],
            "its message wants 'Review order:' and 'Test plan:'",
        ),
        (
            [
                (
                    "commit",
                    "--amend",
                    f"--message={LONG}\n{NAMED}\n\nMore words.",
                )
            ],
            "its message has 'More words.' below 'Stack-commit:', where only trailers",
        ),
        (
            [
                (
                    "commit",
                    "--amend",
                    f"--message={LONG}\n{NAMED}\n{NAMED}",
                )
            ],
            f"its message has '{NAMED}' below 'Stack-commit:'",
        ),
        ([("rm", "--cached", CPP)], "has changes without a commit"),
    ],
)
def test_branches_that_are_not_the_series(repo, branch, steps, words):
    for step in steps:
        git(branch, *step)
    before = snapshot(repo)
    with pytest.raises(ForkError) as caught:
        absorb(Stack(repo), branch)
    assert words in str(caught.value)
    assert snapshot(repo) == before


ADD = ("commit", "--quiet", f"--message={MESSAGE.format('Add a thing')}")
# For each change of the stack: git's commands in a checkout, then the commits with their files.
SHAPES = {
    "a commit on top": (
        [("add", FILE), ADD],
        {"01-implicit": [CPP, NATIVE], "02-explicit": [NATIVE, EDIT], "03-add-a-thing": [FILE]},
    ),
    "a commit between": (
        [("checkout", "attn~1"), ("add", FILE), ADD, ("cherry-pick", "attn")],
        {"01-implicit": [CPP, NATIVE], "02-add-a-thing": [FILE], "03-explicit": [NATIVE, EDIT]},
    ),
    "a commit dropped": (
        [("reset", "--hard", "attn~1")],
        {"01-implicit": [CPP, NATIVE]},
    ),
    "a commit split, its first part new": (
        [
            *(("reset", "attn~1"), ("add", OVERRIDES), ADD),
            *(("add", "--update"), ("commit", "--quiet", "--reuse-message=attn@{2}")),
        ],
        {"01-implicit": [CPP, NATIVE], "02-add-a-thing": [EDIT], "03-explicit": [NATIVE]},
    ),
    "a commit split, its second part new": (
        [
            *(("reset", "attn~1"), ("add", YAML)),
            *(("commit", "--quiet", "--reuse-message=attn@{1}"), ("add", "--update"), ADD),
        ],
        {"01-implicit": [CPP, NATIVE], "02-explicit": [NATIVE], "03-add-a-thing": [EDIT]},
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_another_shape_of_the_stack(repo, branch, name):
    write_files(branch, {FILE: "pass\n"})
    kept = [f"stack/{name}" for name in ("README.md", "results.json", "releases.json")]
    write_files(repo, dict.fromkeys(kept, ""))
    edits = {path: (repo / path).read_text(encoding="utf-8") for path in (NATIVE, EDIT)}
    steps, wanted = SHAPES[name]
    for step in steps:
        git(branch, *step)
    git(branch, "checkout", "--quiet", "-B", "shaped")
    assert absorb(Stack(repo), branch)
    stack = Stack(repo)
    assert {c.folder.name: sorted(c.files) for c in stack.commits} == {
        folder: sorted(files) for folder, files in wanted.items()
    }
    assert stack.problems() == []
    assert all((repo / path).exists() for path in kept)
    if len(wanted) > 1:  # every edit file is as it was
        assert edits == {path: (repo / path).read_text(encoding="utf-8") for path in edits}
    # The new stack makes the branch that was absorbed.
    tree = git(branch, "rev-parse", "shaped^{tree}")
    assert absorb(stack, branch) == []
    commits(stack, branch, "shaped")
    assert git(branch, "rev-parse", "shaped^{tree}") == tree
    assert absorb(stack, branch) == []


def test_commits_that_change_places(repo, branch):
    test_another_shape_of_the_stack(repo, branch, "a commit on top")
    git(branch, "checkout", "--quiet", "shaped~2")
    git(branch, "cherry-pick", "shaped", "shaped~1")
    absorb(Stack(repo), branch)
    assert [c.folder.name for c in Stack(repo).commits] == [
        *("01-implicit", "02-add-a-thing", "03-explicit")
    ]


def test_a_disk_that_is_full(repo, branch, monkeypatch):
    amend(branch, 1, put(CPP, "int reviewed;\n"))
    before = snapshot(repo)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ForkError, match="No space left"):
        absorb(Stack(repo), branch)
    assert snapshot(repo) == before


def test_an_edit_that_holds_upstreams_next_line(source):
    old, new = "a\nb\nc\n", "a\nx\nb\nx\nb\nc\n"
    made = edit_again("x.edit.py", "# @@ before: b\nold\n", old, new, Upstream(source))
    assert made == "# @@ before: b\nx\nb\nx\n"
    assert Edit.parse("x.edit.py", made).apply(old, Upstream(source)) == new
