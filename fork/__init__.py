"""The machinery that carries an operator on top of PyTorch: overlay, stack, graft."""

# Python reads this file first, and an old one can read no other.
import sys

if sys.version_info < (3, 10):
    sys.exit(
        "error: Python 3.10 or newer is needed, and this is {}; name one with PYTHON=".format(
            sys.version.split()[0]
        )
    )
