# Owner(s): ["oncall: pt2"]

"""attn_output where it is traced: whole in compiled code, and without values."""

from functools import partial
from itertools import product

from attn_function import INPUTS
from test_attn import AttnTestCase
from test_attn_output import both_ways, Problem, sized
from test_attn_output_second_order import (
    by_given,
    double_backward,
    tangent,
    tangents_of,
)

import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_utils import parametrize, run_tests


aten = torch.ops.aten


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


instantiate_device_type_tests(TestAttnOutputTracing, globals())

if __name__ == "__main__":
    run_tests()
