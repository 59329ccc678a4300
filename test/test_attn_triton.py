# Owner(s): ["module: cuda"]

"""The Triton kernels of attn and attn_output on a CPU, in Triton's interpreter.

The functions that take calls on a GPU are registered for the CPU, and take calls of any size.
Each test says which kernels must run, so that none passes because a call was composed.
"""

import math
from functools import partial
from itertools import chain, product
from unittest import mock


# Without Triton's interpreter, this ends the process.
import test_attn_triton_tanh  # noqa: F401  # isort: skip

# Without hypothesis, this does.
from test_attn_properties import ALL_LAYOUTS, ARGUMENTS, REACHED  # isort: skip
import test_attn_output_properties as output_properties
import test_attn_output_triple_backward as third_order
import triton.language as tl
from attn_function import gradients, INPUTS
from test_attn import (
    attn_composed,
    AttnTestCase,
    by_case_in,
    CASES,
    evaluate,
    GRADIENTS,
    MISTAKES,
    RESULTS,
    widen,
)
from test_attn_kernel import around, both_ways as attn_both_ways, compact, sized
from test_attn_output import both_ways, composed, Problem, PROBLEMS
from test_attn_output_second_order import (
    defined,
    double_backward,
    elements,
    forward_over_reverse,
    GIVEN,
    gradient_penalty,
    RESULTS as SECOND_RESULTS,
    reverse_over_forward,
    reverse_over_reverse,
    tangent,
    tangents_of,
)
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import torch
from torch._native.ops.attn import triton_impl
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import vmap
from torch.library import Library
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


aten = torch.ops.aten
DTYPES = (torch.bfloat16, torch.half, torch.float)
by_dtype = parametrize("dtype", DTYPES)
ATTN = ("attn", "stored_grad_q", "stored_grad_kv")
OUTPUT = ("output", "grad_q", "grad_kv")
SECOND = ("tangent_grad_q", "tangent_grad_kv")
THIRD = ("third_grad_q", "third_grad_kv")
KERNELS = (*ATTN, *OUTPUT, "tangent", *SECOND, *THIRD)


def cast(self, x, dtype, otherwise=InterpreterBuilder.cast_impl):
    """Rounds to bfloat16 as a GPU does. The interpreter truncates."""
    if (x.dtype.scalar, dtype.scalar) == (tl.float32, tl.bfloat16):
        rounded = torch.tensor(x.data).bfloat16().view(torch.uint16).numpy()
        return TensorHandle(rounded, tl.bfloat16)
    return otherwise(self, x, dtype)


def dot(self, x, y, *others, otherwise=InterpreterBuilder.create_dot):
    """Multiplies numbers. The interpreter multiplies the bits of bfloat16 as integers."""
    pair = (
        cast(self, z, tl.float32) if z.dtype.scalar == tl.bfloat16 else z
        for z in (x, y)
    )
    return otherwise(self, *pair, *others)


def register(library, op, cond, impl):
    """Makes `impl` the CPU's kernel of an operator, for those calls of which `cond` is true."""
    otherwise = torch.library.get_kernel(f"aten::{op}", "CPU")

    def kernel(keys, *args, **kwargs):
        if cond(*args, **kwargs):
            return impl(*args, **kwargs)
        return otherwise.call_boxed(keys, *args, **kwargs)

    library.impl(op, kernel, with_keyset=True, allow_override=True)


