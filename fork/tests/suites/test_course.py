"""Tests of `python -m fork course` and `site`: what each runs; no lesson is run here."""

import subprocess
from hashlib import md5
from types import SimpleNamespace

import pytest

from commands import course, lessons, site
from fork.errors import ForkError
from fork.paths import BUILD, ROOT
from fork.tests.conftest import write_files
from fork.tests.test_cli import invoke

NEW = "course/tests/test_new.py"
CARRY = "course/tests/test_carry.py"
EXERCISES = "course/tests/test_lessons.py"
EXTENSION = "course/linear_extension/tests"
RESULTS = "site/tests/test_lesson_pages.py"
DOWNLOADS = "site/tests/test_downloads.py"
CODE = "site/tests/test_code.py"
BROWSER = "site/tests/test_site.py"
TESTS = {NEW, CARRY, EXERCISES, EXTENSION, RESULTS, DOWNLOADS, CODE, BROWSER}


@pytest.fixture
def ran(monkeypatch):
    """What is made, and the words of each command that would be run."""
    ran = SimpleNamespace(made=[], commands=[], status=0)
    for module in (course, site):
        for name in ("graft_into", "install_packages", "install_extension", "make_venv"):
            if hasattr(module, name):
                made = name if name == "install_extension" else ""
                monkeypatch.setattr(module, name, lambda *_, made=made: ran.made.append(made))
    monkeypatch.setattr(site, "_forget_lessons", lambda: None)
    monkeypatch.setattr(site.shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(site.shutil, "which", lambda program: program)
    sphinx = lambda command, *_, **__: ran.commands.append([*map(str, command)])  # noqa: E731
    monkeypatch.setattr(site, "run", sphinx)

    def run(command, cwd, env):
        ran.commands.append([*map(str, command)])
        return subprocess.CompletedProcess(command, ran.status)

    monkeypatch.setattr(lessons.subprocess, "run", run)
    return ran


def chosen(command):
    """Those of TESTS that a command of pytest runs."""
    return {test for test in TESTS if str(ROOT / test) in command}


@pytest.mark.parametrize(
    ("words", "built", "tests", "report"),
    [
        (["course"], "with", TESTS - {CODE, BROWSER}, "course"),
        (
            ["course", "--only", "lessons"],
            "with",
            {EXERCISES, EXTENSION, RESULTS, DOWNLOADS},
            "course",
        ),
        (["course", "--only", "operators"], "", {NEW, CARRY}, "operators"),
        (["site"], "with", set(), ""),
        (["site", "--no-lessons"], "without", set(), ""),
        (["site", "--test"], "with", {RESULTS, DOWNLOADS, CODE, BROWSER}, "site"),
        (["site", "--test", "--no-lessons"], "without", {CODE, BROWSER}, "site"),
        (["site", "--test", "--no-lessons", "--only", "pages"], "without", {CODE}, "pages"),
        (["site", "--test", "--no-lessons", "--only", "browser"], "without", {BROWSER}, "browser"),
    ],
)
def test_what_is_run(ran, words, built, tests, report):
    """The site is built, with or without the lessons, before its tests."""
    ran.status = 3 if tests else 0
    assert invoke(*words)[0] == ran.status
    commands = iter(ran.commands)
    if built:
        command = next(commands)
        assert "sphinx" in command and ("no_lessons" in command) == (built == "without")
    assert ("install_extension" in ran.made) == (built == "with")
    for command in commands:
        assert chosen(command) == tests
        assert f"--junitxml={BUILD / 'reports' / report}.xml" in command
    assert len(ran.commands) == bool(built) + bool(tests)


def test_a_lesson_that_fails_ends_it(ran, monkeypatch):
    def fails(*_, **__):
        raise ForkError("the site cannot be built")

    monkeypatch.setattr(site, "run", fails)
    status, said = invoke("course", "--only", "lessons")
    assert status == 1 and "the site cannot be built" in said and not ran.commands


def test_the_hash_of_a_changed_lesson_is_removed(monkeypatch, tmp_path):
    """Or else the page that is made without its results would stay once the change is undone."""
    files = {"test/attn_function.py": "", "site/.keep": "", f".venv/{site.STAMP}": "torch"}
    files |= {f"course/{name}.py": "" for name in ("01_one", "02_two", "drawing", "exercise")}
    write_files(tmp_path, files)
    monkeypatch.setattr(site.paths, "ROOT", tmp_path)
    for name, place in (("VENV", ".venv"), ("COURSE", "course"), ("EXTENSION", "extension")):
        monkeypatch.setattr(site, name, tmp_path / place)
    pages = tmp_path / "site" / "course"
    site._forget_lessons()
    for name in ("01_one", "02_two"):
        (pages / f"{name}.py.md5").write_text(md5(b"").hexdigest(), encoding="utf-8")
    (tmp_path / "course" / "01_one.py").write_text("changed", encoding="utf-8")
    site._forget_lessons()
    assert [file.name for file in pages.glob("*.md5")] == ["02_two.py.md5"]
    (tmp_path / "course" / "exercise.py").write_text("changed", encoding="utf-8")
    site._forget_lessons()
    assert not [*pages.glob("*.md5")]


def test_parts_are_of_the_tests(ran):
    assert "--only is for --test" in invoke("site", "--only", "pages")[1]


def test_only_the_browsers_tests_want_a_browser(ran, monkeypatch):
    monkeypatch.setattr(site.shutil, "which", lambda program: None)
    assert "no browser to test the site in" in invoke("site", "--test", "--no-lessons")[1]
    assert invoke("site", "--test", "--no-lessons", "--only", "pages")[0] == 0


def test_each_test_of_the_site_is_in_one_part():
    listed = [*site.PARTS["pages"], *site.PARTS["browser"], *site.LESSONS]
    assert sorted(listed) == sorted(site.TESTS.glob("test_*.py"))
