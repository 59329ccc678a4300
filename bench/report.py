"""The report: ratios of times, beside their targets, as lines and as a table."""

from statistics import geometric_mean, median, quantiles
from typing import Any, NamedTuple

from cases import (
    ATTN,
    COMPILE,
    CUDNN,
    EAGER,
    FUNCTION,
    HOST,
    JAX,
    KERNEL,
    MODES,
    OUTPUT_MODES,
    QUIET,
    SDPA,
    SHORT,
    TITLES,
    TRITON,
    Target,
)

BELOW = 0.95  # times as fast as eager: what a sweep counts as slower
WORST = 10  # of a sweep, which its summary names

TOO_LATE = "no time was left"

Row = dict[str, Any]

ANY = Target()  # every case has it
OTHERS = (EAGER, COMPILE, FUNCTION, JAX, SDPA, CUDNN, KERNEL, TRITON)
ROOFLINE, SCRATCH = "roofline", "scratch"
COLUMNS = (*OTHERS, ROOFLINE, SCRATCH)

HEAD = """\
# torch.attn on a {title}

{machine}

{peaks}{clock}In each round all take a turn, in rotated order. A figure gives the median time of \
`torch.attn`, and how many times as fast it was as the others, the median of the rounds' ratios. \
In parentheses: what is aimed at. *roofline*: how much of the speed \
that the machine's peaks allow, at which the multiply-adds of the matrix products or the bytes \
that must move would take all the time{roofline}. *scratch*: the peak of memory above inputs, \
outputs and gradients, as a fraction of `attn`; eager's beside it.

{verdict}{sweeps}
"""
# The texts of a device's report: its name, how it was timed, what its roofline is.
WORDS = {
    "cpu": {
        "title": "CPU",
        "clock": "",
        "roofline": """; *with pages*: of the speed they allow where the system has to provide \
zeroed pages for `attn` too, as it has for tensors of 32 MiB and more, which malloc doesn't keep""",
    },
    "cuda": {
        "title": "GPU",
        "clock": """Times are the GPU's own: CUDA events around each call, before which the L2 \
cache was flushed and the call queued, so that the GPU doesn't wait for the host. A time marked \
*host* is of a small case, which does: the host's time per call, of a block of calls after which \
it waits for the GPU. *tf32* is float32 where matmul may round to TF32; *fp32* where it may \
not. """,
        "roofline": """, forward and backward one after the other. Peaks are those of torch's own \
products, fills, sums and copies; more than 100% is possible: in fp32 for a kernel that \
multiplies on tensor cores, which torch's product does not, and for what stays in the L2 cache""",
    },
}

TITLES_OF_MODES = {
    "forward": "Forward",
    "step": "Step: forward, and backward from `output`",
    "both": "Step: forward, and backward from `output` and `attn`",
    "output": "attn_output",
    "output step": "attn_output: forward and backward",
    "causal": "attn_output, causal",
    "causal step": "attn_output, causal: forward and backward",
    "tangent": "attn_output and its tangent",
    "double backward": "attn_output: double backward",
    "causal tangent": "attn_output and its tangent, causal",
    "causal double backward": "attn_output: double backward, causal",
    "third order": "attn_output: third order",
}


class Aim(NamedTuple):
    value: float
    aim: float
    met: bool


def ratios(row: Row, other: str, ours: str = ATTN) -> list[float]:
    """Returns how many times as fast as `other` ours was, in each round."""
    seconds = row["seconds"]
    return [b / a for a, b in zip(seconds.get(ours, []), seconds.get(other, []), strict=False)]


def slower(row: Row) -> bool:
    """Returns whether attn was slower than eager in three of four rounds (equals are in half)."""
    found = ratios(row, EAGER)
    return len(found) > 1 and quantiles(found, n=4, method="inclusive")[2] < 1


def value(row: Row, what: str) -> float | None:
    """Returns the figure of a column, or None."""
    ours = row["seconds"].get(ATTN)
    if not ours:
        return None
    if what == ROOFLINE:
        return row["roofline"] / median(ours) if row.get("roofline") else None
    if what == SCRATCH:
        scratch = row.get("scratch", {}).get(ATTN)
        return None if scratch is None else scratch / row["attn_bytes"]
    # It is the median of the rounds' ratios, not the ratio of medians: what slows the machine for
    # a while slows both sides of a round.
    found = ratios(row, what)
    return median(found) if found else None


