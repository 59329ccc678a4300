# Owner(s): ["module: autograd"]

import math
import re
import unittest
from collections.abc import Callable
from contextlib import nullcontext
from itertools import combinations, product
from operator import getitem
from typing import NamedTuple

from attn_function import Attn, Discard, gradients, INPUTS, OUTPUTS

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.profiler import profile, ProfilerActivity
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
    onlyCPU,
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
    "transposed": lambda x: x.mT.contiguous().mT,
    "every_other_row": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "every_other_column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded_row": lambda x: x[..., :1, :].expand_as(x),
    "expanded_column": lambda x: x[..., :1].expand_as(x),
    "offset": lambda x: torch.cat((x.new_ones(1), x.flatten()))[1:].view_as(x),
    "conjugate": lambda x: x.conj(),  # lazy, and x itself where x is real
}
# The same for x with a batch dimension in front: where in memory that dimension is.
BATCH_LAYOUTS = {
    "batch_between": lambda x: x.movedim(0, -2).contiguous().movedim(-2, 0),
    "batch_last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "batch_expanded": lambda x: x[:1].expand_as(x),
    "every_other_sample": lambda x: x.repeat_interleave(2, 0)[::2],
}


class Case(NamedTuple):
    """q (*, m, d), k (*, n, d), v (*, n, e), and about how large q @ k.mT is."""

    name: str
    m: int
    d: int
    n: int
    e: int
    layout: str = "contiguous"
    scores: float = 1.0
    batch: tuple[int, ...] = ()

    @property
    def is_empty(self):
        return 0 in (self.m, self.d, self.n, self.e, *self.batch)

    def make(self, device, dtype):
        """The inputs, and a gradient for each of the outputs."""
        m, d, n, e = self.m, self.d, self.n, self.e
        layout = (LAYOUTS | BATCH_LAYOUTS)[self.layout]
        factor = self.scores**0.5 / max(d, 1) ** 0.25
        tensors = [
            layout(factor * torch.randn(*self.batch, *size, device=device, dtype=dtype))
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
SMALL_BATCH = Case("small_batch", 2, 3, 4, 1, batch=(2,))
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
    Case("long", 130, 40, 150, 24),
    Case("saturated", 7, 5, 6, 3, scores=20),
    Case("tiny", 7, 5, 6, 3, scores=1e-4),
    *(Case(layout, 7, 5, 6, 3, layout) for layout in LAYOUTS if layout != "contiguous"),
    Case("large_transposed", 65, 33, 128, 70, "transposed"),
    SMALL_BATCH,
    Case("two_batch_dims", 4, 3, 5, 2, batch=(2, 3)),
    Case("three_batch_dims", 4, 3, 5, 2, batch=(2, 1, 3)),
    Case("batch_of_one", 4, 3, 5, 2, batch=(1,)),
    Case("batches_of_one", 4, 3, 5, 2, batch=(1, 1)),
    Case("no_batch", 4, 3, 5, 2, batch=(0,)),
    Case("no_inner_batch", 4, 3, 5, 2, batch=(2, 0)),
    Case("batch_without_query", 0, 3, 5, 2, batch=(2,)),
    Case("batch_without_key", 4, 3, 0, 2, batch=(2,)),
    Case("batch_without_feature", 4, 0, 5, 2, batch=(2, 3)),
    Case("large_batch", 2, 3, 4, 5, batch=(1000,)),
    Case("batch_of_large", 65, 33, 128, 70, batch=(3,)),
    Case("batch_saturated", 7, 5, 6, 3, scores=20, batch=(2,)),
    *(
        Case(f"batch_{layout}", 7, 5, 6, 3, layout, batch=(4,))
        for layout in LAYOUTS
        if layout != "contiguous"
    ),
    *(Case(layout, 7, 5, 6, 3, layout, batch=(4,)) for layout in BATCH_LAYOUTS),
    *(
        Case(f"{layout}_of_two", 7, 5, 6, 3, layout, batch=(4, 2))
        for layout in BATCH_LAYOUTS
    ),
)


def by_case_in(cases):
    return parametrize("case", cases, name_fn=lambda case: case.name)


by_case = by_case_in(CASES)

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


