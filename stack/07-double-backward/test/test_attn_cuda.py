# Owner(s): ["module: cuda"]

import sys
from itertools import chain

from attn_function import gradients
from test_attn import (
    attn_composed,
    AttnTestCase,
    by_case_in,
    Case,
    evaluate,
    RESULTS,
    widen,
)

import torch
from torch.testing._internal.common_device_type import (
    deviceCountAtLeast,
    dtypes,
    instantiate_device_type_tests,
    largeTensorTest,
)
from torch.testing._internal.common_utils import CudaSyncGuard, parametrize, run_tests


if not torch.cuda.is_available():
    print("CUDA not available, skipping tests", file=sys.stderr)
    sys.exit(0)


by_dtype = dtypes(torch.half, torch.bfloat16, torch.float, torch.double)
# Many samples, few numbers, and sizes that are no multiples of a power of two.
by_case = by_case_in(
    (
        Case("many", 640, 64, 1024, 64, batch=(33,)),
        Case("few", 24, 64, 40, 64),
        Case("odd", 211, 31, 333, 45, batch=(3,)),
    )
)
SIZES = {"square": (46400,), "batch": (3800, 150)}  # attn: more than 2**31 elements


class TestAttnCuda(AttnTestCase):
    @by_dtype
    @by_case
    def test_repeats(self, device, dtype, case):
        """The same call gives the same bits."""
        given = case.make(device, dtype)
        expected = evaluate(torch.attn, *given)
        for _ in range(5):
            self.assert_bitwise(evaluate(torch.attn, *given), expected)

    @by_dtype
    @by_case
    def test_asynchronous(self, device, dtype, case):
        given = case.make(device, dtype)
        with CudaSyncGuard("error"):
            evaluate(torch.attn, *given)

    @by_dtype
    @by_case
    def test_graph(self, device, dtype, case):
        given, others = (case.make(device, dtype) for _ in range(2))
        evaluate(torch.attn, *given)  # what is done once can't be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = evaluate(torch.attn, *given)
        for x, y in zip(chain(*given), chain(*others)):
            x.copy_(y)
        graph.replay()
        self.assert_bitwise(actual, evaluate(torch.attn, *others))

    @by_dtype
    @by_case
    def test_stream(self, device, dtype, case):
        """On the current stream, where the inputs are written late."""
        given = case.make(device, dtype)
        expected = evaluate(torch.attn, *given)
        late = [[torch.full_like(x, torch.nan) for x in some] for some in given]
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for x, y in zip(chain(*late), chain(*given)):
                x.copy_(y)
            actual = evaluate(torch.attn, *late)
        stream.synchronize()
        self.assert_bitwise(actual, expected)

    @deviceCountAtLeast(2)
    @by_dtype
    def test_other_device(self, devices, dtype):
        """On the inputs' device, which need not be the current one."""
        given = Case("other", 200, 30, 300, 40).make(devices[1], dtype)
        with torch.cuda.device(devices[1]):
            expected = evaluate(torch.attn, *given)
        with torch.cuda.device(devices[0]):
            actual = evaluate(torch.attn, *given)
        self.assert_bitwise(actual, expected)

    @deviceCountAtLeast(2)
    @by_dtype
    def test_other_device_of_backward(self, devices, dtype):
        """Also without a gradient of output, by which the dispatcher goes."""
        inputs, (_, grad_attn) = Case("other", 200, 30, 300, 40).make(devices[1], dtype)
        given = None, grad_attn, *inputs, torch.attn(*inputs).attn, [True] * 3
        with torch.cuda.device(devices[1]):
            expected = torch.ops.aten._attn_backward(*given)
        with torch.cuda.device(devices[0]):
            actual = torch.ops.aten._attn_backward(*given)
        self.assert_bitwise(actual, expected)

    @largeTensorTest("24GB")
    @parametrize("layout", list(SIZES))
    def test_large(self, device, layout):
        size, *batch = SIZES[layout]
        q, k, v, grad = (
            torch.randn(*batch, size, 16, device=device, dtype=torch.bfloat16) / 2
            for _ in range(4)
        )

        def compute(op, *tensors):
            *inputs, grad = tensors
            # For a gradient of attn there may be no memory.
            return *op(*inputs), *gradients(op, inputs, (grad, None), used=("output",))

        actual = dict(zip(RESULTS, compute(torch.attn, q, k, v, grad)))
        every, last = slice(None), slice(size - 70, None)
        # What depends on a few rows of attn, or on a few columns, all of these.
        for rows, columns, names in (
            (last, every, ("output", "attn", "grad_q")),
            (every, last, ("attn", "grad_k", "grad_v")),
        ):
            few = (
                q[..., rows, :],
                k[..., columns, :],
                v[..., columns, :],
                grad[..., rows, :],
            )
            plain = dict(zip(RESULTS, compute(attn_composed, *few)))
            reference = dict(zip(RESULTS, compute(attn_composed, *widen(few))))
            case = Case(layout, few[0].size(-2), 16, few[1].size(-2), 16)
            for name in names:
                found = actual[name][..., last, :]
                if name == "attn":
                    found = actual[name][..., rows, columns]
                with self.subTest(result=name, rows=rows):
                    self.assert_within_rule(found, plain[name], reference[name], case)


instantiate_device_type_tests(TestAttnCuda, globals(), only_for="cuda")


if __name__ == "__main__":
    run_tests()