def aims(row: Row) -> dict[str, Aim]:
    """Returns for each column what was measured, the target, and whether it is met."""
    found = {}
    for what, aim in row.get("target", {}).items():
        x = value(row, what)
        if x is None or aim is None:
            continue
        met = x <= aim if what == SCRATCH else x >= aim
        if what == EAGER and aim == ANY.eager:
            met = not slower(row)
        found[what] = Aim(x, aim, met)
    return found


def noise(row: Row) -> float:
    """Returns the interquartile range of attn's time, divided by its median."""
    ours = row["seconds"].get(ATTN, [])
    if len(ours) < 2:
        return 0.0
    low, middle, high = quantiles(ours, n=4, method="inclusive")
    return (high - low) / middle


def figure(what: str, x: float) -> str:
    if what in OTHERS:
        return f"{x:.2f}" if x < 10 else f"{x:.1f}"
    return f"{x:.1%}" if x < 0.1 else f"{x:.0%}"


def cell(row: Row, what: str) -> str:
    x = value(row, what)
    if x is None:
        return ""
    text = figure(what, x)
    if what == SCRATCH and EAGER in row["scratch"]:
        text += f", eager {figure(what, row['scratch'][EAGER] / row['attn_bytes'])}"
    if aim := aims(row).get(what):
        sign = "≤" if what == SCRATCH else "≥"
        bound = f"{aim.aim:g}" if what in OTHERS else f"{aim.aim:.0%}"
        if not aim.met or (what, aim.aim) != (EAGER, ANY.eager):
            text += f" ({sign} {bound} {'✓' if aim.met else '✗'})"
    if what == ROOFLINE and row.get("pages"):
        share = (row["roofline"] + row["pages"]) / median(row["seconds"][ATTN])
        text += f", with pages {figure(what, share)}"
    return text


def duration(seconds: float) -> str:
    unit, scale = ("s", 1) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{seconds * scale:.3g} {unit}"


def time(row: Row) -> str:
    ours = row["seconds"].get(ATTN)
    if not ours:
        return "-"
    return duration(median(ours)) + (" host" if row.get("clock") == HOST else "")


def line(row: Row) -> str:
    """Returns a row's line, which is printed when it is measured."""
    words = [f"{row['case']:<24} {row['mode']:<8} {time(row):>8} ±{noise(row):<4.0%}"]
    cells = {what: cell(row, what) for what in COLUMNS}
    words += [f"{what} {text}" for what, text in cells.items() if text]
    if row["disturbed"] > QUIET:
        words.append(f"others took {row['disturbed']:.0%} of the machine")
    return "  ".join(words)


def below(row: Row) -> bool:
    """Returns whether attn is slower than eager by more than the noise explains."""
    return value(row, EAGER) < BELOW


def threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def sweep_summary(sweep: dict) -> str:
    """Sums up a sweep over random shapes in two sentences."""
    rows = sweep["rows"]
    if not rows:
        return "No random shape was measured."
    found = [value(row, EAGER) for row in rows]
    slow = [row for row in rows if below(row)]
    text = (
        f"Of {len(rows)} random shapes (seed {sweep['seed']}, {threads(sweep['threads'])}) "
        f"{len(slow) or 'none'} {'is' if len(slow) < 2 else 'are'} below {BELOW} of eager; "
        f"geometric mean {geometric_mean(found):.2f}, least {min(found):.2f}."
    )
    worst = sorted(slow, key=lambda row: value(row, EAGER))[:WORST]
    names = [f"{row['case']} {row['mode']} ({value(row, EAGER):.2f})" for row in worst]
    return text + (f" The slowest: {', '.join(names)}." if names else "")


def left_out(row: Row) -> list[str]:
    """Returns which contenders are missing, and why."""
    return [
        f"{name} left out of {row['case']} {row['mode']}: {why}"
        for name, why in row["absent"].items()
        if not (name == FUNCTION and row["batch"])  # it takes matrices only
    ]


def disturbances(rows: list[Row]) -> str:
    found = [f"{r['case']} {r['mode']}" for r in rows if r["disturbed"] > QUIET]
    if not found:
        return ""
    return f"\nOther processes took more than {QUIET:.0%} of the machine in: {', '.join(found)}.\n"


def device_of(result: dict) -> str:
    """Returns the device: the name of its file in devices/, and of the results' files."""
    return result.get("device", "cpu")  # older results do not say


