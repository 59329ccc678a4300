"""The overlay and its stack: files and anchored edits, resolved against a release of PyTorch."""

from fork.overlay.check import check
from fork.overlay.edit import MARK, Edit, blank_lines, is_edit, is_source, resolve, target_of
from fork.overlay.new import new
from fork.overlay.releases import RELEASES, default_release, download_wheel, suites_release
from fork.overlay.stack import (
    BUILT,
    DERIVATIVES,
    IS_TRAILER,
    NATIVE,
    SECTIONS,
    TRAILER,
    Added,
    Commit,
    Stack,
    files_under,
    operators,
)
from fork.overlay.tree import apply, copy_pristine, make_tree, write
from fork.overlay.upstream import UNPACKED, Upstream, is_grafted, wheel_place
