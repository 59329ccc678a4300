"""What all commands share: groups, an example in each one's help, errors in one line."""

import sys
from collections.abc import Sequence

import click

from fork.console import console
from fork.errors import ForkError


class Command(click.Command):
    """A command with an example at the end of its help."""

    def __init__(self, *args, example: str = "", **kwargs):
        super().__init__(*args, **kwargs)
        self.example = f"python -m fork {self.name} {example}".rstrip()

    def format_epilog(self, ctx, formatter):
        with formatter.section("Example"):
            formatter.write_text(self.example)


class Group(click.Group):
    """Lists its commands by what they are for; turns an error or Ctrl-C into one line."""

    command_class = Command
    groups = {
        "Build": ("install", "graft", "source", "site"),
        "Test": (
            *("test", "test-upstream", "test-stack", "test-sanitizers", "cuda-check"),
            *("course", "lint"),
        ),
        "Stack": (
            *("stack", "new", "check", "tree", "apply"),
            *("commits", "absorb", "export", "review"),
        ),
        "Measure": ("bench", "bench-gpu"),
    }

    def format_commands(self, ctx, formatter):
        for title, names in self.groups.items():
            with formatter.section(title):
                rows = [(name, self.commands[name].get_short_help_str(100)) for name in names]
                formatter.write_dl(rows)

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
