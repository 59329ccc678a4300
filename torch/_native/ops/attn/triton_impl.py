"""attn and attn_output by Triton: which calls its kernels take, and how they are launched.

What they don't take is composed of other operators, as on any device without a kernel: see
ATen/native/Attn.cpp and AttnOutput.cpp. The formulas are in triton_kernels.py.
"""

import functools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .triton_plans import Plan, plan_for


# A call with fewer multiplications is composed: to launch a kernel from Python takes longer than
# it saves. The number is an estimate, until a GPU has measured it.
LEAST_WORK = float(os.environ.get("TORCH_ATTN_TRITON_LEAST_WORK", 1e9))
# Tensor cores truncate sums, so float is composed until its tests have passed on a GPU.
FLOAT = os.environ.get("TORCH_ATTN_TRITON_FLOAT") == "1"
WIDEST = 256  # d and e
LONGEST = 2**33  # rows of all samples, of which a program takes at least 16
# Offsets within a tile have 32 bits, and a tile has at most 256 rows.
LARGEST_STRIDE = 2**31 // 256 - 1

# The matrices that a kernel reads rows of. Their elements must be neighbors in memory; those of
# attn and its gradient may lie anywhere.
TANGENTS_OF_K = ("k_tangent", "v_tangent", "u_k", "u_v", "w_k", "w_v")
TANGENTS = ("q_tangent", "u_q", "w_q", "w_grad_output", *TANGENTS_OF_K)
VECTORS = ("q", "k", "v", "grad_output", *TANGENTS)
OF_K = ("k", "v", *TANGENTS_OF_K, "grad_k", "grad_v")


class Device(NamedTuple):
    """What is asked about a device."""

    target: str  # "cuda", "hip", "xpu"; "cpu" for Triton's interpreter
    capability: int  # 90 for 9.0
    shared_memory: int  # bytes that a block can have


@functools.cache
def device_of(device: torch.device) -> Device:
    """All that depends on the device."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        target = "hip" if torch.version.hip else "cuda"
        capability = 10 * found.major + found.minor
        memory = getattr(found, "shared_memory_per_block_optin", 0)
        return Device(target, capability, memory or 65536)
    if device.type == "xpu":
        found = torch.xpu.get_device_properties(device)
        return Device("xpu", 0, getattr(found, "local_mem_size", 65536))
    return Device("cpu", 0, 2**31)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes the device the current one: Triton launches there."""
    if device.type == "cpu":
        return nullcontext()
    return torch.get_device_module(device.type).device(device.index)


def packed(x: Tensor) -> Tensor:
    """x with the elements of a row beside each other. What is expanded is copied once."""
    once = tuple(slice(0, 1 if stride == 0 else None) for stride in x.stride()[:-1])
    return x[once].contiguous().expand(x.shape)


