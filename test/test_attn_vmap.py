# Owner(s): ["module: functorch"]

"""attn under vmap: each sample as if it were alone."""

import re
from functools import partial
from itertools import product

from attn_function import INPUTS, OUTPUTS
from test_attn import (
    AttnTestCase,
    by_case,
    by_case_in,
    Case,
    copied_elements,
    MISTAKES,
    SMALL,
    SMALL_BATCH,
    USED,
)
from test_attn_autograd import outputs_of, pullback, subsets

import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
    onlyCPU,
)
from torch.testing._internal.common_utils import parametrize, run_tests, subtest
from torch.utils._python_dispatch import TorchDispatchMode


SAMPLES = 6  # a size that nothing else here has
TWO_DIMS = Case("two_batch_dims", 2, 3, 4, 5, batch=(2, 3))
by_small_case = by_case_in((SMALL, SMALL_BATCH))


def dims_of(count, *choices):
    """Every choice of in_dims for ``count`` operands of which one at least is batched."""
    return [
        dims
        for dims in product((None, *choices), repeat=count)
        if any(dim is not None for dim in dims)
    ]


def name_of(dims):
    return "_".join(str(dim).replace("-", "m").replace("None", "x") for dim in dims)


def by_dims(*choices):
    return parametrize("in_dims", dims_of(3, *choices), name_fn=name_of)


def make(case, device, dtype, in_dims, size=SAMPLES):
    """Inputs, and where there are dims for them also the gradients of the outputs."""
    samples = [
        [x for part in case.make(device, dtype) for x in part]
        for _ in range(max(size, 1))
    ]
    return [
        column[0] if dim is None else torch.stack(column, dim).narrow(dim, 0, size)
        for column, dim in zip(zip(*samples), in_dims)
    ]


def loop(f, in_dims, out_dims=0):
    """What ``vmap(f, in_dims)`` stands for."""

    def run(*args):
        (size, *_) = (x.size(d) for x, d in zip(args, in_dims) if d is not None)
        rows = [
            f(*(x if d is None else x.select(d, i) for x, d in zip(args, in_dims)))
            for i in range(size)
        ]
        return [torch.stack(column, out_dims) for column in zip(*rows)]

    return run


def over_samples(op):
    """attn is put to the test under vmap, the definition computes sample by sample."""
    return vmap if op is torch.attn else loop


def flatten(blocks):
    """The tensors of tuples of tuples."""
    if isinstance(blocks, torch.Tensor):
        return (blocks,)
    return tuple(x for block in blocks for x in flatten(block))


def loss(op):
    """A scalar that no output enters linearly."""
    return lambda *inputs: sum(x.square().sum() for x in op(*inputs))


def argnums(x):
    return tuple(range(len(x)))


# Derivatives of functions of q, k and v, or of some of these.
DERIVATIVES = {
    "grad": lambda op: lambda *x: grad(loss(op), argnums(x))(*x),
    "jacrev": lambda op: lambda *x: flatten(jacrev(outputs_of(op), argnums(x))(*x)),
    "jacfwd": lambda op: lambda *x: flatten(jacfwd(outputs_of(op), argnums(x))(*x)),
    "hessian": lambda op: lambda *x: flatten(hessian(loss(op), argnums(x))(*x)),
    "jvp": lambda op: lambda *x: jvp(outputs_of(op), x, tuple(y + 1 for y in x))[1],
    "vjp": lambda op: (
        lambda *x: vjp(outputs_of(op), *x)[1](tuple(y.detach() + 1 for y in op(*x)))
    ),
    "grad_of_jvp": lambda op: (
        lambda *x: grad(
            lambda *y: sum(z.square().sum() for z in jvp(outputs_of(op), y, x)[1]),
            argnums(x),
        )(*x)
    ),
    "jvp_of_grad": lambda op: lambda *x: jvp(grad(loss(op), argnums(x)), x, x)[1],
    "jvp_of_jvp": lambda op: (
        lambda *x: jvp(lambda *y: jvp(outputs_of(op), y, x)[1], x, x)[1]
    ),
}


SECOND_ORDER = ("hessian", "grad_of_jvp", "jvp_of_grad", "jvp_of_jvp")


def order_of(derivative):
    return 1 + (derivative in SECOND_ORDER)


