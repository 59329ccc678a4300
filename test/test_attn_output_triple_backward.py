# Owner(s): ["module: autograd"]

"""The third order of attn_output: the double backward's own derivatives, and what trains on them."""

import re
from functools import partial
from itertools import product

from test_attn import AttnTestCase, widen
from test_attn_output import composed, Problem, sized
from test_attn_output_second_order import (
    by_problem,
    elements,
    Operators,
    pooled,
    RESULTS,
)

import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_utils import parametrize, run_tests


aten = torch.ops.aten
# The operator's tensors, after which come is_causal, scale and output_mask. Only q, k and v
# are always there.
NAMES = (
    *("grad_output", "q", "k", "v"),
    *("u_q", "u_k", "u_v"),
    *("w_grad_output", "w_q", "w_k", "w_v"),
)
OPTIONAL = [name for name in NAMES if name not in ("q", "k", "v")]
# Choices of what is given: all of them; what training on second derivatives by q gives; and for each
# term of the formulas that these alone don't have, one choice without most others.
GIVEN = (
    OPTIONAL,
    ("grad_output", "u_q", "w_q"),
    ("u_q", "w_k"),
    ("grad_output", "u_k", "w_q"),
    ("grad_output", "u_k", "w_k", "w_v"),
    ("u_k", "w_grad_output", "w_k"),
    ("u_q", "u_v", "w_grad_output", "w_q"),
    ("grad_output", "u_q", "w_v"),
    ("grad_output", "u_v", "w_q", "w_grad_output"),
)
by_given = parametrize("given", GIVEN, name_fn="_".join)


def make(problem, device, dtype, given):
    """A tensor, or None, for each of NAMES."""
    (q, k, v), grad_output = problem.make(device, dtype)
    found = {"grad_output": grad_output, "q": q, "k": k, "v": v}
    generator = torch.Generator().manual_seed(1)
    for name in OPTIONAL[1:]:
        like = found[name[2:]]
        made = torch.randn(like.shape, dtype=torch.double, generator=generator)
        found[name] = made.to(like) / 2
    return [found[x] if x in (*given, "q", "k", "v") else None for x in NAMES]


def triple_backward(problem, tensors, mask=(True,) * 4):
    """A tensor, or None, for each of RESULTS."""
    return aten._attn_output_triple_backward(
        *tensors, problem.is_causal, problem.scale, mask
    )


def defined(problem, tensors):
    """The same by the definition's derivatives, zeros in place of None."""
    op = partial(composed, **problem.options)
    q, k, v = inputs = tensors[1:4]
    output = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    likes = dict(zip(NAMES, (output, q, k, v, q, k, v, output, q, k, v)))
    grad_output, _, _, _, *tangents = (
        torch.zeros_like(likes[name]) if x is None else x
        for name, x in zip(NAMES, tensors)
    )
    u, w = tuple(tangents[:3]), tuple(tangents[3:])

    def second_order(grad_output, *inputs):
        output_tangent, gradients = vjp(lambda *x: jvp(op, x, u)[1], *inputs)
        return output_tangent, *gradients(grad_output)

    return jvp(second_order, (grad_output, *inputs), w)[1]


# Ways to the Laplacian of a scalar field: the sum of its second derivatives by each coordinate of
# a point. Each takes a function of points (n, d) to values (n, 1), and the points.
def units(x):
    """The directions of the coordinates, for all points."""
    return [torch.eye(x.shape[1]).to(x)[i].expand_as(x) for i in range(x.shape[1])]


def gradient(f):
    return grad(lambda x: f(x).sum())


def forward_over_reverse(f, x):
    return sum(
        jvp(gradient(f), (x,), (unit,))[1][:, i] for i, unit in enumerate(units(x))
    )


def forward_over_reverse_vmapped(f, x):
    directions = torch.stack(units(x))
    rows = vmap(lambda unit: jvp(gradient(f), (x,), (unit,))[1])(directions)
    return rows.diagonal(dim1=0, dim2=2).sum(1)


def forward_over_forward(f, x):
    return sum(
        jvp(lambda x, unit=unit: jvp(f, (x,), (unit,))[1], (x,), (unit,))[1][:, 0]
        for unit in units(x)
    )


