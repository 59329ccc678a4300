"""PyTorch from source: Debian's pristine source, and all of it built with the stack on it."""

from fork.source.build import build_whole, configured, table
from fork.source.debian import KEYRING, mirrors, pristine
from fork.source.place import Place, checkout
