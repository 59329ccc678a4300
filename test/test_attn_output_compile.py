# Owner(s): ["module: inductor"]

"""Inductor replaces attn by attn_output if nothing reads attn's second result."""

from collections import Counter

from attn_function import INPUTS
from test_attn_kernel import sized

import torch
from torch._inductor import config
from torch._inductor.utils import fresh_inductor_cache
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_utils import parametrize, run_tests, TestCase


aten = torch.ops.aten
FORWARD = (aten.attn.default, aten.attn_output.default)
BACKWARD = (aten._attn_backward.default, aten._attn_output_backward.default)
OLD, NEW = {"attn": 1}, {"attn_output": 1}
OLD_STEP = {"attn": 1, "_attn_backward": 1}
NEW_STEP = {"attn_output": 1, "_attn_output_backward": 1}
CASE = sized(20, 30, 4, 5, 2)  # attn has 2 * 20 * 30 elements
SQUARE = sized(6, 6, 6, 6)


def output(q, k, v):
    return torch.attn(q, k, v)[0] * 2


def both(q, k, v):
    return torch.attn(q, k, v)


def sum_of_scores(q, k, v):
    result, attn = torch.attn(q, k, v)
    return result, attn.sum()


def scores_without_gradient(q, k, v):
    result, attn = torch.attn(q, k, v)
    return result * attn.detach().amax()


def backward_of_another(q, k, v):
    """The operator's backward, for other inputs than it was called with."""
    result, attn = torch.attn(q, k, v)
    return result, *aten._attn_backward(result, None, k, q, v, attn, [True] * 3)


def scores_as_gradient(q, k, v):
    """The scores are read by their own backward, and are the gradient of the output there."""
    result, attn = torch.attn(q, k, v)
    return result, *aten._attn_backward(attn, None, q, k, v, attn, [True] * 3)


def scores_as_gradient_alone(q, k, v):
    """The scores are read by a backward of other scores, and as the gradient alone."""
    _, attn = torch.attn(q, k, v)
    return aten._attn_backward(attn, None, q, k, v, q, [True] * 3)


def gradient_by_vjp(q, k, v):
    """<output, attn>, as if attn were a constant."""
    _, vjp, attn = torch.func.vjp(
        lambda *x: tuple(torch.attn(*x)), q, k, v, has_aux=True
    )
    return vjp(attn)


def output_as_gradient(q, k, v):
    """The gradient of the output is the output, which attn_output gives as well."""
    result, attn = torch.attn(q, k, v)
    return result, *aten._attn_backward(result, None, q, k, v, attn, [True] * 3)


def scores_of_a_twin(q, k, v):
    """Of two calls with the same inputs, one's scores are the gradient of the other's output."""
    (_, twin), (result, attn) = torch.attn(q, k, v), torch.attn(q, k, v)
    return result, *aten._attn_backward(twin, None, q, k, v, attn, [True] * 3)


def two(q, k, v):
    """Nothing reads the scores of the one, and all read those of the other."""
    return torch.attn(q, k, v)[0], *torch.attn(q + 1, k, v)


class TestAttnOutputCompile(TestCase):
    def assert_compiled(
        self, function, inputs, expected, dynamic=False, wanted=(), **options
    ):
        """The compiled function's results and gradients are right; these operators are in it."""
        found = Counter()

        def look(graph):
            names = (
                x.target.__name__ for x in graph.nodes if x.target in FORWARD + BACKWARD
            )
            found.update(x.split(".")[0] for x in names)

        inputs = [
            x.detach().requires_grad_(name in wanted) for name, x in zip(INPUTS, inputs)
        ]
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        results = []
        options = {"attn_output_min_bytes": 0, "joint_custom_post_pass": look} | options
        with config.patch(options), fresh_inductor_cache():
            for run in (function, compiled):
                outputs = run(*inputs)
                outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
                wanted_inputs = [x for x in inputs if x.requires_grad]
                total = sum(x.abs().sum() for x in outputs if x.requires_grad)
                grads = (
                    torch.autograd.grad(total, wanted_inputs) if wanted_inputs else ()
                )
                results.append((*outputs, *grads))
        self.assertEqual(*results)
        self.assertEqual(found, expected)

    @parametrize("dynamic", (False, True))
    @dtypes(torch.float, torch.double, torch.half, torch.bfloat16)
    def test_replaced(self, device, dtype, dynamic):
        inputs, _ = CASE.make(device, dtype)
        self.assert_compiled(output, inputs, NEW, dynamic)
        self.assert_compiled(output, inputs, NEW_STEP, dynamic, wanted=INPUTS)

    @parametrize("wanted", ("q", "k", "v", "qk", "kv"))
    def test_some_gradients(self, device, wanted):
        inputs, _ = CASE.make(device, torch.double)
        self.assert_compiled(output, inputs, NEW_STEP, wanted=wanted)

    @parametrize("function", (both, sum_of_scores, scores_without_gradient))
    def test_scores_are_read(self, device, function):
        inputs, _ = CASE.make(device, torch.double)
        self.assert_compiled(function, inputs, OLD)
        self.assert_compiled(function, inputs, OLD_STEP, wanted=INPUTS)

    def test_complex(self, device):
        """The kernel takes real numbers."""
        inputs, _ = CASE.make(device, torch.cfloat)
        self.assert_compiled(output, inputs, OLD)

    @parametrize(
        "function,expected",
        (
            (backward_of_another, OLD_STEP),
            (scores_as_gradient, OLD_STEP),
            (scores_as_gradient_alone, OLD_STEP),
            (gradient_by_vjp, OLD_STEP),
            (output_as_gradient, NEW_STEP),
            (scores_of_a_twin, {**OLD, **NEW_STEP}),
        ),
        name_fn=lambda function, _: function.__name__,
    )
    def test_backward_in_forward(self, device, function, expected):
        inputs, _ = SQUARE.make(device, torch.double)
        self.assert_compiled(function, inputs, expected)

    def test_one_of_two(self, device):
        inputs, _ = CASE.make(device, torch.double)
        self.assert_compiled(two, inputs, {**OLD, **NEW})
        self.assert_compiled(two, inputs, {**OLD_STEP, **NEW_STEP}, wanted=INPUTS)

    @parametrize("dynamic", (False, True))
    def test_small(self, device, dynamic):
        """With a backward it is replaced from a size on, without one always."""
        inputs, _ = CASE.make(device, torch.float)
        size = 4 * 2 * 20 * 30
        for least, expected in ((size, NEW_STEP), (size + 1, OLD_STEP)):
            options = {"attn_output_min_bytes": least, "dynamic": dynamic}
            self.assert_compiled(output, inputs, expected, wanted=INPUTS, **options)
            self.assert_compiled(output, inputs, NEW, **options)

    def test_wide(self, device):
        """The kernel takes no more columns; composed, a backward would gain nothing."""
        for d, e in ((1024, 1), (1, 1024)):
            inputs, _ = sized(2, 3, d, e).make(device, torch.float)
            self.assert_compiled(output, inputs, NEW_STEP, wanted=INPUTS)
            inputs, _ = sized(2, 3, d + (d > 1), e + (e > 1)).make(device, torch.float)
            self.assert_compiled(output, inputs, OLD_STEP, wanted=INPUTS)
            self.assert_compiled(output, inputs, NEW)

    def test_off(self, device):
        inputs, _ = CASE.make(device, torch.float)
        self.assert_compiled(output, inputs, OLD, attn_output_pass=False)
        self.assert_compiled(
            output, inputs, OLD_STEP, wanted=INPUTS, attn_output_pass=False
        )


instantiate_device_type_tests(TestAttnOutputCompile, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
