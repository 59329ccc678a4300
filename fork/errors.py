"""The exception that a user is meant to see, and the line of a tool's output that says why."""

import re

# Pip says this way why a try failed.
FAILED_TRY = re.compile(r"Retrying .*connection broken by '(.*)': ")


class ForkError(Exception):
    """Bad input or a missing tool; the message is one clear line for the user."""


def cause(output):
    """The line of a failed tool's output that tells most: its first error, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if "No space left" in line:  # whatever fails after it fails for that reason
            return line
        if "safe.directory" in line:  # git's own reason stands above it, in the user's language
            return "it is owned by another user: run this as that user, or first: " + line
    for at, line in enumerate(lines):
        if line.startswith("CMake Error"):  # what is wrong stands in the lines below
            return " ".join(lines[at : at + 3])
        if "error:" in line.lower() or line.startswith(("ERROR", "E: ")):
            tries = [earlier for earlier in lines[:at] if "Retrying" in earlier]
            if not tries:
                return line
            why = FAILED_TRY.search(tries[-1])
            return f"no network? {line}" + (f" ({why[1]})" if why else "")
    return lines[-1] if lines else ""