def along(names, derivative):
    """A derivative for the arguments of these names; the others are constants."""

    def of(op):
        def run(*inputs):
            def some(*x):
                of_all = dict(zip(INPUTS + OUTPUTS, inputs))
                named = {**of_all, **dict(zip(names, x))}
                return op(*named.values())

            return derivative(some)(*(inputs[INPUTS.index(i)] for i in names))

        return run

    return of


FORWARD = torch.ops.aten.attn.default
BACKWARD = torch.ops.aten._attn_backward.default
# The names of the operators' tensors.
OPERANDS = {FORWARD: INPUTS, BACKWARD: ("grad_output", "grad_attn", *INPUTS, "attn")}


class Storages(TorchDispatchMode):
    """How many bytes there are behind each operand of attn and of its backward."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in OPERANDS:
            self.seen[func] = {
                name: x.untyped_storage().nbytes()
                for name, x in zip(OPERANDS[func], args)
                if x is not None
            }
        return func(*args, **(kwargs or {}))


class Attention(torch.nn.Module):
    """A layer with weights of its own, which the samples share."""

    def __init__(self, op, device, dtype):
        super().__init__()
        self.op = op
        for name, size in zip(INPUTS, (3, 3, 4)):
            linear = torch.nn.Linear(5, size, device=device, dtype=dtype)
            setattr(self, name, linear)

    def forward(self, x):
        output, attn = self.op(self.q(x), self.k(x), self.v(x))
        return output.square().sum() + attn.sum()


class TestAttnVmap(AttnTestCase):
    def setUp(self):
        AttnTestCase.setUp(self)  # super() fails in the copies that 2.6 makes
        # A fallback is a loop as well, and would pass.
        functorch = torch._C._functorch
        before = functorch._is_vmap_fallback_enabled()
        functorch._set_vmap_fallback_enabled(False)
        self.addCleanup(functorch._set_vmap_fallback_enabled, before)

    def assert_maps(self, function, case, in_dims, args, order=1):
        """``function(op)`` of attn under vmap, by the rule."""

        def compute(op, args):
            return over_samples(op)(function(op), in_dims)(*args)

        self.assert_agrees(compute, case, args, order=order)

    @by_dims(0, 1, -1)
    @by_case_in((SMALL, SMALL_BATCH, TWO_DIMS))
    @dtypes(torch.float, torch.cfloat)
    def test_values(self, device, dtype, case, in_dims):
        self.assert_maps(outputs_of, case, in_dims, make(case, device, dtype, in_dims))

    @by_case
    @dtypes(torch.float, torch.bfloat16)
    def test_values_of_cases(self, device, dtype, case):
        for in_dims in dims_of(3, 0):
            with self.subTest(in_dims=in_dims):
                args = make(case, device, dtype, in_dims, 2)
                self.assert_maps(outputs_of, case, in_dims, args)

    @by_dims(0, 1, -1)
    @by_case_in((SMALL, SMALL_BATCH, TWO_DIMS))
    @dtypes(torch.float, torch.cfloat)
    def test_gradients(self, device, dtype, case, in_dims):
        in_dims = (*in_dims, 0, -1)
        self.assert_maps(pullback, case, in_dims, make(case, device, dtype, in_dims))

    # Not complex: vmap sums the scores in another order, and near a pole of tanh the
    # gradients of a large score have no digit that survives it.
    @by_case
    @dtypes(torch.float)
    def test_gradients_of_cases(self, device, dtype, case):
        for in_dims in dims_of(3, 0):
            with self.subTest(in_dims=in_dims):
                in_dims = (*in_dims, 0, 0)
                args = make(case, device, dtype, in_dims, 2)
                self.assert_maps(pullback, case, in_dims, args)

    # Where the outputs' gradients alone are batched it is what jacrev does.
    @parametrize("used", USED, name_fn="_".join)
    @by_small_case
    @dtypes(torch.float, torch.cfloat)
    def test_gradients_of_some(self, device, dtype, case, used):
        for in_dims in dims_of(3 + len(used), 0):
            with self.subTest(in_dims=in_dims):
                names = (*INPUTS, *used)
                dims = dict(zip(names, in_dims))
                args = make(case, device, dtype, map(dims.get, INPUTS + OUTPUTS))
                args = [x for x, name in zip(args, INPUTS + OUTPUTS) if name in names]
                self.assert_maps(partial(pullback, used=used), case, in_dims, args)

    @by_small_case
    @dtypes(torch.float, torch.cfloat)
    def test_one_pullback(self, device, dtype, case):
        """The forward has no samples, only its backward."""
        for in_dims in dims_of(2, 0, -1):
            with self.subTest(in_dims=in_dims):
                args = make(case, device, dtype, (None, None, None, *in_dims))

                def compute(op, args, in_dims=in_dims):
                    _, f = vjp(outputs_of(op), *args[:3])
                    mapped = over_samples(op)(lambda *grads: f(grads), in_dims)
                    return mapped(*args[3:])

                self.assert_agrees(compute, case, args)

    @parametrize("derivative", DERIVATIVES)
    @by_dims(0)
    @by_small_case
    @dtypes(torch.float)
    def test_derivatives(self, device, dtype, case, in_dims, derivative):
        args = make(case, device, dtype, in_dims, 3)
        function, order = DERIVATIVES[derivative], order_of(derivative)
        self.assert_maps(function, case, in_dims, args, order)

    @parametrize("derivative", DERIVATIVES)
    @parametrize("names", subsets(INPUTS)[:-1], name_fn="".join)
    @dtypes(torch.float)
    def test_derivatives_of_some(self, device, dtype, names, derivative):
        function = along(names, DERIVATIVES[derivative])
        for in_dims in dims_of(3, 0):
            with self.subTest(in_dims=in_dims):
                args = make(SMALL_BATCH, device, dtype, in_dims, 3)
                order = order_of(derivative)
                self.assert_maps(function, SMALL_BATCH, in_dims, args, order)

    # One tensor is infinite, which only a missing tangent would be multiplied by.
    @parametrize("names,infinite", (("q", "q"), ("k", "k"), ("v", "qk")))
    @parametrize("batched", (False, True))
    @by_small_case
    def test_missing_tangent(self, device, case, batched, names, infinite):
        inputs, _ = case.make(device, torch.double)
        named = dict(zip(INPUTS, inputs))
        for name in infinite:
            named[name].select(-2, 0).select(-1, 0).fill_(torch.inf)

        def tangents(*u):
            derivative = along(names, lambda op: lambda *x: jvp(op, x, u)[1])
            return derivative(torch.attn)(*inputs)

        u = tuple(torch.ones_like(named[name]) for name in names)
        if batched:
            found = vmap(tangents)(*(x.expand(3, *x.shape) for x in u))
        else:
            found = tangents(*u)
        for x in found:
            self.assertTrue(x.isfinite().all())

    @parametrize("inner", dims_of(3, 0), name_fn=name_of)
    @parametrize("outer", dims_of(3, 0), name_fn=name_of)
    @dtypes(torch.float)
    def test_nested(self, device, dtype, inner, outer):
        inputs = [
            make(SMALL, device, dtype, [*inner, 0, 0], SAMPLES + 1)
            for _ in range(SAMPLES)
        ]
        inputs = [
            column[0] if dim is None else torch.stack(column)
            for column, dim in zip(zip(*inputs), (*outer, 0, 0))
        ]
        for function, args in ((outputs_of, inputs[:3]), (pullback, inputs)):
            more = (0,) * (len(args) - 3)

            def compute(op, args, function=function, more=more):
                over = over_samples(op)
                mapped = over(function(op), (*inner, *more))
                return over(mapped, (*outer, *more))(*args)

            self.assert_agrees(compute, SMALL, args)

    @dtypes(torch.float)
    def test_between_transforms(self, device, dtype):
        """A gradient of a vmap, and the gradient of that by samples."""
        case = SMALL._replace(m=SMALL.m * SAMPLES)
        q, k, v = make(SMALL, device, dtype, (0, None, 0), SAMPLES)
        several = [torch.stack((x, -x, 2 * x)) for x in (q, k, v)]

        def compute(op, args):
            over = over_samples(op)

            def total(*x):
                return sum(
                    y.square().sum() for y in over(outputs_of(op), (0, None, 0))(*x)
                )

            return over(grad(total, (0, 1, 2)), (0, 0, 0))(*args)

        self.assert_agrees(compute, case, several)

    @by_dims(0)
    @by_small_case
    @dtypes(torch.float, torch.cfloat)
    def test_autograd_through_vmap(self, device, dtype, case, in_dims):
        """The gradient of a shared operand is the sum over the samples."""
        args = make(case, device, dtype, in_dims)
        # Sums over the queries are over all samples' queries, those over keys likewise.
        terms = case._replace(m=case.m * SAMPLES, n=case.n * SAMPLES)

        def compute(op, args, weights):
            leaves = [x.detach().requires_grad_() for x in args]
            results = over_samples(op)(outputs_of(op), in_dims)(*leaves)
            first = torch.autograd.grad(results, leaves, weights, create_graph=True)
            second = torch.autograd.grad(first, leaves, [x.conj() for x in args])
            return [*first, *second]

        weights = [
            torch.randn(SAMPLES, *x.shape, device=device, dtype=dtype)
            for x in case.make(device, dtype)[1]
        ]
        self.assert_agrees(compute, terms, args, weights)

    # The following show that what samples share is stored once.

    @by_dims(0)
    @by_small_case
    def test_storages(self, device, case, in_dims):
        dims = (*in_dims, 0, 0)
        args = make(case, device, torch.double, dims)
        with Storages() as storages:
            vmap(pullback(torch.attn), dims)(*args)

        inputs, grads = case.make(device, torch.double)
        alone = {
            name: x.untyped_storage().nbytes()
            for name, x in zip((*INPUTS, "grad_output", "grad_attn"), inputs + grads)
        }
        alone["attn"] = alone["grad_attn"]
        batched = {name for name, dim in zip(INPUTS, in_dims) if dim is not None}
        batched |= {"grad_output", "grad_attn"}
        if batched & {"q", "k"}:
            batched.add("attn")
        for func, names in OPERANDS.items():
            expected = {
                name: alone[name] * (SAMPLES if name in batched else 1)
                for name in names
            }
            self.assertEqual(storages.seen[func], expected)

    @by_small_case
    def test_storages_of_gradients(self, device, case):
        for dims in dims_of(2, 0):
            dims = (None, None, None, *dims)
            args = make(case, device, torch.double, dims)
            _, f = vjp(outputs_of(torch.attn), *args[:3])
            with Storages() as storages:
                vmap(lambda *grads: f(grads), dims[3:])(*args[3:])
            names = (*INPUTS, "grad_output", "grad_attn")
            expected = {
                name: x.untyped_storage().nbytes() for name, x in zip(names, args)
            }
            inputs, grads = case.make(device, torch.double)
            expected["attn"] = grads[1].untyped_storage().nbytes()
            self.assertEqual(storages.seen[BACKWARD], expected)

    # Nor is anything copied inside, but for the samples of v that become its columns.
    @onlyCPU
    @by_dims(0)
    def test_copies(self, device, in_dims):
        case = Case("large", 65, 33, 128, 70)
        args = make(case, device, torch.float, in_dims)
        alone = in_dims == (None, None, 0)
        copied = copied_elements(lambda: vmap(torch.attn, in_dims)(*args))
        self.assertLessEqual(copied, args[2].numel() if alone else 0)

    @by_small_case
    def test_attn_is_shared(self, device, case):
        """Where only v is batched there is one attn, and vmap may return it as it is."""
        args = make(case, device, torch.double, (None, None, 0))
        op = outputs_of(torch.attn)
        _, attn = vmap(op, (None, None, 0), (0, None))(*args)
        self.assertEqual(attn, torch.attn(*args[:2], args[2][0]).attn)
        for in_dims in dims_of(3, 0):
            if in_dims != (None, None, 0):
                args = make(case, device, torch.double, in_dims)
                with self.assertRaisesRegex(ValueError, "can not return a BatchedT"):
                    vmap(op, in_dims, (0, None))(*args)

    # The arguments of vmap.

    # For an output that all samples share, as attn if v alone is batched, vmap itself
    # knows no other out_dims than 0.
    @parametrize(
        "in_dims,out_dims",
        [
            subtest(dims, name="_to_".join(map(name_of, dims)))
            for dims in product(dims_of(3, 0), product((0, 1, -1), repeat=2))
            if dims[0] != (None, None, 0) or dims[1][1] == 0
        ],
    )
    @by_small_case
    def test_out_dims(self, device, case, in_dims, out_dims):
        args = make(case, device, torch.double, in_dims)
        expected = vmap(torch.attn, in_dims)(*args)
        self.assertIs(type(expected), torch.return_types.attn)
        actual = vmap(outputs_of(torch.attn), in_dims, out_dims)(*args)
        for x, y, dim in zip(actual, expected, out_dims):
            self.assertEqual(x, y.movedim(0, dim), rtol=0, atol=0)

    @parametrize("chunk_size", (1, 2, 4, SAMPLES, SAMPLES + 1))
    @by_dims(0, -1)
    def test_chunk_size(self, device, in_dims, chunk_size):
        dims = (*in_dims, 0, 0)
        args = make(SMALL, device, torch.float, dims)

        def compute(op, args):
            more = {"chunk_size": chunk_size} if op is torch.attn else {}
            return over_samples(op)(pullback(op), dims, **more)(*args)

        self.assert_agrees(compute, SMALL, args)

    @parametrize("size", (0, 1))
    @by_dims(0, -1)
    @by_small_case
    def test_few_samples(self, device, case, in_dims, size):
        args = make(case, device, torch.double, in_dims, size)
        results = vmap(torch.attn, in_dims)(*args)
        alone = torch.attn(*case.make(device, torch.double)[0])
        for x, y in zip(results, alone):
            self.assertEqual(x.shape, (size, *y.shape))
        if size == 1:
            self.assert_maps(outputs_of, case, in_dims, [x.float() for x in args])

    # The following take other functions of torch.func.

    @dtypes(torch.float)
    def test_functional_call(self, device, dtype):
        case = Case("layer", 4, 5, 4, 5)
        module = Attention(torch.attn, device, dtype)
        names, weights = zip(*module.state_dict().items())
        x = torch.randn(SAMPLES, 4, 5, device=device, dtype=dtype)

        def compute(op, args):
            layer = Attention(op, "meta", dtype)

            def of_sample(x, *weights):
                return functional_call(layer, dict(zip(names, weights)), (x,))

            per_sample = grad(of_sample, tuple(range(1, len(args))))
            in_dims = (0, *(None for _ in weights))
            return over_samples(op)(per_sample, in_dims)(*args)

        self.assert_agrees(compute, case, [x, *weights])

    @by_small_case
    @dtypes(torch.float)
    def test_linearize(self, device, dtype, case):
        inputs = make(case, device, dtype, (None, None, None))
        u = make(case, device, dtype, (0, 0, 0))

        def compute(op, inputs, u):
            if op is torch.attn:
                _, f = torch.func.linearize(outputs_of(op), *inputs)
            else:
                inputs = tuple(inputs)
                f = lambda *u: jvp(outputs_of(op), inputs, u)[1]  # noqa: E731
            return over_samples(op)(f, (0, 0, 0))(*u)

        self.assert_agrees(compute, case, inputs, u)

    # The following pass bad input as samples.

    @parametrize(
        "mistake",
        [mistake for mistake in MISTAKES if mistake.error is RuntimeError],
        name_fn=lambda mistake: mistake.name,
    )
    @by_dims(0)
    def test_error(self, device, mistake, in_dims):
        """The message is that of one sample."""
        inputs, _ = SMALL.make(device, torch.float)
        args = [
            x if dim is None else torch.stack([x] * SAMPLES)
            for x, dim in zip(mistake.args(*inputs), in_dims)
        ]
        message = re.escape(mistake.message.format(device=inputs[0].device))
        with self.assertRaisesRegex(mistake.error, "^" + message):
            vmap(torch.attn, in_dims)(*args)

    def test_error_of_vmap(self, device):
        (q, k, v), _ = SMALL.make(device, torch.float)
        with self.assertRaisesRegex(ValueError, "same size in the mapped dimension"):
            vmap(torch.attn)(q, k, v)
        # Rows of q and k and a whole v: each sample of q and k is a vector.
        with self.assertRaisesRegex(
            RuntimeError,
            re.escape("at least 2 dimensions, but got q: [3], k: [3], v: [4, 5]"),
        ):
            vmap(torch.attn, (0, 0, None))(q, k[:2], v)

    def test_fallback(self, device):
        """That the tests above would see one."""
        with self.assertRaisesRegex(RuntimeError, "fallback"):
            vmap(torch.histc)(torch.ones(2, 3, device=device))


instantiate_device_type_tests(TestAttnVmap, globals())

if __name__ == "__main__":
    run_tests()
