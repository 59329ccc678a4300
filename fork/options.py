"""The options and arguments that several commands have."""

from functools import partial
from pathlib import Path

import click

from fork.project import PROJECT

FOLDER = click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path)
NEW = click.Path(path_type=Path)
CHECKOUT = click.argument("tree", type=FOLDER)
BRANCH = click.option(
    "--branch", default=PROJECT, show_default=True, help="The branch that the commits are on."
)
upstream_option = partial(click.option, "--upstream", type=FOLDER, envvar="UPSTREAM")
SUITES_UPSTREAM = upstream_option(
    help="A source tree of the release to test on.  [default: Debian 13's source package]"
)
commit_option = partial(click.option, "--commit", type=int)
base_option = partial(
    click.option,
    "--base",
    show_default=True,
    metavar="BASE",
    envvar="BASE",
    help="Release of torch to graft onto, the path of its wheel, or `installed`.",
)
