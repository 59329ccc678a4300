# Owner(s): ["module: autograd"]

"""Second derivatives of attn_output: its tangent, its double backward, and theirs."""

import math
import re
from functools import partial
from itertools import combinations, product

from attn_function import INPUTS
from test_attn import AttnTestCase, widen
from test_attn_output import by_few, composed, FEW, Problem, PROBLEMS, sized

import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_utils import parametrize, run_tests
from torch.utils._python_dispatch import TorchDispatchMode


aten = torch.ops.aten
RESULTS = ("output_tangent", "grad_q", "grad_k", "grad_v")
# Which of q, k and v have a tangent.
GIVEN = [x for count in (1, 2, 3) for x in combinations(INPUTS, count)]
by_given = parametrize("given", GIVEN, name_fn="".join)


def elements(problem):
    """How many attn has."""
    return math.prod((*problem.case.batch, problem.case.m, problem.case.n))


# The definition has a dozen matrices as large as attn.
by_problem = parametrize(
    "problem",
    [x for x in PROBLEMS if elements(x) <= 300_000],
    name_fn=lambda problem: problem.name,
)


def pooled(problem, dtype):
    """The problem, 64 times in a batch if it has few results in half or in bfloat16.

    The composed maths may by luck round a few numbers well, and the rule compares with its
    error.
    """
    case = problem.case
    if dtype not in (torch.half, torch.bfloat16) or elements(problem) >= 64:
        return problem
    return problem._replace(
        case=case._replace(batch=(64, *case.batch)), shared=(64, *problem.shared)
    )


def tangents_of(inputs, given=INPUTS):
    """A tangent for each input that is to have one, and None for the others."""
    generator = torch.Generator().manual_seed(1)
    made = [
        torch.randn(x.shape, dtype=torch.double, generator=generator).to(x) / 2
        for x in inputs
    ]
    return [x if name in given else None for name, x in zip(INPUTS, made)]


def double_backward(problem, inputs, tangents, grad_output, mask=(True,) * 4):
    """A tensor, or None, for each of RESULTS."""
    return aten._attn_output_double_backward(
        grad_output, *inputs, *tangents, problem.is_causal, problem.scale, mask
    )


def tangent(problem, inputs, tangents):
    return aten._attn_output_jvp(*inputs, *tangents, problem.is_causal, problem.scale)


def defined(problem, inputs, tangents, grad_output):
    """The same by the definition's derivatives, zeros in place of None."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    with dual_level():
        duals = [x if t is None else make_dual(x, t) for x, t in zip(inputs, tangents)]
        output = unpack_dual(composed(*duals, **problem.options)).tangent
    grads = torch.autograd.grad(
        output, inputs, grad_output, allow_unused=True, materialize_grads=True
    )
    return [output.detach(), *grads]


class Operators(TorchDispatchMode):
    """Records which of ATen's operators run."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


# Users compute what these functions do. Each takes a function of one tensor that returns a number,
# that tensor, and a direction in which to go.
def forward_over_reverse(f, x, u):
    return jvp(grad(f), (x,), (u,))[1]


def reverse_over_forward(f, x, u):
    return grad(lambda x: jvp(f, (x,), (u,))[1])(x)


def reverse_over_reverse(f, x, u):
    return vjp(grad(f), x)[1](u)[0]


def whole_hessian(f, x, u):
    return hessian(f)(x)


def gradient_penalty(f, x, u):
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad(g.square().sum(), x)[0]


def third_derivative(f, x, u):
    return jacfwd(lambda x: (forward_over_reverse(f, x, u) * u).sum())(x)


def third_derivative_by_reverse(f, x, u):
    return jacrev(lambda x: reverse_over_forward(f, x, u))(x)


USES = (
    forward_over_reverse,
    reverse_over_forward,
    reverse_over_reverse,
    whole_hessian,
    gradient_penalty,
    third_derivative,
    third_derivative_by_reverse,
)
by_use = parametrize("use", USES, name_fn=lambda use: use.__name__)


