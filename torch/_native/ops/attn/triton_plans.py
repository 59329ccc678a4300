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
    # Nobody has measured these. By the compiler's report they are the largest tiles of those
    # tried on 9.0 that spill nothing, or a few registers outside of the loops. Second lines are
    # for 8.6, 8.9 and 12.0, where a block has 99 KiB.
    ("sm_80", 2): """
        output           128x64x4x3:49152    128x64x8x3:98304    128x32x8x2:106496
        output           -                   -                   64x32x8x2:69632
        attn             128x64x8x3:65536    128x64x8x3:114688   64x32x8x2:73728
        attn             -                   128x64x8x2:81920    -
        grad_q           128x64x8x3:65536    128x64x8x3:131072   64x32x8x2:102400
        grad_q           -                   128x64x8x2:98304    32x32x8x2:67584
        grad_kv          64x128x8x3:65536    32x128x8x2:86016    32x64x8x2:114688
        grad_kv          -                   -                   32x32x8x2:81920
        stored_grad_q    128x64x8x3:98304    128x32x8x2:65536    128x32x8x2:114688
        stored_grad_q    -                   -                   64x32x8x2:73728
        stored_grad_kv   32x128x8x2:32768    32x64x8x2:40960     32x32x8x2:65536
        tangent          128x64x8x3:98304    128x32x8x2:98304    32x16x8x2:66560
        tangent_grad_q   128x32x8x2:65536    128x16x8x2:114688   16x32x8x2:91136
        tangent_grad_q   -                   32x32x8x2:59392     -
        tangent_grad_kv  32x64x8x2:49152     32x32x8x2:65536     32x16x8x2:98304
        third_grad_q     32x64x8x2:73728     16x32x8x2:70656     16x16x8x2:90624
        third_grad_kv    64x32x8x2:69632     64x16x8x2:108544    32x16x8x2:132096
        third_grad_kv    -                   32x16x8x2:66560     16x16x8x2:90624
    """,
    # An H200 measured output at 64 and 128 with these tiles, in kernels that make the same
    # products: 499 and 584 TFLOPS. The tiles of 128x64 and 64x128 with 8 warps are others that it
    # tried. The rest is by the compiler's report: the largest tiles that spill nothing. At 128,
    # grad_kv and stored_grad_kv of 64x128 with 8 warps spill 60 to 200 bytes, most of them outside
    # of the loops.
    ("sm_90", 2): """
        output           128x64x4x3:65536    128x64x8x3:131072   128x32x8x2:131072
        attn             128x64x8x3:81920    128x64x8x3:147456   128x32x8x2:139264
        grad_q           128x64x8x3:81920    128x64x8x3:163840   128x32x8x2:196608
        grad_kv          64x128x8x3:81920    32x128x8x2:98304    32x32x8x2:81920
        stored_grad_q    128x64x8x3:114688   128x64x8x3:180224   128x32x8x2:147456
        stored_grad_kv   64x128x8x3:102400   32x64x8x3:77824     32x32x8x2:65536
        tangent          128x64x8x3:131072   128x32x8x2:131072   16x32x8x2:82944
        tangent_grad_q   128x32x8x2:81920    128x16x8x2:131072   16x32x8x2:91136
        tangent_grad_kv  32x128x8x2:90112    32x16x8x2:49152     32x16x8x2:98304
        third_grad_q     128x16x8x2:106496   16x16x4x2:45568     16x16x8x2:90624
        third_grad_kv    64x16x8x2:55296     64x16x8x2:108544    32x16x8x2:132096
    """,
    # Nobody has measured these: as on 9.0, by the compiler's report.
    ("sm_100", 2): """
        output           128x64x8x3:66560    128x64x8x3:132096   128x32x8x2:131104
        attn             128x64x4x3:69664    128x64x4x3:135200   128x32x8x2:139296
        grad_q           128x64x8x3:91136    128x64x8x3:181248   128x32x8x2:213040
        grad_kv          64x128x8x3:98368    32x64x8x2:81984     32x32x8x2:81920
        stored_grad_q    128x64x8x3:132096   128x64x8x3:197632   128x32x8x2:147488
        stored_grad_kv   64x128x8x3:155696   32x64x8x2:69680     32x32x8x2:65536
        tangent          128x64x8x3:132096   128x64x8x2:197632   64x32x8x2:197632
        tangent_grad_q   128x32x8x2:94344    64x32x8x2:140288    16x32x8x2:91136
        tangent_grad_kv  32x64x8x2:69752     16x32x8x2:49152     32x16x8x2:98304
        third_grad_q     32x32x8x2:47104     16x16x8x2:45568     16x16x8x2:90624
        third_grad_kv    32x32x8x2:47104     64x16x8x2:108544    32x16x8x2:132096
    """,
    # Nobody has measured these. A block has 64 KiB, and takes a third stage nowhere.
    ("gfx942", 2): """
        output           128x64x8x2:32768    128x32x8x2:32768    64x32x8x2:36864
        attn             128x64x8x2:32768    128x32x8x2:32768    64x32x8x2:36864
        grad_q           128x32x8x2:16384    128x32x8x2:32768    32x16x8x2:17408
        grad_kv          32x128x8x2:24576    16x128x8x2:32768    16x32x8x2:18432
        stored_grad_q    128x64x8x2:49152    128x32x8x2:32768    32x32x8x2:36864
        stored_grad_kv   32x128x8x2:32768    16x128x8x2:32768    16x32x8x2:18432
        tangent          128x32x8x2:20480    128x16x8x2:32768    32x16x8x2:32768
        tangent_grad_q   64x32x4x2:20480     64x16x4x2:18432     16x16x4x2:32768
        tangent_grad_kv  32x64x4x2:20480     16x64x4x2:16384     16x16x4x2:24576
        third_grad_q     64x16x4x2:16384     64x16x4x2:28672     -
        third_grad_kv    32x16x4x2:20480     16x32x4x2:22528     -
    """,
    # Three products make one of floats, so the tiles are small. Nobody has measured them: they
    # are the largest that spill at most 32 bytes, or those that spill least. A kernel that would
    # spill kilobytes has none.
    ("sm_90", 4): """
        output           64x32x8x2:65536     32x32x8x2:73728     16x16x8x2:67584
        attn             64x32x8x2:65536     32x32x8x2:73728     16x16x8x2:67584
        grad_q           64x32x8x2:98304     32x32x8x2:98304     16x16x8x2:98304
        grad_kv          32x32x8x2:49152     32x16x8x2:65536     16x16x8x2:98304
        stored_grad_q    32x32x8x2:49152     32x32x8x2:81920     16x16x8x2:69632
        stored_grad_kv   32x32x8x2:45056     32x16x8x2:67584     16x16x8x2:82944
        tangent          32x32x8x2:73728     16x32x8x2:102400    -
        tangent_grad_q   16x32x4x2:53248     16x16x8x2:65536     -
        tangent_grad_kv  32x16x4x2:49152     16x16x8x2:81920     -
        third_grad_q     16x16x8x2:45056     -                   -
        third_grad_kv    16x16x8x2:53248     -                   -
    """,
    # These are the tiles of 9.0.
    ("sm_100", 4): """
        output           64x32x8x2:49184     32x32x8x2:73728     16x16x8x2:67584
        attn             64x32x8x2:57376     32x32x8x2:73728     16x16x8x2:67584
        grad_q           64x32x8x2:73768     32x32x8x2:98304     16x16x8x2:98304
        grad_kv          32x32x8x2:49152     32x16x8x2:65536     16x16x8x2:98304
        stored_grad_q    32x32x8x2:49152     32x32x8x2:81920     16x16x8x2:69632
        stored_grad_kv   32x32x8x2:45056     32x16x8x2:67584     16x16x8x2:82944
        tangent          32x32x8x2:73728     16x32x8x2:102400    -
        tangent_grad_q   16x32x4x2:53248     16x16x8x2:65536     -
        tangent_grad_kv  32x16x4x2:49152     16x16x8x2:81920     -
        third_grad_q     16x16x8x2:45056     -                   -
        third_grad_kv    16x16x8x2:53248     -                   -
    """,
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
    if device.target == "cpu":  # Triton's interpreter
        return "sm_90"
    # No compiler was asked for XPU. The plans for AMD need the least shared memory.
    if device.target != "cuda":
        return "gfx942"
    if device.capability < 80:
        return None
    # Devices of 12.0 multiply by the instructions of 8.0. They have the shared memory of 8.6.
    if device.capability < 90 or device.capability >= 120:
        return "sm_80"
    return "sm_90" if device.capability < 100 else "sm_100"


def plan_for(name: str, size: int, width: int, device) -> Optional[Plan]:
    """The plan of a kernel for vectors of so many elements; None if nothing fits the device."""
    kernels = plans().get((target_of(device), size), {})
    width = next((w for w in WIDTHS if width <= w), 0)
    listed = kernels.get((name, width), [])
    return next((p for p in listed if p.shared <= device.shared_memory), None)
