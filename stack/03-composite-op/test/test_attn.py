# Owner(s): ["module: autograd"]

import re
from collections.abc import Callable
from itertools import combinations, product
from operator import getitem
from typing import NamedTuple

from attn_function import Attn, attn_reference, Discard, gradients, INPUTS, OUTPUTS

import torch
import torch.utils._pytree as pytree
from torch.autograd import gradcheck, gradgradcheck
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_dtype import (
    floating_and_complex_types_and,
    floating_types_and,
)
from torch.testing._internal.common_utils import (
    parametrize,
    run_tests,
    subtest,
    TestCase,
)


# Each gives a tensor of the shape of x; the values need not be those of x.
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "every_other_row": lambda x: x.repeat_interleave(2, 0)[::2],
    "every_other_column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded_row": lambda x: x[:1].expand_as(x),
    "expanded_column": lambda x: x[:, :1].expand_as(x),
    "offset": lambda x: torch.cat((x.new_ones(1), x.flatten()))[1:].view_as(x),
    "conjugate": lambda x: x.conj(),  # lazy, and x itself where x is real
}


class Case(NamedTuple):
    """q (m, d), k (n, d), v (n, e), and about how large q @ k.T is."""

    name: str
    m: int
    d: int
    n: int
    e: int
    layout: str = "contiguous"
    scores: float = 1.0

    def make(self, device, dtype):
        """The inputs, and a gradient for each of the outputs."""
        m, d, n, e, layout = self.m, self.d, self.n, self.e, LAYOUTS[self.layout]
        factor = self.scores**0.5 / max(d, 1) ** 0.25
        tensors = [
            layout(factor * torch.randn(*size, device=device, dtype=dtype))
            for size, factor in (
                ((m, d), factor),
                ((n, d), factor),
                ((n, e), 1),
                ((m, e), 1),
                ((m, n), 1),
            )
        ]
        return tensors[:3], tensors[3:]


SMALL = Case("small", 2, 3, 4, 5)
CASES = (
    SMALL,
    Case("self_attention", 4, 3, 4, 3),
    Case("square", 4, 4, 4, 4),
    Case("one", 1, 1, 1, 1),
    Case("one_query", 1, 3, 6, 2),
    Case("one_key", 5, 4, 1, 2),
    Case("one_feature", 5, 1, 4, 3),
    Case("one_value", 5, 3, 4, 1),
    Case("no_query", 0, 2, 3, 4),
    Case("no_key", 2, 3, 0, 4),
    Case("no_feature", 2, 0, 3, 4),
    Case("no_value", 2, 3, 4, 0),
    Case("nothing", 0, 0, 0, 0),
    Case("large", 65, 33, 128, 70),
    Case("large_saturated", 65, 33, 128, 70, scores=20),
    Case("saturated", 7, 5, 6, 3, scores=20),
    Case("tiny", 7, 5, 6, 3, scores=1e-4),
    *(Case(layout, 7, 5, 6, 3, layout) for layout in LAYOUTS if layout != "contiguous"),
    Case("large_transposed", 65, 33, 128, 70, "transposed"),
)
by_case = parametrize("case", CASES, name_fn=lambda case: case.name)

RESULTS = (*OUTPUTS, *(f"grad_{name}" for name in INPUTS))
# Every choice of inputs that require grad, and of outputs that have a gradient.
WANTED = [some for size in (1, 2, 3) for some in combinations(INPUTS, size)]
USED = (OUTPUTS, ("output",), ("attn",))
GRADIENTS = [
    subtest(pair, name=f"{''.join(pair[0])}_of_{'_'.join(pair[1])}")
    for pair in product(WANTED, USED)
]


class Mistake(NamedTuple):
    """Arguments made of q (2, 3), k (4, 3), v (4, 5), and how the message begins."""

    name: str
    args: Callable
    message: str
    error: type[Exception] = RuntimeError