class TestAttnOutputSecondOrder(AttnTestCase):
    @by_problem
    @dtypes(torch.float, torch.bfloat16, torch.half, torch.cfloat)
    def test_values(self, device, dtype, problem):
        problem = pooled(problem, dtype)
        inputs, grad_output = problem.make(device, dtype)
        wide = widen((*inputs, grad_output))
        for given in GIVEN if elements(problem) <= 2000 else (INPUTS, ("k", "v")):
            tangents = tangents_of(inputs, given)
            wide_tangents = [None if x is None else widen([x])[0] for x in tangents]
            actual = double_backward(problem, inputs, tangents, grad_output)
            plain = defined(problem, inputs, tangents, grad_output)
            expected = defined(problem, wide[:3], wide_tangents, wide[3])
            self.assertEqual(actual[3] is None, given == ("v",))
            for name, x, y, z in zip(RESULTS, actual, plain, expected):
                with self.subTest(given=given, result=name):
                    x = torch.zeros_like(y) if x is None else x
                    self.assert_within_rule(x, y, z, problem.case)
            self.assert_bitwise([tangent(problem, inputs, tangents)], actual[:1])

    @dtypes(torch.float, torch.cfloat)
    def test_no_tangent(self, device, dtype):
        problem = Problem(sized(20, 30, 4, 5, 2, 3), (2, 1), True)
        inputs, grad_output = problem.make(device, dtype)
        none = [None] * 3
        zero = torch.zeros_like(grad_output)
        self.assert_bitwise([tangent(problem, inputs, none)], [zero])
        self.assert_bitwise(
            double_backward(problem, inputs, none, grad_output), [None] * 4
        )

    @by_given
    @dtypes(torch.float, torch.cfloat)
    def test_keys_that_no_query_sees_may_hold_anything(self, device, dtype, given):
        m = 20
        problem = Problem(sized(m, 30, 4, 5, 2, 3), (2, 1), True)
        inputs, grad_output = problem.make(device, dtype)
        tangents = tangents_of(inputs, given)
        q, *keys = inputs
        tangent_of_q, *key_tangents = tangents

        def run(keys, key_tangents):
            tangents = (tangent_of_q, *key_tangents)
            return double_backward(problem, (q, *keys), tangents, grad_output)

        def seen(xs):
            return [x if x is None else x[..., :m, :] for x in xs]

        cut = run(seen(keys), seen(key_tangents))
        for x in (*keys, *key_tangents):
            if x is not None:
                x[..., m:, :] = math.nan
        found = run(keys, key_tangents)
        self.assertEqual((*found[:2], *seen(found[2:])), (*cut,))
        for x in found[2:]:
            if x is not None:
                self.assertEqual(x[..., m:, :], torch.zeros_like(x[..., m:, :]))

    @by_given
    @dtypes(torch.float, torch.cfloat)
    def test_choice_of_results(self, device, dtype, given):
        problem = Problem(sized(20, 30, 4, 5, 2, 3), (2, 1), True)
        inputs, grad_output = problem.make(device, dtype)
        tangents = tangents_of(inputs, given)
        every = double_backward(problem, inputs, tangents, grad_output)
        for mask in product((False, True), repeat=4):
            found = double_backward(problem, inputs, tangents, grad_output, mask)
            wanted = [x if is_wanted else None for x, is_wanted in zip(every, mask)]
            self.assert_bitwise(found, wanted)

    @by_few
    @dtypes(torch.double, torch.cdouble)
    def test_gradcheck(self, device, dtype, problem):
        """The derivatives of both operators: third derivatives of attn_output."""
        inputs, grad_output = problem.make(device, dtype)
        for given in GIVEN if problem == FEW[-1] else (INPUTS,):
            tangents = tangents_of(inputs, given)
            there = [x for x in tangents if x is not None]
            leaves = [
                x.detach().requires_grad_() for x in (grad_output, *inputs, *there)
            ]

            def with_none(there, tangents=tangents):
                there = iter(there)
                return [None if x is None else next(there) for x in tangents]

            def of_tangent(q, k, v, *there):
                return tangent(problem, (q, k, v), with_none(there))

            def of_gradients(g, q, k, v, *there):
                found = double_backward(problem, (q, k, v), with_none(there), g)
                return tuple(x for x in found if x is not None)

            for op, args in ((of_tangent, leaves[1:]), (of_gradients, leaves)):
                gradcheck(op, args, check_forward_ad=True, fast_mode=True)

    @dtypes(torch.double, torch.cdouble)
    def test_gradgradcheck(self, device, dtype):
        problem = Problem(sized(2, 3, 2, 1, 2), (1,), True, 0.5)
        inputs, grad_output = problem.make(device, dtype)
        leaves = [
            x.detach().requires_grad_()
            for x in (grad_output, *inputs, *tangents_of(inputs))
        ]
        for op, args in (
            (lambda *x: tangent(problem, x[:3], x[3:]), leaves[1:]),
            (lambda g, *x: double_backward(problem, x[:3], x[3:], g), leaves),
        ):
            gradgradcheck(op, args, check_fwd_over_rev=True, fast_mode=True)

    @by_use
    @parametrize("under", ("alone", "vmap", "compile"))
    @dtypes(torch.double)
    def test_uses(self, device, dtype, use, under):
        """What users compute is what the definition gives, with and without the transforms."""
        torch._dynamo.reset()
        problem = Problem(sized(4, 5, 2, 3), is_causal=True, scale=0.5)
        (q, k, v), weight = problem.make(device, dtype)
        (u,) = tangents_of([k])[:1]

        def run(op):
            # k is in both products; a number of it that is not linear in the output
            def f(k):
                output = op(q * k.sum(), k, k.square() @ v[:2], **problem.options)
                return (output.sin() * weight).sum()

            if under == "vmap":
                if use is gradient_penalty:
                    self.skipTest("torch.autograd.grad is not for vmap")
                samples = torch.stack([k, 2 * k, -k])
                return vmap(lambda k: use(f, k, u))(samples)
            if under == "compile":
                if use in (gradient_penalty, third_derivative_by_reverse):
                    self.skipTest("torch.compile fails with the definition, too")
                return torch.compile(lambda k: use(f, k, u), backend="aot_eager")(k)
            return use(f, k, u)

        self.assertEqual(run(torch.attn_output), run(composed))

    @dtypes(torch.float)
    def test_no_product_is_composed(self, device, dtype):
        """Up to second order, attn_output's own operators are all that run."""
        problem = Problem(sized(20, 30, 4, 5), is_causal=True)
        inputs, grad_output = problem.make(device, dtype)
        tangents = tuple(tangents_of(inputs))
        op = partial(torch.attn_output, **problem.options)

        def grads(*inputs):
            return vjp(op, *inputs)[1](grad_output)

        with Operators() as operators:
            jvp(op, tuple(inputs), tangents)
            jvp(grads, tuple(inputs), tangents)  # the output has a tangent, too
            vjp(grads, *inputs)[1](tangents)
            leaves = [x.detach().requires_grad_() for x in inputs]
            first = torch.autograd.grad(
                op(*leaves), leaves, grad_output, create_graph=True
            )
            torch.autograd.grad(first, leaves, tangents)
        own = [x for x in operators.found if "attn_output" in str(x)]
        self.assertEqual(own.count(aten._attn_output_jvp), 2)
        self.assertEqual(own.count(aten._attn_output_double_backward), 3)
        composing = {aten.mm, aten.bmm, aten.matmul, aten.baddbmm, aten.tanh}
        self.assertFalse(composing & {*operators.found})
        # Both results are linear in the tangents, so these derivatives compose nothing either.
        leaves = [x.requires_grad_() for x in tangents]
        with Operators() as operators:
            results = double_backward(problem, inputs, leaves, grad_output)
            torch.autograd.grad(results, leaves, results)
        self.assertFalse(composing & {*operators.found})

    def test_mistakes(self, device):
        make = partial(torch.randn, device=device)
        problem = Problem(sized(2, 4, 3, 5))
        inputs, grad_output = problem.make(device, torch.float)
        ways = (
            ("_attn_output_jvp", lambda u, g: tangent(problem, inputs, u)),
            (
                "_attn_output_double_backward",
                lambda u, g: double_backward(problem, inputs, u, g),
            ),
        )
        for op, run in ways:
            for i, name in enumerate(INPUTS):
                sizes = list(inputs[i].shape)
                for wrong in (
                    make(sizes[0] + 1, sizes[1]),
                    make(sizes[0], sizes[1] + 1),
                    make(1, *sizes),
                    make(sizes).double(),
                ):
                    tangents = [None] * 3
                    tangents[i] = wrong
                    said = (
                        f"{op}: {name}_tangent must be torch.float32 of sizes {sizes}"
                    )
                    with self.subTest(op=op, wrong=wrong.shape):
                        with self.assertRaisesRegex(RuntimeError, re.escape(said)):
                            run(tangents, grad_output)
        said = f"{ways[1][0]}: grad_output must be torch.float32 of sizes [2, 5]"
        with self.assertRaisesRegex(RuntimeError, re.escape(said)):
            ways[1][1](tangents_of(inputs), make(2, 4))

    @parametrize(
        "dims", [d for d in product((None, 0), repeat=3) if any(x == 0 for x in d)]
    )
    @dtypes(torch.double)
    def test_vmap(self, device, dtype, dims):
        """Of inputs, of tangents, or of both."""
        problem = Problem(sized(5, 6, 3, 4, 2), (1,), True, 0.5)
        inputs, grad_output = problem.make(device, dtype)
        tangents = tangents_of(inputs)
        for in_inputs, in_tangents in ((dims, (None,) * 3), ((None,) * 3, dims)):
            where = (*in_inputs, *in_tangents, *(None,))
            args = [
                x if dim is None else torch.stack([x, 2 * x, -x])
                for x, dim in zip((*inputs, *tangents, grad_output), where)
            ]

            def run(*x):
                found = double_backward(problem, x[:3], x[3:6], x[6])
                return tangent(problem, x[:3], x[3:6]), *found

            alone = [
                run(*(x if dim is None else x[i] for x, dim in zip(args, where)))
                for i in range(3)
            ]
            expected = [torch.stack(xs) for xs in zip(*alone)]
            self.assertEqual(list(vmap(run, where)(*args)), expected)


instantiate_device_type_tests(TestAttnOutputSecondOrder, globals())

if __name__ == "__main__":
    run_tests()