def reverse_over_reverse(f, x):
    if not x.requires_grad:
        x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    return sum(
        torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0][:, i]
        for i in range(x.shape[1])
    )


def hessian_of_a_point(f, x):
    of_point = hessian(lambda point: f(point[None])[0, 0])
    return vmap(of_point)(x).diagonal(dim1=1, dim2=2).sum(1)


LAPLACIANS = (
    forward_over_reverse,
    forward_over_reverse_vmapped,
    forward_over_forward,
    reverse_over_reverse,
    hessian_of_a_point,
)
by_laplacian = parametrize("laplacian", LAPLACIANS, name_fn=lambda x: x.__name__)


class Field(torch.nn.Module):
    """tanh(x W1ᵀ) W2 for points x whose last coordinate is 1, so that W1 has the biases."""

    def __init__(self, op, d, hidden):
        super().__init__()
        self.op = op
        generator = torch.Generator().manual_seed(2)
        draw = partial(torch.randn, generator=generator, dtype=torch.double)
        self.first = torch.nn.Parameter(draw(hidden, d + 1))
        self.second = torch.nn.Parameter(draw(hidden, 1) / 4)

    def forward(self, x):
        ones = torch.ones_like(x[..., :1])
        return self.op(torch.cat((x, ones), -1), self.first, self.second)


def trained(laplacian, op, device):
    """The loss of an equation on the Laplacian, and its gradients by the weights."""
    field = Field(op, 2, 7).to(device)
    x = torch.randn(
        30, 2, dtype=torch.double, generator=torch.Generator().manual_seed(3)
    )
    loss = (laplacian(field, x.to(device)) - 1).square().mean()
    return [loss, *torch.autograd.grad(loss, list(field.parameters()))]


