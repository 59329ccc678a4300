"""What all commands share: a section of the list, an example, errors in one line."""

import os
import sys
from collections.abc import Sequence

import click

from fork.bootstrap import ONLY_CHECKS
from fork.console import console
from fork.errors import ForkError


class Command(click.Command):
    """A command with an example at the end of its help, and its section in the list of all."""

    def __init__(self, *args, section: str, example: str = "", **kwargs):
        super().__init__(*args, **kwargs)
        self.section = section
        self.example = f"python -m fork {self.name} {example}".rstrip()

    def invoke(self, ctx):
        return None if os.environ.get(ONLY_CHECKS) else super().invoke(ctx)

    def format_epilog(self, ctx, formatter):
        with formatter.section("Example"):
            formatter.write_text(self.example)


class Group(click.Group):
    """Lists its commands by section; turns an error or Ctrl-C into one line."""

    command_class = Command

    def format_commands(self, ctx, formatter):
        for section in dict.fromkeys(c.section for c in self.commands.values()):
            listed = (c for c in self.commands.values() if c.section == section)
            with formatter.section(section):
                formatter.write_dl([(c.name, c.get_short_help_str(100)) for c in listed])

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (ForkError, OSError) as e:
            console.print(f"error: {e}")
            sys.exit(1)
        except KeyboardInterrupt:
            console.print("stopped; run it again to go on")
            sys.exit(130)


def report(problems: Sequence[str]) -> None:
    """Prints each problem once and exits with status 1; does nothing if there is none."""
    for problem in dict.fromkeys(problems):
        console.print(f"error: {problem}")
    if problems:
        sys.exit(1)