class TritonTestCase(AttnTestCase):
    """Registers the kernels, and lists those that run in `launched`."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        library = Library("aten", "IMPL", "CPU")
        cls.addClassCleanup(library._destroy)
        for op, override in triton_impl.KERNELS.items():
            register(library, op, *override)

    def setUp(self):
        super().setUp()
        self.launched = []
        launch = triton_impl.Problem.launch

        def listed(problem, name, **matrices):
            self.launched.append(name)
            launch(problem, name, **matrices)

        for patch in (
            mock.patch.object(triton_impl, "LEAST_WORK", 0),
            mock.patch.object(triton_impl, "FLOAT", True),
            mock.patch.object(triton_impl.Problem, "launch", listed),
            mock.patch.object(InterpreterBuilder, "cast_impl", cast),
            mock.patch.object(InterpreterBuilder, "create_dot", dot),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def assert_launched(self, *names):
        """These kernels, and no others, have run since this was called last."""
        self.assertEqual(self.launched, list(names))
        self.launched.clear()


def plan_of(name, dtype, width=16):
    x = torch.empty(1, width, dtype=dtype)
    return triton_impl.Problem(x, x, x).plan(name)


def tiles(case, dtype=torch.float):
    """How many tiles attn has."""
    plan = plan_of("output", dtype)
    rows, columns = -(-case.m // plan.rows), -(-case.n // plan.columns)
    return math.prod(case.batch) * rows * columns


def taken(case, dtype, *names):
    """These kernels if they take the case, else none of them."""
    width = max(case.d, case.e)
    planned = all(plan_of(name, dtype, width) for name in names)
    return names if planned and not case.is_empty else ()


def tails(dtype, names):
    """m and n at the ends of the tiles of these kernels, and one before and after these."""
    plans = {plan_of(name, dtype)[:2] for name in names}
    return sorted(
        {
            (m, n)
            for rows, columns in plans
            for m, n in (
                *zip(around(rows), reversed(around(columns))),
                (rows - 1, columns),
                (rows + 1, 2 * columns),
                (2 * rows, columns + 1),
                (2 * rows + 1, 2 * columns + 1),
            )
        }
    )


WIDTHS = (
    *((1, 17), (16, 1), (17, 16), (64, 100), (100, 64), (256, 3), (3, 256)),
    *((257, 2), (2, 257)),  # These are composed.
)
# The kernels that run for what users compute.
USES = {
    forward_over_reverse: {*OUTPUT, "tangent", *SECOND},
    reverse_over_forward: {*OUTPUT, "tangent", *SECOND},
    reverse_over_reverse: {*OUTPUT, *SECOND},
    gradient_penalty: {*OUTPUT, *SECOND},
}
FEW_TILES = [case for case in CASES if tiles(case) <= 4]
WIDE = [sized(5, 7, d, e) for d, e in WIDTHS]
VARIED = (
    *(problem for problem in PROBLEMS if tiles(problem.case) <= 4),
    *(Problem(case, case.batch, True, -0.5) for case in WIDE),
    *(Problem(sized(7, 9, 5, 6), scale=scale) for scale in (0.0, 1e-6, -1e4)),
    # m < n, m = n and m > n, in groups of several samples.
    *(
        Problem(sized(m, n, 5, 17, 2, 2), shared, True, 0.5)
        for m, n in ((20, 65), (20, 20), (65, 20))
        for shared in ((1, 2), (2, 1))
    ),
)
by_problem = parametrize("problem", VARIED, name_fn=lambda problem: problem.name)


class TestAttnTriton(TritonTestCase):
    def assert_attn_agrees(self, case, dtype):
        inputs, grads = case.make("cpu", dtype)
        actual = evaluate(torch.attn, inputs, grads)
        # It is called twice, with gradients and without.
        self.assert_launched(*taken(case, dtype, "attn", *ATTN))
        plain = evaluate(attn_composed, inputs, grads)
        reference = evaluate(attn_composed, widen(inputs), widen(grads))
        self.assert_all_within_rule(actual, plain, reference, case)

    @by_case_in([*FEW_TILES, *WIDE])
    @by_dtype
    def test_attn(self, dtype, case):
        self.assert_attn_agrees(case, dtype)

    @by_dtype
    def test_tails_of_attn(self, dtype):
        for m, n in tails(dtype, ATTN):
            with self.subTest(m=m, n=n):
                self.assert_attn_agrees(sized(m, n, 5, 6), dtype)

    def assert_output_agrees(self, problem, dtype):
        inputs, grad_output = problem.make("cpu", dtype)
        *wide, wide_grad = widen((*inputs, grad_output))
        actual = both_ways(torch.attn_output, problem, inputs, grad_output)
        self.assert_launched(*taken(problem.case, dtype, *OUTPUT))
        plain = both_ways(composed, problem, inputs, grad_output)
        expected = both_ways(composed, problem, wide, wide_grad)
        for name, *results in zip(("output", *INPUTS), actual, plain, expected):
            with self.subTest(result=name):
                self.assert_within_rule(*results, problem.case)
        if dtype != torch.float and elements(problem) < 64:
            return  # The definition may by luck round a few numbers well.
        tangents = tangents_of(inputs)
        actual = double_backward(problem, inputs, tangents, grad_output)
        self.assert_launched(*taken(problem.case, dtype, *SECOND))
        plain = defined(problem, inputs, tangents, grad_output)
        expected = defined(problem, wide, widen(tangents), wide_grad)
        for name, *results in zip(SECOND_RESULTS, actual, plain, expected):
            with self.subTest(result=name):
                self.assert_within_rule(*results, problem.case)
        actual = tangent(problem, inputs, tangents)
        self.assert_launched(*taken(problem.case, dtype, "tangent"))
        self.assert_within_rule(actual, plain[0], expected[0], problem.case)

    def assert_third_order_agrees(self, problem, dtype):
        if dtype != torch.float and elements(problem) < 64:
            return  # As above; nor is a scale squared a number of half.
        tensors = third_order.make(problem, "cpu", dtype, third_order.OPTIONAL)
        actual = third_order.triple_backward(problem, tensors)
        self.assert_launched(*taken(problem.case, dtype, *THIRD))
        plain = third_order.defined(problem, tensors)
        expected = third_order.defined(problem, widen(tensors))
        for name, *results in zip(SECOND_RESULTS, actual, plain, expected):
            with self.subTest(result=name):
                self.assert_within_rule(*results, problem.case)

    @by_problem
    @by_dtype
    def test_output(self, dtype, problem):
        self.assert_output_agrees(problem, dtype)

    @by_problem
    @by_dtype
    def test_third_order(self, dtype, problem):
        self.assert_third_order_agrees(problem, dtype)

    @parametrize(
        "dtype,is_causal",
        ((torch.half, True), (torch.float, True), (torch.float, False)),
    )
    def test_tails_of_output(self, dtype, is_causal):
        for names, check in (
            ((*OUTPUT, "tangent", *SECOND), self.assert_output_agrees),
            (THIRD, self.assert_third_order_agrees),
        ):
            for m, n in tails(dtype, names):
                with self.subTest(m=m, n=n, kernels=names):
                    case = sized(m, n, 5, 6)
                    check(Problem(case, is_causal=is_causal, scale=0.5), dtype)

    @parametrize("wanted,used", GRADIENTS)
    def test_wanted_gradients_of_attn(self, wanted, used):
        inputs, grads = sized(7, 6, 5, 3).make("cpu", torch.float)
        actual = gradients(torch.attn, inputs, grads, wanted, used)
        needed = {name for name in wanted if name != "v" or "output" in used}
        self.assert_launched(
            "attn",
            *(["stored_grad_q"] if "q" in needed else []),
            *(["stored_grad_kv"] if needed & {"k", "v"} else []),
        )
        wide = (widen(inputs), widen(grads))
        expected = gradients(attn_composed, *wide, wanted, used)
        for name, x, y in zip(INPUTS, actual, expected):
            self.assertEqual(x is not None, name in needed)
            if x is not None:
                self.assertEqual(x, y.float())

    @parametrize("given", GIVEN, name_fn="".join)
    def test_wanted_results_of_output(self, given):
        problem = Problem(sized(7, 9, 5, 3, 2), (1,), True, -0.5)
        inputs, grad_output = problem.make("cpu", torch.float)
        tangents = tangents_of(inputs, given)
        expected = list(defined(problem, inputs, tangents, grad_output))
        if given == ("v",):
            expected[3] = None
        for mask in product((False, True), repeat=4):
            self.launched.clear()
            found = double_backward(problem, inputs, tangents, grad_output, mask)
            self.assert_launched(
                *(["tangent_grad_q"] if mask[1] else ["tangent"] if mask[0] else []),
                *(
                    ["tangent_grad_kv"]
                    if mask[2] or mask[3] and expected[3] is not None
                    else []
                ),
            )
            wanted = [x if is_wanted else None for x, is_wanted in zip(expected, mask)]
            self.assertEqual(found, wanted)
        self.assertEqual(tangent(problem, inputs, tangents), expected[0])
        self.assert_launched("tangent")

    @parametrize("given", third_order.GIVEN, name_fn="_".join)
    def test_wanted_results_of_the_third_order(self, given):
        problem = Problem(sized(7, 9, 5, 3, 2), (1,), True, -0.5)
        tensors = third_order.make(problem, "cpu", torch.float, given)
        expected = third_order.defined(problem, tensors)
        for mask in product((False, True), repeat=4):
            self.launched.clear()
            found = third_order.triple_backward(problem, tensors, mask)
            there = [wanted and bool(x.any()) for wanted, x in zip(mask, expected)]
            self.assert_launched(
                *(name for name, of in zip(THIRD, (there[:2], there[2:])) if any(of))
            )
            wanted = [x if is_there else None for x, is_there in zip(expected, there)]
            self.assertEqual(list(found), wanted)

    def test_wanted_gradients_of_output(self):
        problem = Problem(sized(7, 9, 5, 3, 2), (1,), True, -0.5)
        inputs, grad_output = problem.make("cpu", torch.float)
        _, *expected = both_ways(composed, problem, inputs, grad_output)
        for mask in product((False, True), repeat=3):
            found = aten._attn_output_backward(
                grad_output, *inputs, problem.is_causal, problem.scale, mask
            )
            self.assert_launched(
                *(["grad_q"] if mask[0] else []),
                *(["grad_kv"] if any(mask[1:]) else []),
            )
            self.assertEqual(found, [x if y else None for x, y in zip(expected, mask)])

    def attn_results(self, tensors):
        """Results for each of ARGUMENTS; an attn that is given need not be tanh(q kᵀ)."""
        results = attn_both_ways(*tensors)
        self.assert_launched(*ATTN[1:], "attn")
        return results

    def output_results(self, problem, inputs, grad_output, tangents):
        results = [
            *both_ways(torch.attn_output, problem, inputs, grad_output),
            *double_backward(problem, inputs, tangents, grad_output),
            *third_order.triple_backward(
                problem, [grad_output, *inputs, *tangents, grad_output, *tangents]
            ),
            tangent(problem, inputs, tangents),
        ]
        self.assert_launched(*OUTPUT, *SECOND, *THIRD, "tangent")
        return results

    def assert_same_bits(self, change, dtype, attn_case, problem):
        """Results do not change if each tensor is changed by `change`."""
        inputs, grads = attn_case.make("cpu", dtype)
        tensors = *inputs, *grads, torch.attn(*inputs).attn
        self.assert_launched("attn")
        changed = [change(x) for x in tensors]
        expected = self.attn_results([compact(x) for x in changed])
        self.assert_bitwise(self.attn_results(changed), expected)

        inputs, grad_output = problem.make("cpu", dtype)
        inputs, grad_output = [change(x) for x in inputs], change(grad_output)
        tangents = [change(x) for x in tangents_of(inputs)]
        given = [compact(x) for x in inputs], compact(grad_output)
        expected = self.output_results(problem, *given, [compact(x) for x in tangents])
        actual = self.output_results(problem, inputs, grad_output, tangents)
        self.assert_bitwise(actual, expected)

    @parametrize("layout", sorted(ALL_LAYOUTS))
    def test_any_layout_makes_the_same_bits(self, layout):
        case = sized(7, 6, 5, 3, 2)
        problem = Problem(case, is_causal=True)
        self.assert_same_bits(ALL_LAYOUTS[layout], torch.half, case, problem)

    @parametrize("dtype", (torch.half, torch.float))
    def test_what_is_beyond_a_tensor_does_not_show(self, dtype):
        def among_nan(x):
            sizes = (size + 9 for size in x.shape[-2:])
            buffer = x.new_full((*x.shape[:-2], *sizes), math.nan)
            view = buffer[..., 4:-5, 4:-5]
            return view.copy_(x)

        problem = Problem(sized(66, 67, 5, 17, 2), (1,), True)
        self.assert_same_bits(among_nan, dtype, sized(66, 67, 5, 17), problem)

    def test_a_sample_is_alone_what_it_is_in_a_batch(self):
        dtype = torch.half
        case = sized(66, 67, 5, 6, 3)
        inputs, grads = case.make("cpu", dtype)
        tensors = *inputs, *grads, torch.attn(*inputs).attn
        self.assert_launched("attn")
        expected = [x[2] for x in self.attn_results(tensors)]
        for _ in range(2):
            self.assert_bitwise(self.attn_results([x[2] for x in tensors]), expected)

        problem = Problem(case, is_causal=True)
        inputs, grad_output = problem.make("cpu", dtype)
        tangents = tangents_of(inputs)
        given = [x[2] for x in inputs], grad_output[2], [x[2] for x in tangents]
        expected = self.output_results(problem, inputs, grad_output, tangents)
        for _ in range(2):
            actual = self.output_results(problem, *given)
            self.assert_bitwise(actual, [x[2] for x in expected])

    @parametrize("name", ARGUMENTS)
    @parametrize("dtype", (torch.half, torch.float))
    def test_nan_reaches_what_the_formulas_of_attn_say(self, dtype, name):
        inputs, grads = sized(66, 67, 5, 6).make("cpu", dtype)
        tensors = [*inputs, *grads, torch.attn(*inputs).attn]
        self.assert_launched("attn")
        expected = self.attn_results(tensors)
        for place in ((3, 2), (-1, -1)):
            changed = [x.clone() for x in tensors]
            x = changed[ARGUMENTS.index(name)]
            place = [i % size for i, size in zip(place, x.shape)]
            x[tuple(place)] = math.nan
            actual = self.attn_results(changed)
            for result, index in REACHED[name](*place).items():
                x, y = (xs[RESULTS.index(result)] for xs in (actual, expected))
                self.assertTrue(x[index].isnan().all(), msg=result)
                x[index] = y[index]
            self.assert_bitwise(actual, expected)

    @parametrize("is_causal", (False, True))
    @parametrize("name", output_properties.ARGUMENTS)
    def test_nan_reaches_no_other_tile_of_output(self, name, is_causal):
        """What is masked within a tile is multiplied with 0, and what is NaN shows. No query and
        no key of another tile sees it, and a key that no query sees is seen nowhere."""
        dtype = torch.half
        BM, BN = plan_of("output", dtype)[:2]
        self.assertEqual(plan_of("grad_q", dtype)[:2], (BM, BN))
        m, n = BM + 1, BN + 5
        problem = Problem(sized(m, n, 5, 6), is_causal=is_causal)
        inputs, grad_output = problem.make("cpu", dtype)
        expected = both_ways(torch.attn_output, problem, inputs, grad_output)
        for place in ((3, 2), (BM // 2, 0), (min(m, n) - 1, 1), (n - 1, 1)):
            changed = [x.clone() for x in (*inputs, grad_output)]
            x = changed[output_properties.ARGUMENTS.index(name)]
            i, j = (i % size for i, size in zip(place, x.shape))
            x[i, j] = math.nan
            self.launched.clear()
            actual = both_ways(torch.attn_output, problem, changed[:3], changed[3])
            self.assert_launched(*OUTPUT)
            found = dict(zip(output_properties.RESULTS, zip(actual, expected)))
            if is_causal and i >= m:
                self.assert_bitwise(actual, expected)
                continue
            # The first row of a tile that has column i, and the end of those that have row i.
            first = i // BN * BN // BM * BM
            rows, columns = plan_of("grad_kv", dtype)[:2]
            end = -(-(i // rows + 1) * rows // columns) * columns
            for result, index in output_properties.reached(
                name, i, j, is_causal
            ).items():
                x, y = found[result]
                self.assertTrue(x[index].isnan().all(), msg=result)
                if index[0] == slice(i, None):
                    index = slice(first, None), index[1]
                elif index[0] == slice(0, i + 1):
                    index = slice(0, end), index[1]
                x[index] = y[index]
            self.assert_bitwise(actual, expected)

    @parametrize("dtype", (torch.half, torch.float))
    def test_infinity_is_what_the_formulas_say(self, dtype):
        """What lies beyond the end of a tile is 0, and makes no NaN of an infinite number."""
        case = sized(5, 7, 3, 6)
        problem = Problem(case, scale=0.5)
        inputs, grads = case.make("cpu", dtype)
        for i, (row, column) in product(range(5), ((1, 2), (4, 0))):
            given = [x.clone() for x in (*inputs, *grads)]
            given[i][row, column] = math.inf
            wide = widen(given)
            pairs = [
                (
                    evaluate(torch.attn, given[:3], given[3:]),
                    evaluate(attn_composed, wide[:3], wide[3:]),
                ),
                (
                    both_ways(torch.attn_output, problem, given[:3], given[3]),
                    both_ways(composed, problem, wide[:3], wide[3]),
                ),
            ]
            self.assert_launched("attn", *ATTN, *OUTPUT)
            for results in zip(*map(chain.from_iterable, zip(*pairs))):
                # Whether 1 - tanh² is 0 or nearly decides whether its products are NaN.
                x, y = (z.to(dtype).where(z.isfinite(), math.nan) for z in results)
                self.assertEqual(x, y, rtol=0.1, atol=0.1)

    @parametrize(
        "batch,m,stride",
        (
            ((2,), 3, (2**31, 5, 1)),
            ((3,), 3, (2**30, 5, 1)),
            ((), 385, (triton_impl.LARGEST_STRIDE, 1)),
        ),
        name_fn=lambda batch, m, stride: "rows" if m > 3 else f"{batch[0]}_samples",
    )
    def test_what_is_read_may_be_far_apart(self, batch, m, stride):
        """Offsets do not fit in 32 bits, even where strides do."""
        (q, k, v), _ = sized(m, 4, 5, 2, *batch).make("cpu", torch.half)
        try:
            memory = torch.empty(q.size(0) * stride[0], dtype=torch.half)
        except RuntimeError:
            self.skipTest("needs addresses of 8 GiB, of which hardly any are used")
        far = memory.as_strided(q.shape, stride).copy_(q)
        expected = torch.attn_output(q, k, v)
        self.assert_bitwise([torch.attn_output(far, k, v)], [expected])
        self.assert_launched("output", "output")

    def test_keys_that_no_query_sees_may_hold_anything(self):
        problem = Problem(sized(20, 30, 4, 5, 2, 3), (2, 1), True)
        inputs, grad_output = problem.make("cpu", torch.float)
        tangents = tangents_of(inputs)

        def seen(xs):
            return [xs[0], *(x[..., :20, :] for x in xs[1:])]

        given = seen(inputs), grad_output, seen(tangents)
        cut = self.output_results(problem, *given)
        for x in (*inputs[1:], *tangents[1:]):
            x[..., 20:, :] = math.nan
        found = self.output_results(problem, inputs, grad_output, tangents)
        for x, y in zip(found, cut):
            self.assertEqual(x[..., :20, :], y)
            self.assertFalse(x[..., 20:, :].any())

    @parametrize("under", ("alone", "vmap", "compile"))
    @parametrize("use", [*USES], name_fn=lambda use: use.__name__)
    def test_uses(self, use, under):
        """What users compute reaches the kernels, through transforms too."""
        if under != "alone" and use is gradient_penalty:
            self.skipTest("see test_attn_output_second_order.py")
        torch._dynamo.reset()
        problem = Problem(sized(4, 5, 2, 3), is_causal=True, scale=0.5)
        (q, k, v), weight = problem.make("cpu", torch.float)
        u = tangents_of([k])[0]

        def run(op, q, k, v, weight, u):
            def f(k):
                output = op(q * k.sum(), k, k.square() @ v[:2], **problem.options)
                return (output.sin() * weight).sum()

            if under == "vmap":
                return vmap(lambda k: use(f, k, u))(torch.stack([k, 2 * k, -k]))
            if under == "compile":
                return torch.compile(lambda k: use(f, k, u), backend="aot_eager")(k)
            return use(f, k, u)

        actual = run(torch.attn_output, q, k, v, weight, u)
        self.assertEqual({*self.launched}, {*USES[use]})
        self.assertEqual(actual, run(composed, q, k, v, weight, u))

    def test_dual_numbers(self):
        for given in GIVEN:
            problem = Problem(sized(4, 5, 2, 3, 2), (1,), True, 0.5)
            inputs, _ = problem.make("cpu", torch.float)
            tangents = tangents_of(inputs, given)

            def run(op):
                with dual_level():
                    duals = (
                        x if t is None else make_dual(x, t)
                        for x, t in zip(inputs, tangents)
                    )
                    return unpack_dual(op(*duals, **problem.options)).tangent

            actual = run(torch.attn_output)
            self.assert_launched("output", "tangent")
            self.assertEqual(actual, run(composed))

    @parametrize("op", (torch.attn, torch.attn_output), name_fn=lambda op: op.__name__)
    def test_compile(self, op):
        (q, k, v), (grad_output, _) = sized(4, 5, 2, 3).make("cpu", torch.float)
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def output(op, *args):
            result = op(*args)
            return result if op is torch.attn_output else result[0]

        torch._dynamo.reset()
        compiled = torch.compile(
            partial(output, op), backend="aot_eager", fullgraph=True
        )
        results = []
        for run in (compiled, partial(output, op)):
            found = run(*leaves)
            results.append([found, *torch.autograd.grad(found, leaves, grad_output)])
            self.assert_launched(*(ATTN if op is torch.attn else OUTPUT))
        self.assert_bitwise(*results)

    def said(self, call):
        """What is wrong with a call, according to the kernels' operator."""
        with self.assertRaises((RuntimeError, TypeError)) as caught:
            call()
        self.assert_launched()
        return str(caught.exception)

    def assert_says_the_same(self, call):
        """Mistakes are the composed operator's to name."""
        said = self.said(call)
        with mock.patch.object(triton_impl, "takes", return_value=False):
            self.assertEqual(said, self.said(call))

    @parametrize("op", (torch.attn, torch.attn_output), name_fn=lambda op: op.__name__)
    def test_mistakes(self, op):
        inputs, _ = sized(2, 4, 3, 5).make("cpu", torch.float)
        for mistake in MISTAKES:
            # A batch of no samples may share one k and v.
            if (mistake.name, op) != ("no_batch", torch.attn_output):
                args = (*mistake.args(*inputs),)
                with self.subTest(mistake=mistake.name):
                    self.assert_says_the_same(lambda: op(*args))

    def test_mistakes_in_gradients_and_tangents(self):
        problem = Problem(sized(2, 4, 3, 5))
        inputs, grads = problem.case.make("cpu", torch.float)
        tensors = [*inputs, *grads, torch.tanh(inputs[0] @ inputs[1].mT)]
        for i in (3, 4, 5):
            for wrong in (tensors[i][1:], tensors[i][None], tensors[i].double()):
                args = [*tensors[:i], wrong, *tensors[i + 1 :]]
                q, k, v, grad_output, grad_attn, attn = args
                given = grad_output, grad_attn, q, k, v, attn, [True] * 3
                self.assert_says_the_same(lambda: aten._attn_backward(*given))
                if i == 3:
                    given = wrong, q, k, v, False, 1.0, [True] * 3
                    self.assert_says_the_same(
                        lambda: aten._attn_output_backward(*given)
                    )
        for i, x in enumerate(inputs):
            for wrong in (x[1:], x[:, 1:], x[None], x.double()):
                tangents = [None] * 3
                tangents[i] = wrong
                self.assert_says_the_same(lambda: tangent(problem, inputs, tangents))
                self.assert_says_the_same(
                    lambda: double_backward(problem, inputs, tangents, grads[0])
                )
                args = [grads[0], *inputs, *tangents, *[None] * 4]
                self.assert_says_the_same(
                    lambda: third_order.triple_backward(problem, args)
                )

    def test_what_is_composed(self):
        case = sized(7, 6, 5, 3)

        def run(dtype, change=lambda x: x):
            inputs, grads = case.make("cpu", dtype)
            inputs = [change(x) for x in inputs]
            actual = evaluate(torch.attn, inputs, grads)
            wide = widen(inputs), widen(grads)
            self.assertEqual(
                actual,
                [x.to(dtype) for x in evaluate(attn_composed, *wide)],
                rtol=0.05,
                atol=0.05,
            )

        def lazy(x):
            return torch._lazy_clone(x)

        def far(x):
            step = triton_impl.LARGEST_STRIDE + 1
            y = x.new_empty((len(x) - 1) * step + x.size(1))
            return y.as_strided(x.shape, (step, 1)).copy_(x)

        for dtype in (torch.double, torch.cfloat):
            run(dtype)
        run(torch.bfloat16, lazy)
        run(torch.bfloat16, far)
        for name, value in (("FLOAT", False), ("LEAST_WORK", 1e9), ("WIDEST", 4)):
            with mock.patch.object(triton_impl, name, value):
                run(torch.float)
        with mock.patch.object(triton_impl, "plan_for", return_value=None):
            run(torch.half)
        x = torch.ones(2, 3)
        self.assertTrue(torch.attn_output(x, x, x, scale=math.nan).isnan().all())
        self.assertEqual(torch.attn_output(x, x, x, scale=math.inf), 2 * x)
        self.assert_launched()
        with mock.patch.object(triton_impl, "FLOAT", False):
            run(torch.half)
        self.assert_launched("attn", *ATTN)


instantiate_parametrized_tests(TestAttnTriton)

if __name__ == "__main__":
    run_tests()