class TestAttnOutputTripleBackward(AttnTestCase):
    @by_problem
    @dtypes(torch.float, torch.bfloat16, torch.half, torch.cfloat)
    def test_values(self, device, dtype, problem):
        problem = pooled(problem, dtype)
        for given in GIVEN if elements(problem) <= 2000 else GIVEN[:2]:
            tensors = make(problem, device, dtype, given)
            wide = [None if x is None else widen([x])[0] for x in tensors]
            actual = triple_backward(problem, tensors)
            plain, exact = defined(problem, tensors), defined(problem, wide)
            for name, x, y, z in zip(RESULTS, actual, plain, exact):
                with self.subTest(given=given, result=name):
                    x = torch.zeros_like(y) if x is None else x
                    self.assert_within_rule(x, y, z, problem.case)

    @dtypes(torch.double, torch.cdouble)
    def test_results_that_there_are(self, device, dtype):
        """What is zero, whatever the numbers are, is None, and nothing else is."""
        problem = Problem(sized(3, 4, 2, 3, 2), (1,), scale=0.5)
        for given in product((False, True), repeat=len(OPTIONAL)):
            names = [name for name, is_given in zip(OPTIONAL, given) if is_given]
            tensors = make(problem, device, dtype, names)
            found = triple_backward(problem, tensors)
            exact = defined(problem, tensors)
            meta = [None if x is None else x.to("meta") for x in tensors]
            for x, y, z in zip(found, exact, triple_backward(problem, meta)):
                with self.subTest(given=names):
                    self.assertEqual(x is not None, bool(y.any()))
                    self.assertEqual(x is None, z is None)
                    if x is not None:
                        self.assertEqual(x, y)
                        self.assertEqual(x.shape, z.shape)

    @by_given
    @dtypes(torch.float, torch.cfloat)
    def test_choice_of_results(self, device, dtype, given):
        problem = Problem(sized(20, 30, 4, 5, 2, 3), (2, 1), True)
        tensors = make(problem, device, dtype, given)
        every = triple_backward(problem, tensors)
        for mask in product((False, True), repeat=4):
            found = triple_backward(problem, tensors, mask)
            wanted = [x if is_wanted else None for x, is_wanted in zip(every, mask)]
            self.assert_bitwise(found, wanted)

    @by_given
    @dtypes(torch.double, torch.cdouble)
    def test_gradcheck(self, device, dtype, given):
        """Fourth derivatives of attn_output."""
        problem = Problem(sized(3, 4, 2, 1, 2), (1,), True, 0.5)
        tensors = make(problem, device, dtype, given)
        there = [i for i, x in enumerate(tensors) if x is not None]

        def op(*leaves):
            args = [None] * len(tensors)
            for i, x in zip(there, leaves):
                args[i] = x
            return tuple(x for x in triple_backward(problem, args) if x is not None)

        leaves = [tensors[i].detach().requires_grad_() for i in there]
        gradcheck(op, leaves, check_forward_ad=True, fast_mode=True)
        if given in GIVEN[:2]:
            gradgradcheck(op, leaves, check_fwd_over_rev=True, fast_mode=True)

    @by_laplacian
    @dtypes(torch.double)
    def test_training_on_a_laplacian(self, device, dtype, laplacian):
        """By attn_output's own operators alone, and as the definition gives it."""
        with Operators() as operators:
            found = trained(laplacian, torch.attn_output, device)
        self.assertEqual(found, trained(laplacian, composed, device))
        composing = {aten.mm, aten.bmm, aten.matmul, aten.baddbmm, aten.tanh}
        self.assertFalse(composing & {*operators.found})
        self.assertIn(aten._attn_output_triple_backward, operators.found)

    @dtypes(torch.double)
    def test_hessian_vector_product_of_a_loss(self, device, dtype):
        """Of a loss that has second derivatives: fourth derivatives of the field."""
        fields = [Field(op, 2, 5).to(device) for op in (torch.attn_output, composed)]
        x = torch.randn(9, 2, dtype=dtype, device=device)
        found = []
        for field in fields:
            weights = dict(field.named_parameters())

            def loss(weights, field=field):
                f = partial(functional_call, field, weights)
                return forward_over_reverse(f, x).square().mean()

            tangents = {name: torch.ones_like(w) for name, w in weights.items()}
            found.append(jvp(grad(loss), (weights,), (tangents,))[1])
        self.assertEqual(*found)

    @parametrize(
        "names", (("q",), ("u_q",), ("w_q", "w_grad_output"), ("k", "w_v"), NAMES)
    )
    @parametrize("is_causal", (False, True))
    @parametrize("mask", ((True,) * 4, (True, True, False, False)))
    @dtypes(torch.double)
    def test_vmap(self, device, dtype, names, is_causal, mask):
        problem = Problem(sized(5, 6, 3, 4, 2), (1,), is_causal, 0.5)
        tensors = make(problem, device, dtype, OPTIONAL)
        dims = tuple(0 if name in names else None for name in NAMES)
        args = [
            x if dim is None else torch.stack([x, 2 * x, -x])
            for x, dim in zip(tensors, dims)
        ]

        def run(*tensors):
            found = triple_backward(problem, tensors, mask)
            return tuple(x for x in found if x is not None)

        alone = [
            run(*(x if dim is None else x[i] for x, dim in zip(args, dims)))
            for i in range(3)
        ]
        expected = [torch.stack(xs) for xs in zip(*alone)]
        self.assertEqual(list(vmap(run, dims)(*args)), expected)

    def test_mistakes(self, device):
        problem = Problem(sized(2, 4, 3, 5))
        tensors = make(problem, device, torch.float, OPTIONAL)
        for i, name in enumerate(NAMES):
            if name not in OPTIONAL:
                continue
            sizes = list(tensors[i].shape)
            for wrong in (
                (sizes[0] + 1, sizes[1]),
                (sizes[0], sizes[1] + 1),
                (1, *sizes),
            ):
                changed = list(tensors)
                changed[i] = torch.randn(wrong, device=device)
                said = (
                    f"_attn_output_triple_backward: {name} must be torch.float32 of "
                    f"sizes {sizes}"
                )
                with self.subTest(name=name, wrong=wrong):
                    with self.assertRaisesRegex(RuntimeError, re.escape(said)):
                        triple_backward(problem, changed)


instantiate_device_type_tests(TestAttnOutputTripleBackward, globals())

if __name__ == "__main__":
    run_tests()
