"""The one exception that a user of `python -m fork` is meant to see."""


class ForkError(Exception):
    """Bad input or a missing tool; the message is one clear line for the user."""
