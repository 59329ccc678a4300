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
    skipCUDAIf,
)
from torch.testing._internal.common_utils import (
    CudaSyncGuard,
    parametrize,
    run_tests,
    TEST_WITH_ROCM,
)


if not torch.cuda.is_available():
    print("CUDA not available, skipping tests", file=sys.stderr)
    sys.exit(0)


# Only a build for CUDA that finds Triton has these kernels.
HAS_TRITON = torch._C._dispatch_has_kernel_for_dispatch_key(
    "aten::_attn_output_jvp", "CUDA"
)
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

    @skipCUDAIf(not HAS_TRITON, "composed without Triton")
    @parametrize("is_causal", (False, True))
    @dtypes(torch.half, torch.bfloat16)
    def test_memory_of_attn_output(self, device, dtype, is_causal):
        """Beside results, a step and a double backward take nothing that grows with m n."""
        inputs, (grad, _) = Case("step", 8192, 64, 8192, 64).make(device, dtype)
        tangents = [torch.randn_like(x) for x in inputs]

        def run():
            leaves = [x.detach().requires_grad_() for x in inputs]
            output = torch.attn_output(*leaves, is_causal=is_causal)
            grads = torch.autograd.grad(output, leaves, grad, create_graph=True)
            torch.autograd.grad(grads, leaves, tangents)

        run()  # kernels are compiled, which takes memory once
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        peak = torch.cuda.max_memory_allocated(device) - before
        self.assertLess(peak, 16 * sum(x.nbytes for x in inputs))

    @skipCUDAIf(not HAS_TRITON, "composed without Triton")
    @skipCUDAIf(TEST_WITH_ROCM, "an instruction of NVIDIA's")
    def test_tanh_of_every_float(self, device):
        """Prints the largest relative error of each form, and what half and bfloat16 make of it."""
        import triton
        import triton.language as tl

        from torch._native.ops.attn.triton_kernels import _tanh

        @triton.jit
        def kernel(x, y, FORM: tl.constexpr, BLOCK: tl.constexpr):
            place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(y + place, _tanh(tl.load(x + place), FORM))

        size = 2**26
        largest = {}
        infinity = 0x7F800000
        for start in range(0, infinity, size):
            bits = torch.arange(start, min(start + size, infinity), device=device)
            x = bits.to(torch.int32).view(torch.float)
            exact = x.double().tanh_()
            for form in ("approx", "reduced", "float"):
                y = torch.empty_like(x)
                kernel[(x.numel() // 1024,)](x, y, form, 1024)
                apart = (y.double() - exact).abs_()
                found = {"": (apart / exact.clamp_min(2.0**-126)).max().item()}
                for dtype in (torch.half, torch.bfloat16):
                    rounded = (y.to(dtype).double() - exact).abs_()
                    least = torch.finfo(dtype).tiny
                    ulp = torch.exp2(torch.floor(torch.log2(exact.clamp_min(least))))
                    ulp *= torch.finfo(dtype).eps
                    found[f", {dtype} ULP"] = (rounded / ulp).max().item()
                for name, value in found.items():
                    name = form + name
                    largest[name] = max(largest.get(name, 0.0), value)
        print({name: float(f"{value:.4g}") for name, value in largest.items()})
        self.assertLessEqual(largest["approx"], 2**-10.9)
        self.assertLessEqual(largest["reduced"], 2**-14.5)
        self.assertLessEqual(largest["float"], 4.5 * 2**-23)

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
            # There may be no memory for a gradient of attn.
            return *op(*inputs), *gradients(op, inputs, (grad, None), used=("output",))

        actual = dict(zip(RESULTS, compute(torch.attn, q, k, v, grad)))
        every, last = slice(None), slice(size - 70, None)
        # These results depend on the last rows of attn, or on its last columns, alone.
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
