"""The wheel's generated headers, with what our operators add to them."""

from __future__ import annotations

from fork.errors import ForkError


def merge(name: str, none: str, ours: str, wheel: str) -> str | None:
    """The wheel's header with our operators' lines, after its own operators'.

    `none` and `ours` are what the generator makes of it for no operator and for ours alone: what
    tells them apart are our lines, and the text below them says where they belong. None if our
    operators add nothing.
    """
    none_lines, our_lines = (_lines(text) for text in (none, ours))
    most = min(len(none_lines), len(our_lines))
    above = _common(none_lines, our_lines, most)
    below = _common(none_lines[::-1], our_lines[::-1], most - above)
    if "".join(none_lines[above : len(none_lines) - below]).strip():
        raise ForkError(f"{name}: our operators change it in more than one place")
    added = our_lines[above : len(our_lines) - below]
    if not added:
        return None
    lines, rest = wheel.splitlines(keepends=True), our_lines[len(our_lines) - below :]
    # The last place, for some wheels wrap a header in an #if.
    for at in range(len(lines) - below, -1, -1):
        if lines[at : at + below] == rest:
            return "".join(lines[:at] + added + lines[at:])
    raise ForkError(f"{name}: the wheel's is not what its generator makes")


def _lines(text: str) -> list[str]:
    """The lines, without that which says where the template was."""
    return [x for x in text.splitlines(keepends=True) if not x.startswith("// @generated from")]


def _common(one: list[str], other: list[str], most: int) -> int:
    """How many lines both begin with, `most` at most."""
    return next((i for i in range(most) if one[i] != other[i]), most)
