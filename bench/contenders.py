"""The contenders: torch.attn, and the other ways to compute the same."""

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import (
    ATTN,
    COMPILE,
    CUDNN,
    EAGER,
    EXTENSION,
    FLEX,
    FUNCTION,
    HIGHER_ORDER_MODES,
    JAX,
    KERNEL,
    OUTPUT_MODES,
    SDPA,
    THIRD_ORDER,
    TRITON,
    Case,
)
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

Run = Callable[[], Any]

# The Function in this file takes matrices only.
FUNCTION_FILE = Path(__file__).parents[1] / "test" / "attn_function.py"


class Absent(Exception):
    """Why a contender cannot take part, in one line."""


def composed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    attn = torch.tanh(q @ k.mT)
    return attn @ v, attn


def composed_output(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor]:
    attn = torch.tanh(q @ k.mT)
    return ((attn.tril() if is_causal else attn) @ v,)


def allow_tf32(allowed: bool) -> None:
    """Allows or forbids matrix products to round float32 to TF32."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")


class Problem:
    """The inputs of a case, and the gradients that its mode has."""

    def __init__(self, case: Case, mode: str, device: str = "cpu") -> None:
        self.case, self.mode = case, mode
        dtype = getattr(torch, case.dtype)
        generator = torch.Generator(device).manual_seed(0)

        def normal(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        # Scores have variance 1, so that tanh is neither linear nor saturated.
        scales = case.d**-0.25, case.d**-0.25, 1
        self.inputs = [normal(shape) * x for shape, x in zip(case.shapes, scales, strict=True)]
        has_grad = "step" in mode or "backward" in mode or mode in ("both", THIRD_ORDER)
        shapes = [case.output_shape] if has_grad else []
        shapes += [case.attn_shape] if mode == "both" else []
        self.grads = [normal(shape) for shape in shapes]
        has_tangents = mode in HIGHER_ORDER_MODES
        self.tangents = [normal(shape) for shape in case.shapes] if has_tangents else []
        for x in self.inputs:
            x.requires_grad_(has_grad)

    @property
    def output_only(self) -> dict[str, bool] | None:
        """The options of attn_output, or None in the modes of attn."""
        return {"is_causal": "causal" in self.mode} if self.mode in OUTPUT_MODES else None


def tangent_run(op: Callable, problem: Problem) -> Run:
    def run():
        with dual_level():
            pairs = zip(problem.inputs, problem.tangents, strict=True)
            return unpack_dual(op(*(make_dual(*pair) for pair in pairs))[0])

    return run


def double_backward_run(op: Callable, problem: Problem) -> Run:
    inputs, (grad,) = problem.inputs, problem.grads
    leaves = (*inputs, grad.requires_grad_())
    first = torch.autograd.grad(op(*inputs)[0], inputs, grad, create_graph=True)
    return lambda: torch.autograd.grad(first, leaves, problem.tangents, retain_graph=True)


def third_order_run(op: Callable, problem: Problem) -> Run:
    (q, *others), tangent = problem.inputs, problem.tangents[0]
    values = op(*problem.inputs)[0]
    for gradient in (*problem.grads, tangent):
        (values,) = torch.autograd.grad(values, q, gradient, create_graph=True)
    return lambda: torch.autograd.grad(values, others, tangent, retain_graph=True)


def torch_run(op: Callable, problem: Problem) -> Run:
    inputs, grads = problem.inputs, problem.grads
    if problem.mode == THIRD_ORDER:
        return third_order_run(op, problem)
    if problem.tangents:
        return (double_backward_run if grads else tangent_run)(op, problem)
    if not grads:
        return lambda: op(*inputs)

    def step():
        outputs = op(*inputs)
        used = outputs[: len(grads)]
        return (*outputs, *torch.autograd.grad(used, inputs, grads))

    return step


def attn_run(problem: Problem) -> Run:
    if not hasattr(torch, "attn"):
        raise Absent("this torch has no torch.attn")
    if problem.output_only is None:
        return torch_run(torch.attn, problem)
    return torch_run(lambda *x: (torch.attn_output(*x, **problem.output_only),), problem)


def composed_for(problem: Problem) -> Callable:
    if problem.output_only is None:
        return composed
    return partial(composed_output, **problem.output_only)


def eager_run(problem: Problem) -> Run:
    return torch_run(composed_for(problem), problem)


def compile_run(problem: Problem) -> Run:
    torch._dynamo.reset()  # its limit of recompilations must not count earlier cases
    op = torch.compile(composed_for(problem), fullgraph=True, dynamic=False)
    return torch_run(op, problem)


def function_run(problem: Problem) -> Run:
    if problem.case.batch:
        raise Absent("it takes matrices only")
    spec = importlib.util.spec_from_file_location(FUNCTION_FILE.stem, FUNCTION_FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return torch_run(module.Attn.apply, problem)


def extension_run(problem: Problem) -> Run:
    """torch-attn's kernels, which are the same: also where torch has its own operator."""
    try:
        from torch_attn import fused
    except ImportError:
        raise Absent("torch_attn is not installed") from None
    return torch_run(fused.attn, problem)


