"""The lab's example, on the installed torch: values, the graph's node, gradient checks."""

import torch
from torch.autograd import gradcheck, gradgradcheck


def main() -> int:
    torch.manual_seed(0)
    sizes = {"q": (2, 3), "k": (2, 3), "v": (2, 4)}
    q, k, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in sizes.values())
    print(f"torch {torch.__version__}: {torch.attn}")
    for name, tensor in zip(sizes, (q, k, v), strict=True):
        print(f"{name} = {tensor.detach()}")
    output, attn = torch.attn(q, k, v)
    print(f"output = {output}")
    print(f"attn = {attn}")
    expected = torch.tanh(q @ k.T)
    torch.testing.assert_close(attn, expected)
    torch.testing.assert_close(output, expected @ v)
    print(f"grad_fn: output {output.grad_fn.name()}, attn {attn.grad_fn.name()}")
    first = gradcheck(torch.attn, (q, k, v), raise_exception=False)
    second = gradgradcheck(torch.attn, (q, k, v), raise_exception=False)
    print(f"gradcheck, gradgradcheck: {first} {second}")
    return 0 if first and second else 1


if __name__ == "__main__":
    raise SystemExit(main())
