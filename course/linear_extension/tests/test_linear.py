"""The extension's operators, its functional and its Module, against PyTorch's own."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from linear_extension import Linear, linear, linear_cpp_function, ops

SHAPES = [
    (5, 3, 2),
    (1, 1, 1),
    (17, 19, 33),
    (64, 100, 40),
    (0, 3, 2),
    (4, 0, 2),
    (4, 3, 0),
]
DTYPES = [torch.float, torch.double]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_each_device = pytest.mark.parametrize("device", DEVICES)
of_each_dtype = pytest.mark.parametrize("dtype", DTYPES)
of_each_shape = pytest.mark.parametrize(("rows", "in_", "out"), SHAPES)
with_and_without_bias = pytest.mark.parametrize("bias", [True, False])


def operands(rows, in_, out, bias=True, dtype=torch.double, device="cpu", batch=()):
    torch.manual_seed(0)
    shapes = [(*batch, rows, in_), (out, in_), (out,)][: 3 if bias else 2]
    made = [
        torch.randn(s, dtype=dtype, device=device, requires_grad=True) for s in shapes
    ]
    return made if bias else [*made, None]


def error(found, exact):
    return (found.double() - exact).abs().max().item() if exact.numel() else 0.0


def assert_as_good_as(found, plain, exact):
    """Twice the error of the plain computation in that precision, or a few of its roundings."""
    assert found.shape == exact.shape and found.dtype == plain.dtype
    unit = (
        torch.finfo(plain.dtype).eps * exact.abs().max().item()
        if exact.numel()
        else 0.0
    )
    assert error(found, exact) <= 2 * max(error(plain, exact), 4 * unit)


@on_each_device
@with_and_without_bias
@of_each_dtype
@of_each_shape
@pytest.mark.parametrize("function", [linear, linear_cpp_function])
def test_values_and_gradients(function, rows, in_, out, dtype, bias, device):
    given = operands(rows, in_, out, bias, dtype, device)
    exact = [t if t is None else t.detach().double().requires_grad_() for t in given]
    wanted = [t for t in given if t is not None]
    results = [function(*given), F.linear(*given), F.linear(*exact)]
    assert_as_good_as(*results)
    grad = torch.randn_like(results[1])
    grads = [
        torch.autograd.grad(y, [t for t in of if t is not None], grad.to(y.dtype))
        for y, of in zip(results, (given, given, exact), strict=True)
    ]
    assert len(grads[0]) == len(wanted)
    for ours, plain, truth in zip(*grads, strict=True):
        assert_as_good_as(ours, plain, truth)


@on_each_device
@with_and_without_bias
@pytest.mark.parametrize("function", [linear, linear_cpp_function])
def test_gradcheck(function, bias, device):
    given = operands(4, 3, 2, bias, device=device)
    assert gradcheck(function, given) and gradgradcheck(function, given)


@on_each_device
@of_each_dtype
def test_opcheck(dtype, device):
    """Schema, fake kernel, autograd registration, and compilation, of each operator."""
    x, w, b = operands(5, 3, 2, dtype=dtype, device=device)
    grad = torch.randn(5, 2, dtype=dtype, device=device, requires_grad=True)
    for op, args in (
        (ops.linear, (x, w, b)),
        (ops.linear, (x, w, None)),
        (ops.linear_backward_input, (grad, w)),
        (ops.linear_backward_weight, (grad, x)),
    ):
        found = torch.library.opcheck(op.default, args)
        assert set(found.values()) == {"SUCCESS"}


def test_compile():
    """In one graph, and backward too."""
    given = operands(5, 3, 2)
    compiled = torch.compile(
        lambda *x: linear(*x).tanh(), fullgraph=True, backend="aot_eager"
    )
    found = torch.autograd.grad(compiled(*given).sum(), given)
    wanted = torch.autograd.grad(linear(*given).tanh().sum(), given)
    torch.testing.assert_close(found, wanted)


def test_export():
    """For any number of rows."""
    dynamic = {"input": {0: torch.export.Dim("rows")}}
    exported = torch.export.export(
        Linear(3, 2), (torch.randn(5, 3),), dynamic_shapes=dynamic
    )
    calls = [n.target for n in exported.graph.nodes if n.op == "call_function"]
    assert ops.linear.default in calls
    assert exported.module()(torch.randn(7, 3)).shape == (7, 2)


def test_not_contiguous_and_batched():
    x, w, b = operands(6, 4, 3, batch=(2,))
    torch.testing.assert_close(linear(x, w, b), F.linear(x, w, b))
    x, w = x.mT[0].detach(), torch.randn(12, 3, dtype=torch.double)[::2].T
    torch.testing.assert_close(linear(x, w, b), F.linear(x, w, b))
    torch.testing.assert_close(linear(x[0], w, b), F.linear(x[0], w, b))


def test_many_threads_give_the_same():
    x, w, b = operands(300, 200, 100)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        y = linear(x, w, b)
        results.append([y.detach(), *torch.autograd.grad(y.sum(), (x, w, b))])
    torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_module():
    layer, theirs = Linear(3, 2), torch.nn.Linear(3, 2)
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3)
    torch.testing.assert_close(layer(x), theirs(x))
    assert str(layer) == str(theirs)
    assert [name for name, _ in Linear(3, 2, bias=False).named_parameters()] == [
        "weight"
    ]


BAD = {
    "must have the same i": ((5, 3), (2, 4), (2,)),
    "bias (o) must fit weight (o, i)": ((5, 3), (2, 3), (3,)),
    "wants matrices": ((5, 3), (2,), (2,)),
}


@on_each_device
@pytest.mark.parametrize("why", BAD)
def test_errors(why, device):
    with pytest.raises(RuntimeError) as caught:
        ops.linear(*(torch.randn(shape, device=device) for shape in BAD[why]))
    assert why in str(caught.value)


@on_each_device
def test_errors_of_dtypes_and_products(device):
    x, w, b = operands(5, 3, 2, device=device)
    for op, args, why in (
        (ops.linear, (x, w.float(), b), "the dtypes differ: Double and Float"),
        (
            ops.linear,
            (x, w, b.float()),
            "bias must have the dtype and the device of input",
        ),
        (ops.linear_backward_input, (x, w), "must have the same o"),
        (ops.linear_backward_weight, (w, x), "must have the same N"),
        (ops.linear, (x.int(), w.int(), None), "not implemented for .Int"),
    ):
        with pytest.raises(RuntimeError, match=why):
            op(*args)