NDIM = "attn: q, k and v must have at least 2 dimensions, but got "
SAME_NDIM = "attn: q, k and v must have the same number of dimensions, but got "
SAME_BATCH = (
    "attn: q (*, m, d), k (*, n, d) and v (*, n, e) must have the same batch "
    "dimensions *, but got "
)
SAME_D = "attn: q (*, m, d) and k (*, n, d) must have the same d, but got "
SAME_N = "attn: k (*, n, d) and v (*, n, e) must have the same n, but got "
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
        "v_1d", lambda q, k, v: (q, k, v[:, 0]), NDIM + "q: [2, 3], k: [4, 3], v: [4]"
    ),
    Mistake(
        "k_3d",
        lambda q, k, v: (q, k[None], v),
        SAME_NDIM + "q: [2, 3], k: [1, 4, 3], v: [4, 5]",
    ),
    Mistake(
        "v_2d_in_batch",
        lambda q, k, v: (q[None], k[None], v),
        SAME_NDIM + "q: [1, 2, 3], k: [1, 4, 3], v: [4, 5]",
    ),
    # None of these sizes is broadcast, not even a 1.
    Mistake(
        "q_batch_of_one",
        lambda q, k, v: (q[None], k.expand(7, 4, 3), v.expand(7, 4, 5)),
        SAME_BATCH + "q: [1, 2, 3], k: [7, 4, 3], v: [7, 4, 5]",
    ),
    Mistake(
        "v_batch_of_one",
        lambda q, k, v: (q.expand(7, 2, 3), k.expand(7, 4, 3), v[None]),
        SAME_BATCH + "q: [7, 2, 3], k: [7, 4, 3], v: [1, 4, 5]",
    ),
    Mistake(
        "k_second_batch",
        lambda q, k, v: (
            q.expand(7, 6, 2, 3),
            k.expand(7, 1, 4, 3),
            v.expand(7, 6, 4, 5),
        ),
        SAME_BATCH + "q: [7, 6, 2, 3], k: [7, 1, 4, 3], v: [7, 6, 4, 5]",
    ),
    Mistake(
        "swapped_batch",
        lambda q, k, v: (
            q.expand(7, 6, 2, 3),
            k.expand(6, 7, 4, 3),
            v.expand(7, 6, 4, 5),
        ),
        SAME_BATCH + "q: [7, 6, 2, 3], k: [6, 7, 4, 3], v: [7, 6, 4, 5]",
    ),
    Mistake(
        "no_batch",
        lambda q, k, v: (q.expand(0, 2, 3), k[None], v[None]),
        SAME_BATCH + "q: [0, 2, 3], k: [1, 4, 3], v: [1, 4, 5]",
    ),
    Mistake(
        "d_in_batch",
        lambda q, k, v: (
            q.expand(7, 2, 3),
            k[:, :1].expand(7, 4, 1),
            v.expand(7, 4, 5),
        ),
        SAME_D + "q: [7, 2, 3], k: [7, 4, 1]",
    ),
    Mistake(
        "n_in_batch",
        lambda q, k, v: (q.expand(7, 2, 3), k.expand(7, 4, 3), v[:1].expand(7, 1, 5)),
        SAME_N + "k: [7, 4, 3], v: [7, 1, 5]",
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
    # Of two mistakes the error names the first in the order dtype, kind, device, sizes.
    Mistake(
        "dtype_before_device",
        lambda q, k, v: (q.half(), k.to("meta"), v),
        SAME_DTYPE + "q: torch.float16, k: torch.float32, v: torch.float32",
    ),
    Mistake(
        "floating_before_sizes",
        lambda q, k, v: (q.long(), k.long(), v.long()[0]),
        FLOATING + "torch.int64",
    ),
    Mistake(
        "device_before_sizes",
        lambda q, k, v: (q, k.to("meta"), v[0]),
        SAME_DEVICE + "q: {device}, k: meta, v: {device}",
    ),
    Mistake(
        "batch_before_d",
        lambda q, k, v: (q[None, :, :1], k.expand(7, 4, 3), v.expand(7, 4, 5)),
        SAME_BATCH + "q: [1, 2, 1], k: [7, 4, 3], v: [7, 4, 5]",
    ),
    Mistake(
        "d_before_n",
        lambda q, k, v: (q, k[:, :1], v[:1]),
        SAME_D + "q: [2, 3], k: [4, 1]",
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


def unsupported_dtypes():
    """Those of which there may be a tensor, but not both products and tanh."""
    supported = floating_and_complex_types_and(torch.half, torch.bfloat16)
    every = {x for x in vars(torch).values() if isinstance(x, torch.dtype)}
    # A quantized tensor takes more than a dtype.
    every = {x for x in every if not str(x).startswith("torch.q")}
    return sorted(every - {*supported}, key=str)


by_small_or_empty_case = by_case_in(
    (SMALL, SMALL_BATCH, *(case for case in CASES if case.is_empty))
)


def unsupported(device):
    """A dtype, where to make tensors of it, with values or without, and what attn says."""
    for dtype in unsupported_dtypes():
        said = f"^{re.escape(FLOATING)}{dtype}(?!\\w)"
        for where, mode in (
            (device, nullcontext()),
            ("meta", nullcontext()),
            (device, FakeTensorMode()),
        ):
            yield dtype, where, mode, said


def widen(tensors):
    """The same numbers in float64 or complex128."""
    return [
        x.cpu().to(torch.complex128 if x.is_complex() else torch.float64)
        for x in tensors
    ]


def attn_composed(q, k, v):
    """The definition, with batch dimensions."""
    attn = torch.tanh(q @ k.mT)
    return attn @ v, attn


def evaluate(op, inputs, grads):
    """RESULTS of ``op``."""
    return *op(*inputs), *gradients(op, inputs, grads)


def copied_elements(run, op="aten::attn"):
    """How many numbers are copied while ``op`` runs on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        run()
    events = profiled.events()
    assert any(event.name == op for event in events)
    return sum(
        math.prod(event.input_shapes[0])
        for event in events
        if event.name == "aten::copy_"
    )


def rule(dtype, plain, reference, case, ranks=1, order=1):
    """How far from ``reference`` a result in ``dtype`` may be.

    Twice as far as ``plain``, the same computation in ``dtype``. That may be exact by
    luck, and in float64 it is the reference itself. There is a floor, then: what rounding
    may do to the largest entry, once to ``dtype`` in attn and in the gradient of the scores,
    which the others depend on, and on each rank, and in the accumulator once for every term
    of the sums, which never go across a batch. Half and bfloat16 accumulate in float. By the
    product rule a derivative of second ``order`` has twice the terms, each with a factor that
    is a rounded first one. A reference in float64 is as inexact as the result.
    """
    wide = torch.float if dtype in (torch.half, torch.bfloat16) else dtype
    terms = case.m + case.d + case.n + case.e
    eps = torch.finfo(dtype).eps * (2 + ranks) + terms * torch.finfo(wide).eps
    if dtype in (torch.double, torch.cdouble):
        eps *= 2
    return 2 * abs(plain - reference).max() + order**2 * eps * abs(reference).max()


class AttnTestCase(TestCase):
    """What the tests of attn share."""

    def assert_within_rule(self, actual, plain, reference, case, order=1):
        """At most twice as far from ``reference`` as ``plain``, give or take a floor."""
        self.assertEqual(actual.shape, reference.shape)
        self.assertEqual(actual.dtype, plain.dtype)
        self.assertEqual(actual.device, plain.device)
        if reference.numel() == 0:
            return
        dtype = plain.dtype
        actual, plain, reference = widen((actual, plain, reference))
        bound = rule(dtype, plain, reference, case, order=order)
        self.assertLessEqual((actual - reference).abs().max().item(), bound.item())

    def assert_bitwise(self, actual, expected):
        """The same values, None just where expected; NaN is equal to NaN."""
        actual, expected = list(actual), list(expected)
        self.assertEqual(len(actual), len(expected))
        for x, y in zip(actual, expected):
            self.assertEqual(x is None, y is None)
            if x is not None:
                self.assertEqual(x, y, rtol=0, atol=0)

    def assert_all_within_rule(self, actual, plain, reference, case):
        """The same for each of RESULTS, None just where ``reference`` is None."""
        for name, *results in zip(RESULTS, actual, plain, reference):
            with self.subTest(result=name):
                if results[-1] is None:
                    self.assertIsNone(results[0])
                else:
                    self.assertIsNotNone(results[0])
                    self.assert_within_rule(*results, case)

    def assert_agrees(self, compute, case, *groups, order=1):
        """``compute(op, *groups)`` for attn, by the rule.

        It returns a list, in which None stands for zero. attn has None wherever the
        definition has no path for a derivative, and may have it for any other zero.
        """
        actual = compute(torch.attn, *groups)
        plain = compute(attn_composed, *groups)
        reference = compute(attn_composed, *map(widen, groups))
        self.assertEqual(len(actual), len(reference))
        for index, results in enumerate(zip(actual, plain, reference)):
            with self.subTest(result=index):
                if results[0] is None:
                    self.assertFalse(results[2] is not None and results[2].any())
                else:
                    self.assertIsNotNone(results[2])
                    self.assert_within_rule(*results, case, order)


class TestAttn(AttnTestCase):
    @by_case
    @dtypes(*floating_and_complex_types_and(torch.half, torch.bfloat16))
    def test_values_and_gradients(self, device, dtype, case):
        inputs, grads = case.make(device, dtype)
        self.assert_all_within_rule(
            evaluate(torch.attn, inputs, grads),
            evaluate(attn_composed, inputs, grads),
            evaluate(attn_composed, widen(inputs), widen(grads)),
            case,
        )

    # The Function takes matrices only.
    @by_case_in([case for case in CASES if not case.batch])
    @dtypes(torch.float, torch.double)
    def test_agrees_with_function(self, device, dtype, case):
        inputs, grads = case.make(device, dtype)
        self.assert_all_within_rule(
            evaluate(torch.attn, inputs, grads),
            evaluate(attn_composed, inputs, grads),
            evaluate(Attn.apply, inputs, grads),
            case,
        )

    @parametrize("wanted,used", GRADIENTS)
    @dtypes(*floating_and_complex_types_and(torch.half, torch.bfloat16))
    def test_gradient_is_none_unless_needed(self, device, dtype, wanted, used):
        inputs, grads = SMALL.make(device, dtype)
        actual, plain, reference = (
            (*op(*x), *gradients(op, x, y, wanted, used))
            for op, x, y in (
                (torch.attn, inputs, grads),
                (attn_composed, inputs, grads),
                (attn_composed, widen(inputs), widen(grads)),
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
    @by_case_in((SMALL, SMALL_BATCH))
    @dtypes(torch.double, torch.cdouble)
    def test_gradcheck(self, device, dtype, case, wanted, used):
        inputs, _ = case.make(device, dtype)
        leaves = [x.requires_grad_(i in wanted) for i, x in zip(INPUTS, inputs)]

        def op(*inputs):
            result = torch.attn(*inputs)
            # It is one tensor: of several, gradcheck would give a gradient to one at a time.
            return torch.cat([getattr(result, name) for name in used], dim=-1)

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

    @onlyCPU
    @unittest.skipIf(not torch.backends.mkldnn.is_available(), "needs oneDNN")
    @parametrize("name", "qkv")
    def test_mkldnn(self, device, name):
        inputs = dict(zip("qkv", SMALL.make(device, torch.float)[0]))
        inputs[name] = inputs[name].to_mkldnn()
        with self.assertRaisesRegex(RuntimeError, "^attn: .* must not be mkldnn"):
            torch.attn(**inputs)

    @by_small_or_empty_case
    def test_unsupported_dtypes(self, device, case):
        """Refused by name whatever the sizes, with values or without."""
        inputs, _ = case.make("meta", torch.float)
        for dtype, where, mode, message in unsupported(device):
            with self.subTest(dtype=dtype, device=where, mode=mode), mode:
                q, k, v = (
                    torch.empty(x.shape, dtype=dtype, device=where) for x in inputs
                )
                with self.assertRaisesRegex(RuntimeError, message):
                    torch.attn(q, k, v)

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

    # Complex matrices are BLAS's, which reads one where it is if its rows or its columns
    # are dense.
    @onlyCPU
    @by_case_in(
        [
            Case(f"{name}_{layout}", 65, 33, 128, 70, layout, batch=batch)
            for name, batch in (("one", (4,)), ("two", (4, 2)))
            for layout in LAYOUTS | BATCH_LAYOUTS
        ]
    )
    def test_copies(self, device, case):
        inputs, _ = case.make(device, torch.cfloat)
        copied = copied_elements(lambda: torch.attn(*inputs))
        in_place = {"contiguous", "transposed", "every_other_row", "offset"}
        if len(case.batch) == 1:
            # matmul makes one batch dimension of several, which takes a copy here.
            in_place |= {"batch_between", "batch_expanded", "every_other_sample"}
        once = sum(x.numel() for x in inputs)
        self.assertLessEqual(copied, 0 if case.layout in in_place else once)

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
