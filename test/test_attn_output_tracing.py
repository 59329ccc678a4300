# Owner(s): ["oncall: pt2"]

"""attn_output where it is traced: whole in compiled code, and without values."""

import re
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

from attn_function import INPUTS
from test_attn import AttnTestCase
from test_attn_compile import CompileTestCase, Messages
from test_attn_output import both_ways, Problem, sized
from test_attn_output_second_order import (
    by_given,
    double_backward,
    forward_over_reverse,
    GIVEN,
    tangent,
    tangents_of,
)
from test_attn_output_triple_backward import (
    GIVEN as THIRD_ORDER_GIVEN,
    make,
    NAMES,
    OPTIONAL,
    triple_backward,
)

import torch
from torch._inductor import lowering
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_utils import parametrize, run_tests
from torchgen.aoti.fallback_ops import inductor_fallback_ops


aten = torch.ops.aten
# The operators that this commit of the stack, and those before it, have brought.
OPERATORS = [
    getattr(aten, name.removeprefix("aten::")).default
    for name in torch._C._dispatch_get_all_op_names()
    if re.fullmatch("aten::_?attn(_[a-z_]+)?", name)
]


class Output(torch.nn.Module):
    def __init__(self, problem):
        super().__init__()
        self.is_causal, self.scale = problem.is_causal, problem.scale

    def forward(self, q, k, v):
        return torch.attn_output(q, k, v, is_causal=self.is_causal, scale=self.scale)


class TestAttnOutputTracing(AttnTestCase):
    @parametrize("dynamic", (False, True))
    @dtypes(torch.float)
    def test_compile(self, device, dtype, dynamic):
        """Compiled code gives the same."""
        problem = Problem(sized(20, 30, 4, 5, 2, 3), (2, 1), True, 0.5)
        inputs, grad_output = problem.make(device, dtype)
        op = partial(torch.attn_output, **problem.options)
        compiled = torch.compile(op, fullgraph=True, dynamic=dynamic)
        expected = both_ways(torch.attn_output, problem, inputs, grad_output)
        actual = both_ways(lambda *x, **_: compiled(*x), problem, inputs, grad_output)
        self.assertEqual(actual, expected)

    @dtypes(torch.float)
    def test_export(self, device, dtype):
        """It stays whole, also among the core operators: decomposed it would need m x n."""
        problem = Problem(sized(20, 30, 4, 5, 2, 3), (2, 1), True, 0.5)
        inputs, _ = problem.make(device, dtype)
        exported = torch.export.export(Output(problem), tuple(inputs))
        program = exported.run_decompositions()
        nodes = [x for x in program.graph.nodes if x.op == "call_function"]
        self.assertEqual([x.target for x in nodes], [aten.attn_output.default])
        self.assertEqual(program.module()(*inputs), Output(problem)(*inputs))

    def test_meta(self, device):
        problem = Problem(sized(20, 30, 4, 5, 2, 3), (2, 1), True)
        inputs, grad_output = problem.make("meta", torch.float)
        results = both_ways(torch.attn_output, problem, inputs, grad_output)
        self.assertEqual(
            [x.shape for x in results], [(2, 3, 20, 5), *(x.shape for x in inputs)]
        )

    @dtypes(torch.float)
    def test_compile_second_order(self, device, dtype):
        """Inductor calls both as they are."""
        torch._dynamo.reset()
        problem = Problem(sized(20, 30, 4, 5, 2, 3), (2, 1), True, 0.5)
        inputs, grad_output = problem.make(device, dtype)
        tangents = tangents_of(inputs)

        def both(g, *x):
            return (
                tangent(problem, x[:3], x[3:]),
                *double_backward(problem, x[:3], x[3:], g),
            )

        compiled = torch.compile(both, fullgraph=True, dynamic=True)
        args = (grad_output, *inputs, *tangents)
        self.assert_bitwise(compiled(*args), both(*args))

    @dtypes(torch.float)
    def test_compile_third_order(self, device, dtype):
        torch._dynamo.reset()
        problem = Problem(sized(20, 30, 4, 5, 2, 3), (2, 1), True, 0.5)
        args = make(problem, device, dtype, OPTIONAL)

        def run(*x):
            return triple_backward(problem, x)

        compiled = torch.compile(run, fullgraph=True, dynamic=True)
        self.assert_bitwise(compiled(*args), run(*args))

    @by_given
    def test_meta_of_second_order(self, device, given):
        """Meta tensors, and what is None for which mask."""
        problem = Problem(sized(20, 30, 4, 5, 2, 3), (2, 1), True)
        inputs, grad_output = problem.make(device, torch.float)
        tangents = tangents_of(inputs, given)
        inputs_, tangents_ = (
            [None if x is None else x.to("meta") for x in xs]
            for xs in (inputs, tangents)
        )
        for mask in product((False, True), repeat=4):
            actual = double_backward(
                problem, inputs_, tangents_, grad_output.to("meta"), mask
            )
            expected = double_backward(problem, inputs, tangents, grad_output, mask)
            self.assertEqual(
                [x if x is None else x.shape for x in actual],
                [x if x is None else x.shape for x in expected],
            )
        self.assertEqual(tangent(problem, inputs_, tangents_).shape, grad_output.shape)

    def test_mistakes_have_the_words_of_the_kernel(self, device):
        problem = Problem(sized(2, 4, 3, 5))
        inputs, grad_output = problem.make(device, torch.float)
        for i, name in enumerate(INPUTS):
            tangents = [None] * 3
            tangents[i] = torch.randn(7, 7, device=device)
            for run in (
                lambda *x: tangent(problem, *x[:2]),
                lambda *x: double_backward(problem, *x),
            ):
                with self.assertRaisesRegex(RuntimeError, "_tangent must be") as real:
                    run(inputs, tangents, grad_output)
                mode = FakeTensorMode(allow_non_fake_inputs=True)
                with self.assertRaises(RuntimeError) as fake, mode:
                    run(inputs, tangents, grad_output)
                said, expected = (
                    str(x.exception).splitlines()[0] for x in (fake, real)
                )
                self.assertEqual(
                    said, expected.replace(f"on {inputs[0].device}", "on meta")
                )


