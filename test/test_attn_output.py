# Owner(s): ["module: autograd"]

"""attn_output: attn's output alone, causal, scaled and for heads in groups."""

import math
import re
from functools import partial
from itertools import cycle, product
from typing import NamedTuple

from attn_function import INPUTS
from test_attn import (
    AttnTestCase,
    Case,
    MISTAKES,
    unsupported,
    WANTED,
    widen,
)

import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import grad, jacrev, vmap
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_dtype import floating_and_complex_types_and
from torch.testing._internal.common_utils import (
    parametrize,
    run_tests,
)


aten = torch.ops.aten
ALL_DTYPES = (*floating_and_complex_types_and(torch.half, torch.bfloat16),)


def sized(m, n, d, e, *batch):
    return Case("_".join(map(str, (*batch, m, n, d, e))), m, d, n, e, batch=batch)


class Problem(NamedTuple):
    """A case of attn; the batch of k and v, which has 1 where samples share them; options."""

    case: Case
    shared: tuple[int, ...] = ()
    is_causal: bool = False
    scale: float = 1.0

    @property
    def name(self):
        shared = "_".join(map(str, self.shared))
        return f"{self.case.name}_{shared}_{self.is_causal}_{self.scale}".replace(
            "-", "minus_"
        ).replace(".", "_")

    @property
    def options(self):
        return {"is_causal": self.is_causal, "scale": self.scale}

    def make(self, device, dtype):
        """The inputs, and a gradient for the output."""
        (q, k, v), (grad_output, _) = self.case.make(device, dtype)
        index = tuple(slice(0, 1) if size == 1 else slice(None) for size in self.shared)
        return (q, k[index], v[index]), grad_output


# Sizes at the edges of the kernel's blocks, each with and without a mask, and with a scale in
# one of them. With fewer queries than keys, the last keys are masked for all of them.
SIZES = (
    sized(1, 1, 1, 1),
    sized(3, 4, 5, 6),
    sized(7, 3, 2, 2),
    sized(2, 3, 0, 4),
    sized(2, 0, 3, 4),
    sized(0, 2, 3, 4),
    sized(2, 3, 4, 0),
    sized(5, 300, 70, 9),
    sized(300, 5, 9, 70),
    sized(300, 3, 9, 70),  # tiles are transposed
    sized(1, 600, 33, 20),
    sized(95, 97, 16, 17),
    sized(193, 289, 33, 2),
    sized(400, 700, 40, 24),
    sized(700, 400, 24, 40),
    # The last key that is seen is the first of a block of columns.
    sized(289, 290, 9, 8),
    sized(577, 600, 9, 8),
    sized(60, 70, 1030, 3),  # so wide that it is composed
    sized(2, 3, 4, 5, 300),
    sized(97, 130, 20, 30, 3),
)
OPTIONS = (((False, 1.0), (True, -1.5)), ((True, 1.0), (False, 0.125)))
PROBLEMS = (
    *(
        Problem(case, case.batch, *options)
        for case, both in zip(SIZES, cycle(OPTIONS))
        for options in both
    ),
    *(
        Problem(sized(m, n, d, e, *batch), shared, is_causal, 0.5)
        for (m, n, d, e), (batch, shared), is_causal in product(
            ((3, 4, 5, 6), (97, 130, 20, 30), (300, 200, 17, 33)),
            (
                ((2, 3), (2, 1)),
                ((2, 3), (1, 3)),
                ((2, 3), (1, 1)),
                ((2, 2, 3), (1, 2, 1)),
                ((20, 2), (20, 1)),
            ),
            (False, True),
        )
    ),
)
by_problem = parametrize("problem", PROBLEMS, name_fn=lambda problem: problem.name)
FEW = [x for x in PROBLEMS if math.prod((*x.case[1:5], *x.case.batch)) < 400]
FEW += [
    Problem(sized(3, 2, 2, 1, 2, 2), shared, True, 0.5) for shared in ((2, 1), (1, 2))
]
by_few = parametrize("problem", FEW, name_fn=lambda problem: problem.name)


def composed(q, k, v, *, is_causal=False, scale=1.0):
    """The definition."""
    attn = torch.tanh(scale * (q @ k.mT))
    return (attn.tril() if is_causal else attn) @ v


