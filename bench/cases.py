"""What is measured: the contenders; cases, with the work that each needs and its targets.

With ``q`` (m, d), ``k`` (n, d), ``v`` (n, e), all of them ``batch`` times::

    attn = tanh(q @ k.T)  # (m, n)
    output = attn @ v  # (m, e)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# The contenders, by the names that the report uses.
ATTN, EAGER, COMPILE, FUNCTION, JAX = "attn", "eager", "compile", "Function", "jax"
SDPA, CUDNN, FLEX, EXTENSION = "sdpa", "cudnn", "flex", "extension"
KERNEL = "kernel"  # attn's own, where a call is so small that it is composed
TRITON = "triton"  # attn's kernels in Triton, where it has others in C++
TITLES = {
    ATTN: "torch.attn",
    EAGER: "eager",
    COMPILE: "torch.compile",
    FUNCTION: "autograd.Function",
    JAX: "jax.jit",
    SDPA: "SDPA",
    CUDNN: "SDPA by cuDNN",
    KERNEL: "its kernel",
    TRITON: "by Triton",
}

# The clock of a row. On a GPU it is the host's only if the host is what a caller waits for.
CPU, HOST, EVENTS = "cpu", "host", "events"

# A round counts as disturbed if others took more than this share of the machine.
QUIET = 0.05

SHORT = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
SIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}

# forward: without gradients. step: forward, and backward from a gradient of output, as a
# model has it. both: a step in which attn has a gradient too.
MODES = ("forward", "step", "both")
# These measure attn_output, without and with a mask, beside the composed maths. tangent: the
# output and its tangent for tangents of all inputs. double backward: that alone, for gradients of
# all gradients. third order: the gradients of k and v from one of second derivatives by q, as a
# field is trained on these.
THIRD_ORDER = "third order"
HIGHER_ORDER_MODES = (
    *("tangent", "double backward", "causal tangent", "causal double backward"),
    THIRD_ORDER,
)
FIELD_MODES = ("tangent", "double backward", THIRD_ORDER)  # of fields, whose q has few columns
OUTPUT_MODES = ("output", "output step", "causal", "causal step", *HIGHER_ORDER_MODES)


# On a GPU, a forward that moves fewer bytes than this waits for the host, not for the GPU.
LAUNCH_BOUND = 1 << 20


class Work(NamedTuple):
    """The least work of one pass: each value is read once, each result written once."""

    flops: int
    read: int  # bytes
    written: int

    @property
    def moved(self) -> int:
        return self.read + self.written


class Target(NamedTuple):
    """The targets of a case in one mode."""

    eager: float = 1.0  # times as fast as
    compile: float | None = None
    roofline: float | None = None  # fraction of it
    scratch: float | None = None  # fraction of attn's bytes, at most


@dataclass(frozen=True)
class Case:
    dtype: str
    n: int
    d: int = 64
    m: int = 0  # 0 is n
    e: int = 0  # 0 is d
    batch: int = 0  # 0 is a plain matrix
    targets: dict[str, Target] = field(default_factory=dict, hash=False)
    modes: tuple[str, ...] = ("forward", "step")
    tf32: bool = False  # matmul may round float32 to TF32

    def __post_init__(self) -> None:
        object.__setattr__(self, "m", self.m or self.n)
        object.__setattr__(self, "e", self.e or self.d)

    @property
    def name(self) -> str:
        words = ["tf32" if self.tf32 else SHORT[self.dtype]]
        if self.batch:
            words.append(f"{self.batch}x")
        if self.m != self.n:
            words.append(f"m={self.m}")
        words += [f"n={self.n}", f"d={self.d}"]
        if self.e != self.d:
            words.append(f"e={self.e}")
        return " ".join(words)

    @property
    def sizes(self) -> dict[str, int | str]:
        """The fields that the case can be made from."""
        return {x: getattr(self, x) for x in ("dtype", "batch", "m", "n", "d", "e", "tf32")}

    @property
    def arithmetic(self) -> str:
        """The dtype whose peak limits the products."""
        return "tf32" if self.tf32 else self.dtype

    @property
    def launch_bound(self) -> bool:
        return self.passes("forward")[0].moved < LAUNCH_BOUND

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of q, k and v."""
        batch = (self.batch,) if self.batch else ()
        matrices = (self.m, self.d), (self.n, self.d), (self.n, self.e)
        return tuple(batch + matrix for matrix in matrices)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.shapes[0][:-1], self.e)

    @property
    def attn_shape(self) -> tuple[int, ...]:
        return (*self.shapes[0][:-1], self.n)

    def bytes(self, elements: int) -> int:
        return elements * SIZES[self.dtype] * (self.batch or 1)

    @property
    def attn_bytes(self) -> int:
        return self.bytes(self.m * self.n)

    def passes(self, mode: str) -> list[Work]:
        """Returns the work of the forward and, with gradients, of the backward, without tanh."""
        m, n, d, e = self.m, self.n, self.d, self.e
        inputs, output, attn = m * d + n * d + n * e, m * e, m * n
        if mode in OUTPUT_MODES:
            square = min(m, n)
            masked = square * (square - 1) // 2 + m * (n - square) if "causal" in mode else 0
            each = 2 * (attn - masked) * (self.batch or 1)
            forward = Work(each * (d + e), self.bytes(inputs), self.bytes(output))
            if "tangent" in mode:
                flops = each * (3 * d + 2 * e)
                return [forward, Work(flops, self.bytes(2 * inputs), self.bytes(output))]
            if "double backward" in mode:
                flops, moved = each * (7 * d + 5 * e), self.bytes(inputs + output)
                return [Work(flops, moved + self.bytes(inputs), moved)]
            if mode == THIRD_ORDER:
                # Three products of q's columns and one of v's for the scores, as many for results.
                read = self.bytes(inputs + output + 2 * m * d)
                return [Work(each * (6 * d + 2 * e), read, self.bytes(n * d + n * e))]
            if "step" not in mode:
                return [forward]
            # The backward makes q @ k.T again.
            backward = each * (3 * d + 2 * e), self.bytes(inputs + output), self.bytes(inputs)
            return [forward, Work(*backward)]
        flops = 2 * attn * (d + e) * (self.batch or 1)
        forward = Work(flops, self.bytes(inputs), self.bytes(output + attn))
        if mode == "forward":
            return [forward]
        # grad_output @ v.T, grad_q, grad_k and grad_v: two products for each one of forward.
        read = inputs + output + attn + (attn if mode == "both" else 0)
        return [forward, Work(2 * flops, self.bytes(read), self.bytes(inputs))]


ROOFLINE = {"forward": 0.8, "step": 0.7}


def targets(forward: tuple, step: tuple, **more) -> dict[str, Target]:
    """Makes targets from (times as fast as eager, as torch.compile) for each mode."""
    return {"forward": Target(*forward, **more), "step": Target(*step, **more)}


def near_roofline(aims: dict[str, Target] | None = None, **step) -> dict[str, Target]:
    """Adds the targets of ROOFLINE; `step` is for the step alone."""
    aims = aims or {mode: Target() for mode in ROOFLINE}
    aims = {mode: aim._replace(roofline=ROOFLINE[mode]) for mode, aim in aims.items()}
    return aims | {"step": aims["step"]._replace(**step)}


def rows(cases: tuple[Case, ...]) -> Iterator[tuple[Case, str]]:
    """Yields every case in each of its modes."""
    for case in cases:
        for mode in case.modes:
            yield case, mode
