"""How the Triton kernels of attn are cut into tiles, and what that takes on a device."""

import functools
from typing import NamedTuple, Optional


class Plan(NamedTuple):
    """A tile of attn, and how it is compiled."""

    rows: int
    columns: int
    warps: int
    stages: int
    shared: int  # bytes of shared memory of a block, of the variant that takes most


WIDTHS = (64, 128, 256)  # vectors of q and v have at most so many elements

# For a target and the size of an element in bytes: the plans of each kernel, one column for each
# of the WIDTHS. A plan is rows x columns x warps x stages: bytes of shared memory. Where a kernel
# has several lines, the first plan that fits is taken: the faster ones come first.
TABLE = {
}


@functools.cache
def plans() -> dict[tuple[str, int], dict[tuple[str, int], list[Plan]]]:
    """The table: for a target and a size, for a kernel and a width, the plans in order."""
    table: dict[tuple[str, int], dict[tuple[str, int], list[Plan]]] = {}
    for key, text in TABLE.items():
        kernels = table.setdefault(key, {})
        for line in text.split("\n"):
            name, *cells = line.split() or [""]
            for width, cell in zip(WIDTHS, cells):
                if cell != "-":
                    plan = Plan(*map(int, cell.replace(":", "x").split("x")))
                    kernels.setdefault((name, width), []).append(plan)
    return table


def target_of(device) -> Optional[str]:
    """Which target's plans a device takes; None if it has none."""
    if device.target == "cpu":  # Triton's interpreter, which takes all that can be written
        return "sm_90"
    if device.target != "cuda":  # The plans for AMD need the least of a device.
        return "gfx942"
    if device.capability < 80:
        return None
    # Those of 12.0 multiply with the instructions of 8.0, and have as little shared memory.
    if device.capability < 90 or device.capability >= 120:
        return "sm_80"
    return "sm_90" if device.capability < 100 else "sm_100"


def plan_for(name: str, size: int, width: int, device) -> Optional[Plan]:
    """The plan of a kernel for vectors of so many elements; None if nothing fits the device."""
    kernels = plans().get((target_of(device), size), {})
    width = next((w for w in WIDTHS if width <= w), 0)
    listed = kernels.get((name, width), [])
    return next((p for p in listed if p.shared <= device.shared_memory), None)