# Dynamo of 2.6 knows no product with `repeat`.
MASKS = [*product((False, True), repeat=3)]


class Everything(torch.nn.Module):
    """Calls each of OPERATORS, with each choice of what it is given and of its results."""

    def __init__(self, hvp):
        super().__init__()
        self.hvp = hvp

    def forward(self, grad_output, grad_attn, *tensors):
        inputs, tangents = tensors[:3], tensors[3:]
        output, attn = torch.attn(*inputs)
        found = [output, attn, torch.attn_output(*inputs, is_causal=True, scale=0.5)]
        for mask in MASKS:
            for grads in product((None, grad_output), (None, grad_attn)):
                found += aten._attn_backward(*grads, *inputs, attn, mask)
            found += aten._attn_output_backward(grad_output, *inputs, True, 0.5, mask)
        for given in GIVEN:
            u = [x if name in given else None for name, x in zip(INPUTS, tangents)]
            found.append(aten._attn_output_jvp(*inputs, *u, True, 0.5))
            for mask in (True,) * 4, (False, True) * 2, (True, False, False, True):
                found += aten._attn_output_double_backward(
                    grad_output, *inputs, *u, True, 0.5, mask
                )
        both = grad_output, *inputs
        every = *both, *tangents, *both[:1], *tangents
        for given in THIRD_ORDER_GIVEN:
            there = (*given, *INPUTS)
            x = [x if name in there else None for name, x in zip(NAMES, every)]
            for mask in (True,) * 4, (False, True) * 2, (True, False, False, True):
                found += aten._attn_output_triple_backward(*x, True, 0.5, mask)
        found.append(self.hvp(inputs[0], tangents[0]))
        return tuple(x for x in found if x is not None)


class TestAttnOutputAotInductor(CompileTestCase):
    def test_lists(self, device):
        """Inductor has a rule for each operator, and AOTInductor a C function."""
        self.assertGreaterEqual(len(OPERATORS), 7)
        self.assertEqual([x for x in OPERATORS if x not in lowering.lowerings], [])
        self.assertEqual({*map(str, OPERATORS)} - {*inductor_fallback_ops}, set())

    def test_aot_inductor(self, device):
        """The C functions take what is absent, and leave out what is not wanted."""
        problem = Problem(sized(4, 6, 3, 5, 2))
        inputs, grad_output = problem.make(device, torch.float)
        q, k, v = inputs
        tangents = tangents_of(inputs)
        args = (grad_output, torch.randn(2, 4, 6), *inputs, *tangents)

        def energy(q):
            return torch.attn_output(q, k, v, is_causal=True).square().sum()

        hvp = make_fx(partial(forward_over_reverse, energy))(q, tangents[0])
        # Dynamo of 2.6 refuses is_same_size, whose result nothing uses.
        hvp.graph.eliminate_dead_code()
        hvp.recompile()
        model = Everything(hvp)
        with tempfile.TemporaryDirectory() as folder:
            with Messages(self, "torch._inductor") as messages:
                package = torch._inductor.aoti_compile_and_package(
                    torch.export.export(model, args),
                    package_path=str(Path(folder, "model.pt2")),
                )
            loaded = torch._inductor.aoti_load_package(package)
            self.assert_bitwise(loaded(*args), model(*args))
        self.assertEqual([x for x in messages if "missing a c-shim" in x], [])


instantiate_device_type_tests(TestAttnOutputTracing, globals())
instantiate_device_type_tests(TestAttnOutputAotInductor, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
