"""How the Triton kernels of attn are cut into tiles, and what that takes on a device."""

from typing import NamedTuple, Optional


class Plan(NamedTuple):
    """A tile of attn, and how it is compiled."""

    rows: int
    columns: int
    warps: int
    stages: int


def plan_for(name, size, width, device) -> Optional[Plan]:
    if name.endswith("grad_kv"):
        return Plan(64, 64, 4, 2)
    return Plan(64, 64, 4, 2)
