"""What every lesson ends with: an attempt at its exercise, put before the lesson's checker."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # where aten/, test/, fork/ are


def report(check: Callable[..., None], attempt: Callable) -> None:
    """Prints what `check` says of `attempt`: still to do, right, or what is wrong with it.

    Args:
        check: called with `attempt`; raises an AssertionError that says what is wrong.
        attempt: a function or a class of the reader's; while it raises a NotImplementedError,
            nothing is wrong.
    """
    try:
        check(attempt)
    except NotImplementedError:
        print(f"Exercise: to do. Fill in `{attempt.__name__}` and run this file again.")
    except AssertionError as error:
        print(f"Exercise: not yet. {error}")
    except Exception as error:  # in the attempt: the reader wants to know the line
        traceback.print_exc()
        print(f"Exercise: not yet. {type(error).__name__}: {error}")
    else:
        print("Exercise: solved.")