def jax_run(problem: Problem) -> Run:
    import jax
    import jax.numpy as jnp

    def composed(q, k, v):
        attn = jnp.tanh(q @ jnp.swapaxes(k, -1, -2))
        return attn @ v, attn

    def step(q, k, v, grad_output):
        output, pullback, attn = jax.vjp(composed, q, k, v, has_aux=True)
        return output, attn, *pullback(grad_output)

    def both(q, k, v, *grads):
        outputs, pullback = jax.vjp(composed, q, k, v)
        return *outputs, *pullback(grads)

    def array(x: Tensor):
        x = x.detach()  # numpy has no bfloat16
        return jnp.asarray((x.double() if x.itemsize > 4 else x.float()).numpy(), dtype)

    dtype = problem.case.dtype
    arrays = [array(x) for x in problem.inputs + problem.grads]
    compiled = jax.jit({"forward": composed, "step": step, "both": both}[problem.mode])
    return lambda: jax.block_until_ready(compiled(*arrays))


def sdpa_run(problem: Problem) -> Run:
    """Attention by softmax: another function, of as many products."""

    def op(*inputs: Tensor) -> tuple[Tensor]:
        heads = (x.view(1, -1, *x.shape[-2:]) for x in inputs)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        output = sdpa(*heads, scale=1.0, **problem.output_only)
        return (output.view(problem.case.output_shape),)

    return torch_run(op, problem)


def cudnn_run(problem: Problem) -> Run:
    """The same by cuDNN's kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    run = sdpa_run(problem)

    def by_cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return run()

    return by_cudnn


def kernel_run(problem: Problem) -> Run:
    """torch.attn by its kernel on a GPU, however small the call is."""
    from torch._native.ops.attn import triton_impl

    run = attn_run(problem)

    def by_kernel():
        usual, triton_impl.LEAST_WORK = triton_impl.LEAST_WORK, 0
        try:
            return run()
        finally:
            triton_impl.LEAST_WORK = usual

    return by_kernel


def triton_run(problem: Problem) -> Run:
    """torch.attn's kernels in Triton, by the operators that get what those in C++ don't take."""
    aten, options = torch.ops.aten, problem.output_only

    class ByTriton(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.set_materialize_grads(False)
            if options is None:
                results = aten._portable_attn(*inputs)
            else:
                results = (aten._portable_attn_output(*inputs, **options, scale=1.0),)
            ctx.save_for_backward(*inputs, *results[1:])
            return results

        @staticmethod
        def backward(ctx, *grads):
            wanted = (True, True, True)
            if options is None:
                return aten._portable_attn_backward(*grads, *ctx.saved_tensors, wanted)
            given = *grads, *ctx.saved_tensors, options["is_causal"], 1.0, wanted
            return aten._portable_attn_output_backward(*given)

    return torch_run(ByTriton.apply, problem)


def flex_run(problem: Problem) -> Run:
    """The sum of tanh(score) * value by FlexAttention, which returns weighted means on a CPU.

    Weights must be positive: w = tanh(q @ k.T) + 2, of which 2 * v.sum(0) is taken away. The sum
    of w is found by one key more, of weight 1. In a further column of v it has a 1, so that the
    mean there is 1 / (w.sum() + 1).
    """
    if problem.grads or problem.output_only != {"is_causal": False}:
        raise Absent("it has no backward on a CPU")
    from torch.nn.attention.flex_attention import flex_attention

    n, e = problem.case.n, problem.case.e
    pad = torch.nn.functional.pad

    def score(s, batch, head, i, j):
        return torch.where(j < n, torch.log(torch.tanh(s) + 2), 0.0)

    @torch.compile(fullgraph=True, dynamic=False)
    def from_means(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mean = flex_attention(q, k, v, score_mod=score, scale=1.0)
        return mean[..., :e] / mean[..., e:]

    def op(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        one_more = pad(v, (0, 1, 0, 1))
        one_more[n, e] = 1
        heads = (x[None, None] for x in (q, pad(k, (0, 0, 0, 1)), one_more))
        return (from_means(*heads)[0, 0] - 2 * v.sum(0),)

    torch._dynamo.reset()
    return torch_run(op, problem)


RUNS = {
    ATTN: attn_run,
    EAGER: eager_run,
    COMPILE: compile_run,
    FUNCTION: function_run,
    JAX: jax_run,
}
# lengths.py and ways.py measure these as well, and some are measured on a GPU.
MORE_RUNS = {
    SDPA: sdpa_run,
    CUDNN: cudnn_run,
    KERNEL: kernel_run,
    TRITON: triton_run,
    FLEX: flex_run,
    EXTENSION: extension_run,
}
OF_SOFTMAX = {SDPA, CUDNN}  # These compute another function.


def as_tensors(results: Any) -> list[Tensor]:
    """In double precision, of torch's and of JAX's results."""
    found = []
    for x in results:
        if not isinstance(x, Tensor):
            import numpy as np

            x = torch.from_numpy(np.array(x, dtype=np.float64))
        found.append(x.detach().double())
    return found


def disagreement(results: Any, expected: list[Tensor], dtype: str) -> str:
    """Says which result differs from eager's by more than rounding explains; empty if none does."""
    tolerance = torch.finfo(getattr(torch, dtype)).eps ** 0.5
    names = ("output", "attn", "grad_q", "grad_k", "grad_v")
    for name, x, y in zip(names, as_tensors(results), expected, strict=False):
        error = ((x - y).norm() / y.norm()).item()
        if not error <= tolerance:
            return f"its {name} differs from eager's by {error:.1e}"
    return ""