NDIM = "attn: q, k and v must be 2-D, but got "
SAME_D = "attn: q (m, d) and k (n, d) must have the same d, but got "
SAME_N = "attn: k (n, d) and v (n, e) must have the same n, but got "
SAME_DTYPE = "attn: q, k and v must have the same dtype, but got "
SAME_DEVICE = "attn: q, k and v must be on the same device, but got "
FLOATING = (
    "attn: q, k and v must be floating point or complex (half, bfloat16, float, double, "
    "cfloat or cdouble), but got "
)
MISTAKES = (
    Mistake(
        "q_0d", lambda q, k, v: (q.sum(), k, v), NDIM + "q: [], k: [4, 3], v: [4, 5]"
    ),
    Mistake(
        "k_3d",
        lambda q, k, v: (q, k[None], v),
        NDIM + "q: [2, 3], k: [1, 4, 3], v: [4, 5]",
    ),
    Mistake(
        "v_1d", lambda q, k, v: (q, k, v[:, 0]), NDIM + "q: [2, 3], k: [4, 3], v: [4]"
    ),
    Mistake("d", lambda q, k, v: (q, k[:, :1], v), SAME_D + "q: [2, 3], k: [4, 1]"),
    Mistake("n", lambda q, k, v: (q, k, v[:1]), SAME_N + "k: [4, 3], v: [1, 5]"),
    Mistake(
        "q_half",
        lambda q, k, v: (q.half(), k, v),
        SAME_DTYPE + "q: torch.float16, k: torch.float32, v: torch.float32",
    ),
    Mistake(
        "k_complex",
        lambda q, k, v: (q, k.cfloat(), v),
        SAME_DTYPE + "q: torch.float32, k: torch.complex64, v: torch.float32",
    ),
    Mistake(
        "v_long",
        lambda q, k, v: (q, k, v.long()),
        SAME_DTYPE + "q: torch.float32, k: torch.float32, v: torch.int64",
    ),
    Mistake("long", lambda *x: (y.long() for y in x), FLOATING + "torch.int64"),
    Mistake("bool", lambda *x: (y.bool() for y in x), FLOATING + "torch.bool"),
    Mistake(
        "chalf", lambda *x: (y.to(torch.chalf) for y in x), FLOATING + "torch.complex32"
    ),
    Mistake(
        "float8",
        lambda *x: (y.to(torch.float8_e5m2) for y in x),
        FLOATING + "torch.float8_e5m2",
    ),
    Mistake(
        "q_meta",
        lambda q, k, v: (q.to("meta"), k, v),
        SAME_DEVICE + "q: meta, k: {device}, v: {device}",
    ),
    Mistake(
        "k_meta",
        lambda q, k, v: (q, k.to("meta"), v),
        SAME_DEVICE + "q: {device}, k: meta, v: {device}",
    ),
    Mistake(
        "v_meta",
        lambda q, k, v: (q, k, v.to("meta")),
        SAME_DEVICE + "q: {device}, k: {device}, v: meta",
    ),
    Mistake(
        "no_v",
        lambda q, k, v: (q, k),
        'attn() missing 1 required positional arguments: "v"',
        TypeError,
    ),
    Mistake(
        "list",
        lambda q, k, v: (q.tolist(), k, v),
        "attn(): argument 'q' (position 1) must be Tensor, not list",
        TypeError,
    ),
    Mistake(
        "none",
        lambda q, k, v: (q, None, v),
        "attn(): argument 'k' (position 2) must be Tensor, not NoneType",
        TypeError,
    ),
    Mistake(
        "scale",
        lambda q, k, v: (q, k, v, 1.0),
        "attn() takes 3 positional arguments but 4 were given",
        TypeError,
    ),
)


def widen(tensors):
    """The same numbers in float64 or complex128."""
    return [
        x.cpu().to(torch.complex128 if x.is_complex() else torch.float64)
        for x in tensors
    ]


def evaluate(op, inputs, grads):
    """RESULTS of ``op``."""
    return *op(*inputs), *gradients(op, inputs, grads)


