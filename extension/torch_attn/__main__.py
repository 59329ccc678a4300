"""python -m torch_attn: what is used, whether it computes what it should, and how fast it is."""

import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

import torch_attn

DTYPES = (torch.float, torch.double, torch.bfloat16, torch.half)
RESULTS = ("output", "gradient of q", "gradient of k", "gradient of v")
# Each case that is measured is a dtype, n = m, and d = e.
CASES = ((torch.float, 512, 64), (torch.float, 1024, 64), (torch.bfloat16, 1024, 64))
ROUNDS, SECONDS = 7, 0.02  # in each round all take a turn, for so long


def eager(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float = 1.0) -> Tensor:
    scores = torch.tanh(q @ k.mT * scale)
    return (scores.tril() if is_causal else scores) @ v


def attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch_attn.attn(q, k, v)[0]


def causal(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v: op(q, k, v, is_causal=True, scale=0.5)


CHECKED = (
    ("attn", attn, eager),
    ("attn_output", torch_attn.attn_output, eager),
    ("attn_output, causal", causal(torch_attn.attn_output), causal(eager)),
)


def inputs(dtype: torch.dtype, n: int, d: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(n, d, generator=generator) for _ in "qkv"]
    scales = d**-0.25, d**-0.25, 1
    return [(x * y).to(dtype).requires_grad_() for x, y in zip(draw, scales, strict=True)]


def step(op: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    output = op(*given)
    return [output, *torch.autograd.grad(output, given, torch.ones_like(output))]


def curvature(op: Callable[..., Tensor], given: list[Tensor]) -> Tensor:
    """How q's gradient changes along a direction, of which a field's Laplacian is a sum."""
    q, k, v = (x.detach() for x in given)
    gradient = torch.func.grad(lambda q: op(q, k, v).sum())
    tangent: Tensor = torch.func.jvp(gradient, (q,), (torch.ones_like(q),))[1]
    return tangent


def wrong() -> list[str]:
    """What differs from eager's results in double by more than twice what eager's own differ.

    In double these are the same, and some roundings are allowed.
    """
    found = []
    for dtype in DTYPES:
        given = inputs(dtype, 200, 48)
        wide = [x.detach().double().requires_grad_() for x in given]
        for name, op, plain in CHECKED:
            exact = step(plain, wide)
            results = zip(RESULTS, step(op, given), step(plain, given), exact, strict=True)
            for result, x, y, z in results:
                error, usual = ((a.double() - z).norm() / z.norm() for a in (x, y))
                roundings = 8 if dtype == torch.double else 0.5
                if not error <= 2 * usual + roundings * torch.finfo(dtype).eps:
                    found.append(f"{name}, {dtype}: the {result} is wrong by {error:.1e}")
    return found


def seconds(run: Callable[[], object]) -> float:
    """The mean time of a call, of as many as SECONDS allow."""
    begin, calls = time.perf_counter(), 0
    while (now := time.perf_counter()) < begin + SECONDS or calls == 0:
        run()
        calls += 1
    return (now - begin) / calls


def speed() -> list[str]:
    """Lines of two tables: times, and how many times as long eager takes."""
    lines = []
    for title, run, ops in (
        ("a step of", step, {"attn": attn, "attn_output": torch_attn.attn_output}),
        ("a second derivative of", curvature, {"attn_output": torch_attn.attn_output}),
    ):
        lines.append(f"{title:26}{''.join(f'{name:>14}' for name in ops)}    eager takes")
        for dtype, n, d in CASES:
            given = inputs(dtype, n, d)
            runs = [partial(run, op, given) for op in (*ops.values(), eager)]
            rounds = [[seconds(x) for x in runs] for _ in range(ROUNDS + 1)][1:]
            own = [median(times[i] for times in rounds) for i in range(len(ops))]
            ratios = [median(times[-1] / times[i] for times in rounds) for i in range(len(ops))]
            name = f"{str(dtype).removeprefix('torch.')}, n = {n}, d = {d}"
            times = "".join(f"{x * 1e3:11.2f} ms" for x in own)
            how = " and ".join(f"{x:.2f}" for x in ratios)
            lines.append(f"{name:26}{times}    {how} times as long")
    return lines


def main() -> int:
    # PyTorch's own jvp calls this.
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
    print(f"torch_attn {torch_attn.__version__}, torch {torch.__version__}")
    for device, how in torch_attn.backends().items():
        print(f"{device}: {how}")
    found = wrong()
    print("\n".join(found) or f"self-test: {len(CHECKED)} functions, {len(DTYPES)} dtypes: right")
    print(f"speed, {torch.get_num_threads()} threads:", *speed(), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