def both_ways(op, problem, inputs, grad_output):
    """The output and the gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = op(*inputs, **problem.options)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad_output)]


class TestAttnOutput(AttnTestCase):
    def assert_agrees_with_definition(self, problem, inputs, grad_output):
        given = (*inputs, grad_output)
        *wide, wide_grad = widen(given)
        actual = both_ways(torch.attn_output, problem, inputs, grad_output)
        plain = both_ways(composed, problem, inputs, grad_output)
        expected = both_ways(composed, problem, wide, wide_grad)
        for name, *results in zip(("output", *INPUTS), actual, plain, expected):
            with self.subTest(result=name):
                self.assert_within_rule(*results, problem.case)

    @by_problem
    @dtypes(*ALL_DTYPES)
    def test_values_and_gradients(self, device, dtype, problem):
        self.assert_agrees_with_definition(problem, *problem.make(device, dtype))

    @by_few
    @dtypes(torch.double, torch.cdouble)
    def test_gradcheck(self, device, dtype, problem):
        inputs, _ = problem.make(device, dtype)
        inputs = [x.detach().requires_grad_() for x in inputs]
        op = partial(torch.attn_output, **problem.options)
        gradcheck(op, inputs, check_forward_ad=True, check_batched_grad=True)
        gradgradcheck(op, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)

    @parametrize("wanted", WANTED, name_fn="".join)
    @dtypes(torch.float)
    def test_choice_of_gradients(self, device, dtype, wanted):
        problem = Problem(sized(20, 30, 4, 5, 2, 3), (2, 1), True)
        inputs, grad_output = problem.make(device, dtype)
        _, *expected = both_ways(torch.attn_output, problem, inputs, grad_output)
        inputs = [
            x.detach().requires_grad_(name in wanted) for name, x in zip(INPUTS, inputs)
        ]
        output = torch.attn_output(*inputs, **problem.options)
        needed = [x for x in inputs if x.requires_grad]
        actual = torch.autograd.grad(output, needed, grad_output)
        self.assert_bitwise(
            actual, [x for name, x in zip(INPUTS, expected) if name in wanted]
        )

    @dtypes(torch.float, torch.cfloat)
    def test_no_sample_shares_k_and_v(self, device, dtype):
        make = partial(torch.randn, device=device, dtype=dtype)
        q, k, v = make(0, 2, 30), make(1, 400, 30), make(1, 400, 50)
        for _ in range(3):
            # The gradients may get the memory of these, which is full of NaN.
            used = [torch.full_like(x, math.nan) for _ in range(20) for x in (k, v)]
            del used
            grads = aten._attn_output_backward(
                make(0, 2, 50), q, k, v, False, 1.0, [True] * 3
            )
            for x, y in zip(grads, (q, k, v)):
                self.assertEqual(x, torch.zeros_like(y))

    @dtypes(torch.float)
    def test_saves_its_inputs_alone(self, device, dtype):
        saved = []
        inputs = [torch.randn(5, 3, device=device, dtype=dtype) for _ in INPUTS]
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
            torch.attn_output(*(x.requires_grad_() for x in inputs))
        kept, given = ({x.data_ptr() for x in xs} for xs in (saved, inputs))
        self.assertEqual(kept, given)

    @dtypes(torch.float, torch.bfloat16)
    def test_a_query_sees_no_later_key(self, device, dtype):
        problem = Problem(sized(400, 500, 9, 8), is_causal=True)
        inputs, grad_output = problem.make(device, dtype)
        before = both_ways(torch.attn_output, problem, inputs, grad_output)
        for place in (1, 200, 399, 450):
            changed = [x.clone() for x in inputs]
            changed[1][place] = changed[2][place] = 3
            after = both_ways(torch.attn_output, problem, changed, grad_output)
            # Rows of output and grad_q before the key stay, and all of a key after all queries.
            for x, y in zip(before[:2], after[:2]):
                self.assert_bitwise([y[:place]], [x[:place]])
                self.assertEqual(x[place:].equal(y[place:]), place >= 400)
            if place >= 400:
                self.assert_bitwise(after[2:], before[2:])
            for x in after[2:]:
                self.assertFalse(x[400:].any())

    @parametrize("wide", (False, True))
    @dtypes(torch.float, torch.bfloat16, torch.cfloat)
    def test_keys_that_no_query_sees_may_hold_anything(self, device, dtype, wide):
        m, width = 60, 1030 if wide else 9
        problem = Problem(sized(m, 70, width, 3, 2, 3), (1, 3), is_causal=True)
        (q, k, v), grad_output = problem.make(device, dtype)
        cut = both_ways(
            torch.attn_output, problem, (q, k[..., :m, :], v[..., :m, :]), grad_output
        )
        for value in (math.nan, -math.inf):
            for x in (k, v):
                x[..., m:, :] = value
            found = both_ways(torch.attn_output, problem, (q, k, v), grad_output)
            self.assertEqual(found[:2], cut[:2])
            for x, y in zip(found[2:], cut[2:]):
                self.assertEqual(x[..., :m, :], y)
                self.assertEqual(x[..., m:, :], torch.zeros_like(x[..., m:, :]))

    # "no_batch" is no mistake here: a batch of no samples may share one k and v.
    @parametrize(
        "mistake",
        [mistake for mistake in MISTAKES if mistake.name != "no_batch"],
        name_fn=lambda mistake: mistake.name,
    )
    def test_mistakes(self, device, mistake):
        q, k, v = (
            torch.randn(*size, device=device) for size in ((2, 3), (4, 3), (4, 5))
        )
        said = mistake.message.format(device=q.device).replace("attn", "attn_output", 1)
        said = said.replace(
            "same batch dimensions *",
            "same batch dimensions *, or k and v 1 in place of some",
        )
        with self.assertRaisesRegex(mistake.error, f"^{re.escape(said)}"):
            torch.attn_output(*mistake.args(q, k, v))

    def test_mistakes_of_its_own(self, device):
        make = partial(torch.randn, device=device)
        q, k, v = make(2, 3), make(4, 3), make(4, 5)
        same_batch = (
            "must have the same batch dimensions *, or k and v 1 in place of some"
        )
        for args in (
            (q.expand(1, 2, 3), k.expand(7, 4, 3), v.expand(7, 4, 5)),
            (q.expand(7, 2, 3), k.expand(7, 4, 3), v.expand(1, 4, 5)),
            (q.expand(7, 2, 3), k.expand(1, 4, 3), v.expand(7, 4, 5)),
            (q.expand(6, 2, 3), k.expand(2, 4, 3), v.expand(2, 4, 5)),
        ):
            with self.assertRaisesRegex(RuntimeError, re.escape(same_batch)):
                torch.attn_output(*args)
        for shape in ((2, 4), (3, 5), (1, 2, 5)):
            said = (
                f"_attn_output_backward: grad_output must be {q.dtype} of sizes [2, 5]"
            )
            with self.assertRaisesRegex(RuntimeError, re.escape(said)):
                aten._attn_output_backward(make(shape), q, k, v, False, 1.0, [True] * 3)

    def test_unsupported_dtypes(self, device):
        for dtype, where, mode, said in unsupported(device):
            with self.subTest(dtype=dtype, where=where), mode:
                x = torch.empty(2, 2, dtype=dtype, device=where)
                with self.assertRaisesRegex(
                    RuntimeError, said.replace("attn", "attn_output", 1)
                ):
                    torch.attn_output(x, x, x)

    @parametrize(
        "dims", [d for d in product((None, 0), repeat=3) if any(x == 0 for x in d)]
    )
    @dtypes(torch.double)
    def test_vmap(self, device, dtype, dims):
        problem = Problem(sized(5, 6, 3, 4, 2), (1,), True, 0.5)
        inputs, _ = problem.make(device, dtype)
        inputs = [
            x if dim is None else torch.stack([x, 2 * x, -x])
            for x, dim in zip(inputs, dims)
        ]
        op = partial(torch.attn_output, **problem.options)

        def alone(i):
            return [x if dim is None else x[i] for x, dim in zip(inputs, dims)]

        expected = torch.stack([op(*alone(i)) for i in range(3)])
        self.assertEqual(vmap(op, dims)(*inputs), expected)
        total = grad(lambda *x: op(*x).square().sum(), argnums=(0, 1, 2))
        expected = [torch.stack(x) for x in zip(*(total(*alone(i)) for i in range(3)))]
        self.assertEqual(list(vmap(total, dims)(*inputs)), expected)

    @dtypes(torch.double)
    def test_jacobian_and_tangent(self, device, dtype):
        problem = Problem(sized(3, 4, 2, 3, 2), (1,), True, 0.5)
        inputs, _ = problem.make(device, dtype)
        op = partial(torch.attn_output, **problem.options)
        jacobians = jacrev(op, argnums=(0, 1, 2))(*inputs)
        tangents = [torch.randn_like(x) for x in inputs]
        with dual_level():
            output = op(*(make_dual(*pair) for pair in zip(inputs, tangents)))
            tangent = unpack_dual(output).tangent
        expected = sum(
            (x.flatten(3) @ t.flatten()) for x, t in zip(jacobians, tangents)
        )
        self.assertEqual(tangent, expected)

    @dtypes(torch.bfloat16)
    def test_autocast(self, device, dtype):
        q, k, v = (torch.randn(4, 3, device=device) for _ in INPUTS)
        q.requires_grad_()
        with torch.autocast(torch.device(device).type, dtype):
            output = torch.attn_output(q, k, v.to(dtype), is_causal=True)
        self.assertEqual(output.dtype, dtype)
        (grad_q,) = torch.autograd.grad(output.sum(), q)
        self.assertEqual(grad_q.dtype, torch.float)


instantiate_device_type_tests(TestAttnOutput, globals())

if __name__ == "__main__":
    run_tests()