def padded(size: int) -> int:
    """The size of a tile that holds so many elements: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


class Problem:
    """The sizes of a call, and where in memory its samples are.

    Batch dimensions of size 1 are left out. The others are listed from the last to the first,
    and before the rest those in which k and v have 1, so that samples of q share theirs.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float = 1.0,
    ) -> None:
        self.m, self.d = q.shape[-2:]
        self.n, self.e = v.shape[-2:]
        self.is_causal, self.scale = is_causal, scale
        self.dtype, self.device = q.dtype, q.device
        dims = [i for i in range(q.dim() - 3, -1, -1) if q.size(i) != 1]
        shared = [i for i in dims if k.size(i) == 1]
        self.k_dims = [i for i in dims if k.size(i) != 1]
        self.dims = shared + self.k_dims
        self.sizes = tuple(q.size(i) for i in self.dims)
        self.k_sizes = tuple(q.size(i) for i in self.k_dims)
        self.sharing = math.prod(q.size(i) for i in shared)

    @property
    def work(self) -> int:
        """The multiplications of the forward."""
        return math.prod(self.sizes) * self.m * self.n * (self.d + self.e)

    def plan(self, name: str) -> Optional[Plan]:
        """The kernel's plan; None if there is none for these sizes on this device."""
        size = self.dtype.itemsize
        return plan_for(name, size, max(self.d, self.e), device_of(self.device))

    def tanh(self) -> str:
        """The form of tanh: see triton_kernels.py."""
        if self.dtype == torch.float:
            return "float"
        nvidia = device_of(self.device).target == "cuda"
        return "approx" if nvidia and self.dtype == torch.bfloat16 else "reduced"

    def precision(self) -> str:
        """How tensor cores multiply floats."""
        if self.dtype != torch.float or device_of(self.device).target != "cuda":
            return "ieee"
        allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
        return "tf32" if allowed else "tf32x3"

    def launch(self, name: str, **matrices: Optional[Tensor]) -> None:
        """Runs the kernel of this name, a key of the plans; the others of its matrices are None."""
        from . import triton_kernels

        plan = self.plan(name)
        if plan is None:
            raise AssertionError(f"attn has no plan for {name}")
        of_columns = name.endswith("grad_kv")
        third_order = name.startswith("third_")
        if third_order:
            kernel = triton_kernels._attn_third_order
        elif of_columns:
            kernel = triton_kernels._attn_columns
        else:
            kernel = triton_kernels._attn_rows
        given = dict.fromkeys(kernel.arg_names[: kernel.arg_names.index("sizes")])
        for key, x in matrices.items():
            if x is None:
                continue
            if key in VECTORS and x.stride(-1) != 1:
                x = packed(x)
            dims = self.k_dims if of_columns and key in OF_K else self.dims
            strides = tuple(0 if x.size(i) == 1 else x.stride(i) for i in dims)
            given[key] = (x, x.stride(-2), x.stride(-1), strides or (0,))
        samples, blocks = math.prod(self.sizes), -(-self.m // plan.rows)
        # No query sees a key after the last query, and the first kernel does not read it.
        n = min(self.m, self.n) if self.is_causal else self.n
        if of_columns:
            n = self.n
            given |= {"k_sizes": self.k_sizes or (1,), "sharing": self.sharing}
            samples, blocks = math.prod(self.k_sizes), -(-self.n // plan.columns)
        elif third_order:
            given |= {"k_sizes": (1,), "sharing": 1}
        with on(self.device):
            kernel[(samples * blocks,)](
                **given,
                sizes=self.sizes or (1,),
                m=self.m,
                n=n,
                d=self.d,
                e=self.e,
                scale=self.scale,
                CAUSAL=self.is_causal,
                M_TAIL=self.m % plan.rows != 0,
                N_TAIL=n % plan.columns != 0,
                D_TAIL=self.d != padded(self.d),
                E_TAIL=self.e != padded(self.e),
                TANH=self.tanh(),
                PRECISION=self.precision(),
                BM=plan.rows,
                BN=plan.columns,
                D=padded(self.d),
                E=padded(self.e),
                num_warps=plan.warps,
                num_stages=plan.stages,
                enable_fp_fusion=True,
            )


def takes(
    names: Sequence[str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float = 1.0,
    *,
    grouped: bool = True,
    like_q: Sequence[tuple[Optional[Tensor], int]] = (),
    like_k: Sequence[tuple[Optional[Tensor], int]] = (),
) -> bool:
    """Whether the kernels `names` take these operands.

    They don't take what is a mistake: the composed operator says so. `like_q` and `like_k` have
    the sizes of q and k, but for the last one, which stands beside them.
    """
    if q.dtype not in (torch.bfloat16, torch.half) and not (
        FLOAT and q.dtype == torch.float
    ):
        return False
    batch, dims = q.shape[:-2], q.dim()
    if dims < 2 or k.dim() != dims or v.dim() != dims or not math.isfinite(scale):
        return False
    groups = [(1, size) if grouped else (size,) for size in batch]
    if k.shape[:-2] != v.shape[:-2] or not all(
        map(lambda x, y: x in y, k.shape[:-2], groups)
    ):
        return False
    (m, d), (n, e) = q.shape[-2:], v.shape[-2:]
    if k.shape[-2:] != (n, d) or not 0 < d <= WIDEST or not 0 < e <= WIDEST:
        return False
    of_q = [(x, size) for x, size in like_q if x is not None]
    of_k = [(x, size) for x, size in like_k if x is not None]
    for pairs, first in ((of_q, q), (of_k, k)):
        if any(x.shape != (*first.shape[:-1], size) for x, size in pairs):
            return False
    operands = [q, k, v, *(x for x, _ in of_q + of_k)]
    if any(
        x.dtype != q.dtype
        or x.device != q.device
        or torch._C._is_cow_tensor(x)
        or max(x.stride()[-2:]) > LARGEST_STRIDE
        for x in operands
    ):
        return False
    problem = Problem(q, k, v, is_causal, scale)
    return (
        problem.work >= max(LEAST_WORK, 1)
        and math.prod(problem.sizes) * max(m, n) < LONGEST
        and all(problem.plan(name) for name in names)
    )


def attn_cond(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return takes(["attn"], q, k, v, grouped=False) and v.size(-2) <= LARGEST_STRIDE


def attn_impl(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    attn = q.new_empty((*q.shape[:-1], k.size(-2)))
    output = q.new_empty((*q.shape[:-1], v.size(-1)))
    Problem(q, k, v).launch("attn", q=q, k=k, v=v, attn=attn, output=output)
    return output, attn


def backward_cond(
    grad_output: Optional[Tensor],
    grad_attn: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn: Tensor,
    output_mask: Sequence[bool],
) -> bool:
    names = ["stored_grad_q", "stored_grad_kv"]
    like_q = [(grad_output, v.size(-1)), *((x, k.size(-2)) for x in (attn, grad_attn))]
    return any(output_mask) and takes(names, q, k, v, grouped=False, like_q=like_q)


def backward_impl(
    grad_output: Optional[Tensor],
    grad_attn: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn: Tensor,
    output_mask: Sequence[bool],
) -> tuple[Optional[Tensor], ...]:
    problem = Problem(q, k, v)
    has_scores = grad_output is not None or grad_attn is not None
    grad_q = q.new_empty(q.shape) if output_mask[0] and has_scores else None
    grad_k = q.new_empty(k.shape) if output_mask[1] and has_scores else None
    grad_v = (
        q.new_empty(v.shape) if output_mask[2] and grad_output is not None else None
    )
    given = {"grad_output": grad_output, "stored": attn}
    of_output = None if grad_output is None else v
    if grad_q is not None:
        problem.launch(
            "stored_grad_q",
            k=k,
            v=of_output,
            grad_attn=grad_attn,
            grad_q=grad_q,
            **given,
        )
    if grad_k is not None:
        given |= {"q": q, "v": of_output, "grad_attn": grad_attn}
    if grad_k is not None or grad_v is not None:
        problem.launch("stored_grad_kv", grad_k=grad_k, grad_v=grad_v, **given)
    return grad_q, grad_k, grad_v


def output_cond(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float = 1.0
) -> bool:
    return takes(["output"], q, k, v, is_causal, scale)


def output_impl(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float = 1.0
) -> Tensor:
    output = q.new_empty((*q.shape[:-1], v.size(-1)))
    Problem(q, k, v, is_causal, scale).launch("output", q=q, k=k, v=v, output=output)
    return output


def output_backward_cond(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    output_mask: Sequence[bool],
) -> bool:
    names = ["grad_q", "grad_kv"]
    like_q = [(grad_output, v.size(-1))]
    return any(output_mask) and takes(names, q, k, v, is_causal, scale, like_q=like_q)


def output_backward_impl(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    output_mask: Sequence[bool],
) -> tuple[Optional[Tensor], ...]:
    problem = Problem(q, k, v, is_causal, scale)
    grads = [
        q.new_empty(x.shape) if y else None for x, y in zip((q, k, v), output_mask)
    ]
    grad_q, grad_k, grad_v = grads
    if grad_q is not None:
        problem.launch("grad_q", q=q, k=k, v=v, grad_output=grad_output, grad_q=grad_q)
    if grad_k is not None or grad_v is not None:
        of_k = None if grad_k is None else v
        given = {"q": q, "k": k, "v": of_k, "grad_output": grad_output}
        problem.launch("grad_kv", grad_k=grad_k, grad_v=grad_v, **given)
    return grad_q, grad_k, grad_v


def jvp_cond(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tangent: Optional[Tensor],
    k_tangent: Optional[Tensor],
    v_tangent: Optional[Tensor],
    is_causal: bool,
    scale: float,
) -> bool:
    tangents = (q_tangent, k_tangent, v_tangent)
    return any(x is not None for x in tangents) and takes(
        ["tangent"],
        *(q, k, v, is_causal, scale),
        like_q=[(q_tangent, q.size(-1))],
        like_k=[(k_tangent, q.size(-1)), (v_tangent, v.size(-1))],
    )


def jvp_impl(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tangent: Optional[Tensor],
    k_tangent: Optional[Tensor],
    v_tangent: Optional[Tensor],
    is_causal: bool,
    scale: float,
) -> Tensor:
    tangent = q.new_empty((*q.shape[:-1], v.size(-1)))
    has_scores = q_tangent is not None or k_tangent is not None
    Problem(q, k, v, is_causal, scale).launch(
        "tangent",
        q=q,
        k=k,
        v=v if has_scores else None,
        q_tangent=q_tangent,
        k_tangent=k_tangent,
        v_tangent=v_tangent,
        output_tangent=tangent,
    )
    return tangent


def double_backward_cond(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tangent: Optional[Tensor],
    k_tangent: Optional[Tensor],
    v_tangent: Optional[Tensor],
    is_causal: bool,
    scale: float,
    output_mask: Sequence[bool],
) -> bool:
    tangents = (q_tangent, k_tangent, v_tangent)
    return (
        any(output_mask)
        and any(x is not None for x in tangents)
        and takes(
            ["tangent_grad_q", "tangent_grad_kv"],
            *(q, k, v, is_causal, scale),
            like_q=[(q_tangent, q.size(-1)), (grad_output, v.size(-1))],
            like_k=[(k_tangent, q.size(-1)), (v_tangent, v.size(-1))],
        )
    )


def double_backward_impl(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tangent: Optional[Tensor],
    k_tangent: Optional[Tensor],
    v_tangent: Optional[Tensor],
    is_causal: bool,
    scale: float,
    output_mask: Sequence[bool],
) -> tuple[Optional[Tensor], ...]:
    problem = Problem(q, k, v, is_causal, scale)
    has_scores = q_tangent is not None or k_tangent is not None
    shape = (*q.shape[:-1], v.size(-1))
    tangent = q.new_empty(shape) if output_mask[0] else None
    grad_q = q.new_empty(q.shape) if output_mask[1] else None
    grad_k = q.new_empty(k.shape) if output_mask[2] else None
    grad_v = q.new_empty(v.shape) if output_mask[3] and has_scores else None
    given = {
        "q": q,
        "k": k,
        "v": v,
        "q_tangent": q_tangent,
        "k_tangent": k_tangent,
        "v_tangent": v_tangent,
    }
    if grad_q is not None:
        problem.launch(
            "tangent_grad_q",
            output_tangent=tangent,
            grad_q=grad_q,
            grad_output=grad_output,
            **given,
        )
    elif tangent is not None:
        problem.launch("tangent", output_tangent=tangent, **given)
    if grad_k is not None or grad_v is not None:
        problem.launch(
            "tangent_grad_kv",
            grad_k=grad_k,
            grad_v=grad_v,
            grad_output=grad_output,
            **given,
        )
    return tangent, grad_q, grad_k, grad_v


def triple_backward_cond(
    grad_output: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u_q: Optional[Tensor],
    u_k: Optional[Tensor],
    u_v: Optional[Tensor],
    w_grad_output: Optional[Tensor],
    w_q: Optional[Tensor],
    w_k: Optional[Tensor],
    w_v: Optional[Tensor],
    is_causal: bool,
    scale: float,
    output_mask: Sequence[bool],
) -> bool:
    d, e = q.size(-1), v.size(-1)
    return any(output_mask) and takes(
        ["third_grad_q", "third_grad_kv"],
        *(q, k, v, is_causal, scale),
        like_q=[(grad_output, e), (w_grad_output, e), (u_q, d), (w_q, d)],
        like_k=[(u_k, d), (w_k, d), (u_v, e), (w_v, e)],
    )


def triple_backward_impl(
    grad_output: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u_q: Optional[Tensor],
    u_k: Optional[Tensor],
    u_v: Optional[Tensor],
    w_grad_output: Optional[Tensor],
    w_q: Optional[Tensor],
    w_k: Optional[Tensor],
    w_v: Optional[Tensor],
    is_causal: bool,
    scale: float,
    output_mask: Sequence[bool],
) -> tuple[Optional[Tensor], ...]:
    problem = Problem(q, k, v, is_causal, scale)
    # A result exists if one of its terms does. The scores depend on u, and on w:
    of_u = u_q is not None or u_k is not None
    of_w = w_q is not None or w_k is not None
    has_output = (of_u and (of_w or w_v is not None)) or (of_w and u_v is not None)
    has_scores = grad_output is not None and has_output
    if w_grad_output is not None:
        has_scores = has_scores or of_u or u_v is not None
    has_v = of_u and (w_grad_output is not None or grad_output is not None and of_w)
    tangent, grad_q, grad_k, grad_v = (
        q.new_empty(shape) if wanted and exists else None
        for shape, wanted, exists in zip(
            ((*q.shape[:-1], v.size(-1)), q.shape, k.shape, v.shape),
            output_mask,
            (has_output, has_scores, has_scores, has_v),
        )
    )
    given = {
        "q": q,
        "k": k,
        "v": v,
        "grad_output": grad_output,
        "u_q": u_q,
        "u_k": u_k,
        "u_v": u_v,
        "w_grad_output": w_grad_output,
        "w_q": w_q,
        "w_k": w_k,
        "w_v": w_v,
    }
    if tangent is not None or grad_q is not None:
        problem.launch("third_grad_q", output_tangent=tangent, grad_q=grad_q, **given)
    if grad_k is not None or grad_v is not None:
        problem.launch("third_grad_kv", grad_k=grad_k, grad_v=grad_v, **given)
    return tangent, grad_q, grad_k, grad_v


# For each operator, whether its call is taken, and by what.
KERNELS: dict[str, tuple[Callable[..., bool], Callable[..., Any]]] = {
    "attn": (attn_cond, attn_impl),
    "_attn_backward": (backward_cond, backward_impl),
    "attn_output": (output_cond, output_impl),
    "_attn_output_backward": (output_backward_cond, output_backward_impl),
    "_attn_output_jvp": (jvp_cond, jvp_impl),
    "_attn_output_double_backward": (double_backward_cond, double_backward_impl),
    "_attn_output_triple_backward": (triple_backward_cond, triple_backward_impl),
}


def overridden(op: str) -> str:
    """The operator whose calls on CUDA the Triton kernels get.

    If a build has a kernel in C++ for `op`, it hands what it does not take to another operator.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        f"_portable_{op.removeprefix('_')}" if has_kernel(f"aten::{op}", "CUDA") else op
    )


def overrides() -> dict[str, tuple[Callable[..., bool], Callable[..., Any]]]:
    """KERNELS by the operators whose calls on CUDA they get."""
    return {overridden(op): kernel for op, kernel in KERNELS.items()}


def register_to_dispatch() -> None:
    """Makes these the operators' kernels on GPUs."""
    from ... import triton_utils as tu

    kernels = {"CUDA": overrides(), "XPU": KERNELS if torch.xpu._is_compiled() else {}}
    for key, of_key in kernels.items():
        for op, (cond, impl) in of_key.items():
            tu.register_op_override("aten", op, key, cond=cond, impl=impl)