def unmeasured(result: dict) -> str:
    """Returns a line for each reason why rows were not measured."""
    by_reason: dict[str, list[str]] = {}
    for row, why in result.get("unmeasured", {}).items():
        by_reason.setdefault(why, []).append(row)
    return "".join(
        f"not measured, as {why}: {', '.join(rows)}\n" for why, rows in by_reason.items()
    )


def verdict(rows: list[Row]) -> str:
    missed = [
        f"{row['case']} {row['mode']} {what}"
        for row in rows
        for what, aim in aims(row).items()
        if not aim.met
    ]
    total = sum(len(aims(row)) for row in rows)
    text = f"{total - len(missed)} of {total} targets are met"
    return text + (f"; missed: {', '.join(missed)}." if missed else ".")


def describe(about: dict) -> str:
    """Describes the machine, and which kernel was measured, in one line."""
    parts = []
    if "gpu" in about:
        parts += [
            f"{about['gpu']}, {about['multiprocessors']} SMs of {about['capability']}",
            f"memory {about['memory'] / 2**30:.0f} GiB",
            f"L2 {about['l2'] / 2**20:.0f} MiB",
            f"CUDA {about['cuda']}",
        ]
        if "driver" in about:
            parts.append(f"driver {about['driver']}")
    parts += [f"{about['cpu']}, {about['threads']} of {about['cores']} cores"]
    if "busy" in about:
        parts.append(f"beside {about['busy']} busy processes")
    parts += [f"{name} {size}" for name, size in about["caches"].items()]
    parts += [about["isa"], f"huge pages: {about['huge pages']}"]
    for name in ("python", "torch", "jax"):
        if name in about:
            parts.append(f"{name} {about[name]}")
    if "commit" in about:
        parts.append(f"kernel of commit {about['commit']}")
    return "; ".join(parts) + "."


def describe_peaks(peaks: dict) -> str:
    by_kind = peaks["flops"].items()
    unit, scale = ("T", 1e12) if max(peaks["flops"].values()) > 1e13 else ("G", 1e9)
    flops = ", ".join(f"{SHORT.get(kind, kind)} {x / scale:.0f}" for kind, x in by_kind)
    lines = [f"Measured peaks in {unit}FLOP/s: {flops}. In GB/s, by the working set:\n"]
    kinds = list(peaks["bandwidth"])
    sizes = sorted({int(size) for by in peaks["bandwidth"].values() for size in by})
    of_size, shift = ("MiB", 20) if min(sizes) >= 1 << 20 else ("KiB", 10)
    heads = [f"{size >> shift} {of_size}" for size in sizes]
    lines.append(f"| | {' | '.join(heads)} |")
    lines.append("| --- |" + " ---: |" * len(sizes))
    for kind in kinds:
        by_size = {int(size): x for size, x in peaks["bandwidth"][kind].items()}
        rates = [by_size[size] / 1e9 if size in by_size else None for size in sizes]
        cells = ["" if x is None else f"{x:.0f}" if x >= 1000 else f"{x:.3g}" for x in rates]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def markdown(result: dict) -> str:
    peaks = result.get("peaks")
    text = HEAD.format(
        **WORDS[device_of(result)],
        machine=describe(result["machine"]),
        peaks=describe_peaks(peaks) if peaks else "",
        verdict=verdict(result["rows"]),
        sweeps="".join(f" {sweep_summary(x)}" for x in result.get("sweeps", ())),
    )
    text += disturbances(result["rows"])
    text += "".join(f"\n{line}\n" for line in unmeasured(result).splitlines())
    text += "".join(f"\n{why}\n" for row in result["rows"] for why in left_out(row))
    for mode in (*MODES, *OUTPUT_MODES):
        rows = [row for row in result["rows"] if row["mode"] == mode]
        columns = [what for what in COLUMNS if any(cell(row, what) for row in rows)]
        if not rows:
            continue
        heads = ["case", "time", *(TITLES.get(what, what) for what in columns)]
        text += f"\n## {TITLES_OF_MODES[mode]}\n\n| {' | '.join(heads)} |\n"
        text += "| --- |" + " ---: |" * (len(heads) - 1) + "\n"
        for row in rows:
            cells = [row["case"], time(row), *(cell(row, what) for what in columns)]
            text += f"| {' | '.join(cells)} |\n"
    return text