class TestAttn(TestCase):
    def assert_within_rule(self, actual, plain, reference, case):
        """At most twice as far from ``reference`` as ``plain``, give or take a floor.

        ``plain`` is the same computation in the same dtype. It may be exact by luck,
        and in float64 it is the reference itself. The floor is then what rounding may
        do to the largest entry: once to the dtype, and in the accumulator once for
        every term of the sums. Half and bfloat16 accumulate in float.
        """
        dtype = plain.dtype
        wide = torch.float if dtype in (torch.half, torch.bfloat16) else dtype
        terms = case.m + case.d + case.n + case.e
        eps = torch.finfo(dtype).eps + terms * torch.finfo(wide).eps

        self.assertEqual(actual.shape, reference.shape)
        self.assertEqual(actual.dtype, dtype)
        self.assertEqual(actual.device, plain.device)
        if reference.numel() == 0:
            return
        actual, plain, reference = widen((actual, plain, reference))
        bound = 2 * (plain - reference).abs().max() + eps * reference.abs().max()
        self.assertLessEqual((actual - reference).abs().max().item(), bound.item())

    def assert_all_within_rule(self, actual, plain, reference, case):
        """The same for each of RESULTS, None just where ``reference`` is None."""
        for name, *results in zip(RESULTS, actual, plain, reference):
            with self.subTest(result=name):
                if results[-1] is None:
                    self.assertIsNone(results[0])
                else:
                    self.assertIsNotNone(results[0])
                    self.assert_within_rule(*results, case)

    @by_case
    @dtypes(*floating_and_complex_types_and(torch.half, torch.bfloat16))
    def test_values_and_gradients(self, device, dtype, case):
        inputs, grads = case.make(device, dtype)
        self.assert_all_within_rule(
            evaluate(torch.attn, inputs, grads),
            evaluate(attn_reference, inputs, grads),
            evaluate(attn_reference, widen(inputs), widen(grads)),
            case,
        )

    @by_case
    @dtypes(torch.float, torch.double)
    def test_agrees_with_function(self, device, dtype, case):
        inputs, grads = case.make(device, dtype)
        self.assert_all_within_rule(
            evaluate(torch.attn, inputs, grads),
            evaluate(attn_reference, inputs, grads),
            evaluate(Attn.apply, inputs, grads),
            case,
        )

    @parametrize("wanted,used", GRADIENTS)
    @dtypes(torch.double, torch.cdouble)
    def test_gradient_is_none_unless_needed(self, device, dtype, wanted, used):
        inputs, grads = SMALL.make(device, dtype)
        actual, plain, reference = (
            (*op(*x), *gradients(op, x, y, wanted, used))
            for op, x, y in (
                (torch.attn, inputs, grads),
                (attn_reference, inputs, grads),
                (attn_reference, widen(inputs), widen(grads)),
            )
        )
        for name, grad in zip(INPUTS, actual[2:]):
            needed = name in wanted and (name != "v" or "output" in used)
            self.assertEqual(grad is not None, needed, msg=name)
        self.assert_all_within_rule(actual, plain, reference, SMALL)

    def test_gradient_of_neither_output(self, device):
        inputs, _ = SMALL.make(device, torch.double)

        def discarded(q, k, v):
            return (Discard.apply(*torch.attn(q, k, v)),)

        self.assertEqual(gradients(discarded, inputs, [None]), [None, None, None])

    @parametrize("wanted", WANTED, name_fn="".join)
    def test_requires_grad(self, device, wanted):
        inputs, _ = SMALL.make(device, torch.float)
        leaves = [x.requires_grad_(i in wanted) for i, x in zip(INPUTS, inputs)]
        output, attn = torch.attn(*leaves)
        self.assertTrue(output.requires_grad)
        # Where only v requires grad, attn may.
        self.assertTrue(attn.requires_grad or wanted == ("v",))
        with torch.no_grad():
            constants = torch.attn(*leaves)
        for x in (*constants, *torch.attn(*(x.detach() for x in leaves))):
            self.assertFalse(x.requires_grad)
            self.assertIsNone(x.grad_fn)

    # gradgradcheck wants a gradient, and attn has none for v.
    @parametrize("wanted,used", [x for x in GRADIENTS if x.name != "v_of_attn"])
    @dtypes(torch.double, torch.cdouble)
    def test_gradcheck(self, device, dtype, wanted, used):
        inputs, _ = SMALL.make(device, dtype)
        leaves = [x.requires_grad_(i in wanted) for i, x in zip(INPUTS, inputs)]

        def op(*inputs):
            result = torch.attn(*inputs)
            # One tensor: of several, gradcheck would give one at a time a gradient.
            return torch.cat([getattr(result, name) for name in used], dim=1)

        self.assertTrue(gradcheck(op, leaves))
        self.assertTrue(gradgradcheck(op, leaves))

    @by_case
    def test_memory(self, device, case):
        inputs, grads = case.make(device, torch.cfloat)
        given = [*inputs, *grads]
        before = [(x.clone(), x._version) for x in given]
        results = evaluate(torch.attn, inputs, grads)
        for x, (value, version) in zip(given, before):
            self.assertEqual(x, value, rtol=0, atol=0)
            self.assertEqual(x._version, version)
        for x in results[:2]:
            self.assertTrue(x.is_contiguous() and not x.is_conj())
        for x, y in combinations((*results[:2], *given), 2):
            self.assertFalse(torch._C._is_alias_of(x, y))

    @dtypes(*floating_types_and(torch.half, torch.bfloat16))
    def test_extreme_values(self, device, dtype):
        inf, nan = float("inf"), float("nan")
        huge = torch.finfo(dtype).max
        q = torch.tensor([[inf], [-inf], [nan], [huge], [-huge], [0.0]])
        k, v = torch.tensor([[2.0]]), torch.tensor([[-3.0]])
        output, attn = torch.attn(*(x.to(device, dtype) for x in (q, k, v)))
        expected = torch.tensor([[1], [-1], [nan], [1], [-1], [0]])
        self.assertEqual(attn, expected.to(attn), rtol=0, atol=0)
        self.assertEqual(output, -3 * expected.to(attn), rtol=0, atol=0)

    @parametrize("mistake", MISTAKES, name_fn=lambda mistake: mistake.name)
    def test_error(self, device, mistake):
        inputs, _ = SMALL.make(device, torch.float)
        message = re.escape(mistake.message.format(device=inputs[0].device))
        with self.assertRaisesRegex(mistake.error, "^" + message) as caught:
            torch.attn(*mistake.args(*inputs))
        self.assertIsNone(caught.exception.__context__)

    def test_named_tuple(self, device):
        (q, k, v), _ = SMALL.make(device, torch.float)
        result = torch.attn(v=v, k=k, q=q)
        self.assertIs(type(result), torch.return_types.attn)
        output, attn = result
        self.assertIs(result.output, output)
        self.assertIs(result.attn, attn)
        self.assertEqual(result, torch.attn(q, k, v), rtol=0, atol=0)

        leaves, spec = pytree.tree_flatten(result)
        self.assertEqual([id(x) for x in leaves], [id(output), id(attn)])
        again = pytree.tree_unflatten(leaves, spec)
        self.assertIs(type(again), torch.return_types.attn)
        self.assertIs(again.output, output)
        self.assertIs(again.attn, attn)

    @parametrize("index", range(3), name_fn=INPUTS.__getitem__)
    def test_torch_function(self, device, index):
        calls = []

        class Override:
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                calls.append((func, types, args, kwargs))
                return "result"

        inputs, _ = SMALL.make(device, torch.float)
        inputs[index] = Override()
        self.assertEqual(torch.attn(*inputs), "result")
        ((func, types, args, kwargs),) = calls
        self.assertIs(func, torch.attn)
        self.assertEqual(tuple(types), (Override,))
        self.assertEqual([id(x) for x in args], [id(x) for x in inputs])
        self.assertFalse(kwargs)

    @by_case
    def test_meta(self, device, case):
        inputs, _ = case.make(device, torch.bfloat16)
        expected = torch.attn(*inputs)
        for x, y in zip(torch.attn(*(x.to("meta") for x in inputs)), expected):
            self.assertEqual(x.device.type, "meta")
            self.assertEqual(x.dtype, y.dtype)
            self.assertEqual(x.shape, y.shape)
            self.assertEqual(x.stride(), y.stride())

    def test_graph_has_one_node(self, device):
        targets = []

        def backend(graph_module, _):
            targets.extend(
                node.target
                for node in graph_module.graph.nodes
                if node.op not in ("placeholder", "output")
            )
            return graph_module.forward

        inputs, _ = SMALL.make(device, torch.float)
        compiled = torch.compile(
            lambda q, k, v: torch.attn(q, k, v), backend=backend, fullgraph=True
        )
        actual = compiled(*inputs)
        self.assertEqual(actual, torch.attn(*inputs), rtol=0, atol=0)
        self.assertEqual(targets, [torch.attn, getitem, getitem])


instantiate_device_type_tests(TestAttn, globals())

if __name__ == "__main__":
    run_tests()
