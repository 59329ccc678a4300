# Owner(s): ["module: pt2-dispatcher"]

import ast
import io
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from unittest import mock

from attn_function import double_backward, gradients, INPUTS, OUTPUTS
from test_attn import (
    attn_composed,
    AttnTestCase,
    by_case,
    by_case_in,
    Case,
    CASES,
    evaluate,
    GRADIENTS,
    MISTAKES,
    SMALL,
    SMALL_BATCH,
    USED,
    WANTED,
)
from test_attn_autograd import subsets
from test_attn_vmap import along, DERIVATIVES

import torch
import torch.utils._pytree as pytree
from functorch.compile import (
    aot_function,
    default_partition,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend
from torch._inductor import lowering
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
)
from torch.utils.checkpoint import checkpoint


aten = torch.ops.aten


BATCHED = Case("batched", 2, 3, 4, 5, batch=(3,))
FEW_NAMES = "small no_key transposed conjugate small_batch batch_of_one no_batch"
by_few = by_case_in(
    [x for x in CASES if x.name in (*FEW_NAMES.split(), "two_batch_dims")]
)

# opcheck takes long, and looks at layouts and at sizes of zero: it gets the cases of these.
OPCHECK_NAMES = (
    "small one no_query no_key no_feature no_value nothing transposed conjugate "
    "expanded_row small_batch two_batch_dims no_batch batch_without_key "
    "batch_transposed batch_between"
)
by_opcheck = by_case_in([x for x in CASES if x.name in OPCHECK_NAMES.split()])

MASKS = tuple(product((True, False), repeat=3))
# Whether there is a grad_output, a grad_attn; (False, False) is no gradient at all.
GIVEN = tuple(product((True, False), repeat=2))


def attn_backward(inputs, grads, attn, given=(True, True), mask=(True, True, True)):
    grads = [x if use else None for x, use in zip(grads, given)]
    return aten._attn_backward(*grads, *inputs, attn, mask)


def describe(results):
    """What a tensor has besides its values."""
    return [
        None
        if x is None
        else (x.dtype, [int(s) for s in x.shape], [int(s) for s in x.stride()])
        for x in results
    ]


def keep_in(graphs):
    """A compiler that keeps each graph and compiles nothing."""

    def compiler(graph_module, _):
        graphs.append(graph_module)
        return make_boxed_func(graph_module.forward)

    return compiler


def calls(graph_module):
    """How often each operator is called, in the graphs of branches too."""
    return Counter(
        node.target
        for module in graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function"
    )


class Recorder(AotEagerAndRecordGraphs):
    """Runs the graphs that AOTAutograd makes as they are, and counts their calls."""

    def forward(self):
        return sum((calls(x) for x in self.fw_graphs), Counter())

    def backward(self):
        return sum((calls(x) for x in self.bw_graphs), Counter())


class Messages:
    """What ``names`` log at INFO and above."""

    def __init__(self, test, name):
        self.log = test.assertLogs(name, "INFO")
        self.name = name

    def __enter__(self):
        caught = self.log.__enter__()
        logging.getLogger(self.name).info("assertLogs wants at least one")
        return caught.output

    def __exit__(self, *args):
        return self.log.__exit__(*args)


def fake_mode(symbolic):
    return FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)


def to_fake(mode, tensors):
    return [mode.from_tensor(x, static_shapes=mode.shape_env is None) for x in tensors]


@contextmanager
def use(mode):
    """Turns ``mode`` on and, for symbolic sizes, the Python dispatcher, as a tracer does: without it
    2.6's matmul and 2.8's view fail."""
    with mode, enable_python_dispatcher() if mode.shape_env else nullcontext():
        yield


class CompileTestCase(AttnTestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()

    def skip_unless_traced(self, definition, args):
        """Not with symbolic sizes where a release (2.6) cannot trace the definition so."""
        try:
            make_fx(definition, tracing_mode="symbolic")(*args)
        except RuntimeError as e:
            if "on tensor with symbolic sizes/strides" not in str(e):
                raise
            self.skipTest("no such derivative is traced with symbolic sizes")


class TestAttnMeta(CompileTestCase):
    """Without values: meta and fake tensors."""

    def without_values(self, tensors):
        """``tensors`` as meta and fake tensors, and the mode to run them in."""
        yield "meta", nullcontext(), [x.to("meta") for x in tensors]
        for symbolic in (False, True):
            mode = fake_mode(symbolic)
            name = "symbolic" if symbolic else "fake"
            yield name, use(mode), to_fake(mode, tensors)

    @by_case
    @dtypes(torch.float, torch.bfloat16, torch.cfloat)
    def test_forward(self, device, dtype, case):
        inputs, _ = case.make(device, dtype)
        expected = describe(torch.attn(*inputs))
        for name, mode, fakes in self.without_values(inputs):
            with self.subTest(tensors=name), mode:
                self.assertEqual(describe(torch.attn(*fakes)), expected)

    @by_case
    def test_backward(self, device, case):
        inputs, grads = case.make(device, torch.cfloat)
        attn = torch.attn(*inputs).attn
        expected = {
            key: describe(attn_backward(inputs, grads, attn, *key))
            for key in product(GIVEN, MASKS)
        }
        tensors = (*inputs, *grads, attn)
        for name, mode, fakes in self.without_values(tensors):
            with mode:
                for key, results in expected.items():
                    with self.subTest(tensors=name, key=key):
                        actual = attn_backward(fakes[:3], fakes[3:5], fakes[5], *key)
                        self.assertEqual(describe(actual), results)

    @parametrize(
        "name,change",
        [
            *(
                subtest((x.name, x.args), name=x.name)
                for x in MISTAKES
                if x.error is RuntimeError
            ),
            *(
                subtest((name, change), name=name)
                for name, change in (
                    (
                        "batch_of_k",
                        lambda q, k, v: (q[None], k.expand(2, 4, 3), v[None]),
                    ),
                    (
                        "batch_of_v",
                        lambda q, k, v: (q[None], k[None], v.expand(2, 4, 5)),
                    ),
                    ("batch_dims", lambda q, k, v: (q[None], k[None, None], v[None])),
                    ("batch_d", lambda q, k, v: (q[None], k[None, :, :2], v[None])),
                    ("batch_n", lambda q, k, v: (q[None], k[None], v[None, :3])),
                )
            ),
        ],
    )
    def test_error(self, device, name, change):
        """Fails with the words of the kernel."""
        inputs, _ = SMALL.make(device, torch.float)
        with self.assertRaisesRegex(RuntimeError, "^attn: ") as caught:
            torch.attn(*change(*inputs))
        expected = str(caught.exception).splitlines()[0]
        for tensors, mode, fakes in self.without_values(inputs):
            # Meta tensors are on one device.
            if tensors == "meta" and "same device" in expected:
                continue
            with self.subTest(tensors=tensors), mode:
                with self.assertRaises(RuntimeError) as caught:
                    torch.attn(*change(*fakes))
                actual = str(caught.exception).splitlines()[0]
                if tensors == "symbolic":
                    # Sizes may have names of their own, such as s26.
                    actual, words = (
                        re.sub(r"\[[^]]*\]", "[]", x) for x in (actual, expected)
                    )
                    self.assertEqual(actual, words)
                else:
                    self.assertEqual(actual, expected)

    @by_case
    def test_copy_on_write(self, device, case):
        """What is only read is not copied."""
        inputs, grads = case.make(device, torch.float)
        lazy = [torch._lazy_clone(x) for x in (*inputs, *grads, *inputs)]
        for wanted, used in product(WANTED, USED):
            gradients(torch.attn, lazy[:3], lazy[3:5], wanted, used)
        double_backward(torch.attn, lazy[:3], lazy[3:5], lazy[5:])
        for x in lazy:
            self.assertTrue(torch._C._is_cow_tensor(x))

    def check_operator(self, op, *args):
        checks = torch.library.opcheck(op, args)
        self.assertEqual(set(checks.values()), {"SUCCESS"})

    @by_opcheck
    def test_opcheck(self, device, case):
        inputs, grads = case.make(device, torch.float)
        attn = torch.attn(*inputs).attn
        leaves = [x.detach().requires_grad_() for x in inputs]
        self.check_operator(aten.attn.default, *leaves)
        self.check_operator(
            aten._attn_backward.default, *grads, *leaves, attn, (True,) * 3
        )

    @by_few
    @dtypes(torch.bfloat16, torch.cfloat)
    def test_opcheck_dtypes(self, device, dtype, case):
        inputs, grads = case.make(device, dtype)
        attn = torch.attn(*inputs).attn
        self.check_operator(aten.attn.default, *inputs)
        self.check_operator(
            aten._attn_backward.default, *grads, *inputs, attn, (True,) * 3
        )

    @parametrize("mask", MASKS, name_fn=lambda x: "".join("01"[y] for y in x))
    def test_opcheck_masks(self, device, mask):
        inputs, grads = BATCHED.make(device, torch.float)
        attn = torch.attn(*inputs).attn
        for given in GIVEN:
            with self.subTest(given=given):
                some = [x if use else None for x, use in zip(grads, given)]
                self.check_operator(
                    aten._attn_backward.default, *some, *inputs, attn, mask
                )


ATTN = Counter({aten.attn.default: 1})
ATTN_BACKWARD = Counter({aten._attn_backward.default: 1})


def of_attn(counted):
    """Of the calls, those of the operator."""
    return Counter(
        {op: n for op, n in counted.items() if op in {*ATTN, *ATTN_BACKWARD}}
    )


# attn does not depend on v: eager has no gradient, AOTAutograd one of zeros.
SOME_GRADIENTS = [x for x in GRADIENTS if x.name != "v_of_attn"]


def only(used):
    """torch.attn with some of its results: AOTAutograd differentiates all it gets."""

    def op(q, k, v):
        result = torch.attn(q, k, v)
        return [getattr(result, name) for name in used]

    return op


def run_only(op, inputs, grads, wanted, used):
    leaves = [
        x.detach().requires_grad_(name in wanted) for name, x in zip(INPUTS, inputs)
    ]
    asked = [x for x in leaves if x.requires_grad]
    grads = [x for name, x in zip(OUTPUTS, grads) if name in used]
    # Where only v requires grad, attn may not.
    outputs, grads = zip(
        *((x, y) for x, y in zip(op(*leaves), grads) if x.requires_grad)
    )
    return *outputs, *torch.autograd.grad(outputs, asked, grads, allow_unused=True)


# Sizes of m, d, n, e, and of the batch. None of them are equal or 1, so that every
# size can be a symbol of its own.
SIZES = ((2, 3, 4, 5, 6), (3, 4, 5, 6, 7), (7, 5, 2, 9, 3))


def sized(m, d, n, e, b):
    return Case("sized", m, d, n, e, batch=(b,))


class TestAttnTracing(CompileTestCase):
    """make_fx, functionalization, AOTAutograd, export."""

    @by_few
    @parametrize("tracing_mode", ("real", "fake", "symbolic"))
    def test_make_fx(self, device, case, tracing_mode):
        inputs, grads = case.make(device, torch.float)
        graph = make_fx(lambda *x: torch.attn(*x), tracing_mode=tracing_mode)(*inputs)
        self.assertEqual(of_attn(calls(graph)), ATTN)
        # The graph has the operator, and what takes its results apart.
        self.assertEqual(len(calls(graph)), 2)
        self.assert_bitwise(graph(*inputs), torch.attn(*inputs))

        def both(*tensors):
            return evaluate(torch.attn, tensors[:3], tensors[3:])

        graph = make_fx(both, tracing_mode=tracing_mode)(*inputs, *grads)
        # attn is there once for the outputs and once for the gradients.
        self.assertEqual(of_attn(calls(graph)), Counter(ATTN + ATTN + ATTN_BACKWARD))
        self.assert_bitwise(graph(*inputs, *grads), both(*inputs, *grads))

    def test_make_fx_symbolic_sizes(self, device):
        first, *others = (sized(*sizes).make(device, torch.float) for sizes in SIZES)
        graph = make_fx(
            lambda *x: evaluate(torch.attn, x[:3], x[3:]), tracing_mode="symbolic"
        )(*first[0], *first[1])
        for inputs, grads in others:
            self.assert_bitwise(
                graph(*inputs, *grads), evaluate(torch.attn, inputs, grads)
            )

    @by_few
    @parametrize("remove", ("mutations", "mutations_and_views"))
    def test_functionalize(self, device, case, remove):
        inputs, _ = case.make(device, torch.float)

        def op(q, k, v):
            q, k, v = (x.clone() for x in (q, k, v))
            k.mT.mul_(2)
            output, attn = torch.attn(q, k, v)
            attn.mul_(3)
            v.add_(1)
            return output.mT.neg_(), *torch.attn(q, k, v), attn

        functional = torch.func.functionalize(op, remove=remove)
        expected = op(*inputs)
        self.assert_bitwise(functional(*inputs), expected)
        graph = make_fx(functional)(*inputs)
        self.assertEqual(of_attn(calls(graph)), ATTN + ATTN)
        for op in calls(graph):
            if isinstance(op, torch._ops.OpOverload):
                self.assertFalse(op._schema.is_mutable, msg=str(op))
        self.assert_bitwise(graph(*inputs), expected)

    @parametrize("wanted,used", SOME_GRADIENTS)
    @by_case_in((SMALL, BATCHED))
    def test_aot_function(self, device, case, wanted, used):
        inputs, grads = case.make(device, torch.float)
        forward, backward = [], []
        compiled = aot_function(
            only(used),
            fw_compiler=keep_in(forward),
            bw_compiler=keep_in(backward),
        )
        self.assert_bitwise(
            run_only(compiled, inputs, grads, wanted, used),
            run_only(only(used), inputs, grads, wanted, used),
        )
        self.assertEqual([of_attn(calls(x)) for x in forward], [ATTN])
        self.assertEqual([of_attn(calls(x)) for x in backward], [ATTN_BACKWARD])
        # Only those gradients are computed that are asked for.
        (node,) = (
            x
            for x in backward[0].graph.nodes
            if x.target is aten._attn_backward.default
        )
        self.assertEqual(
            [x is not None for x in node.args[:2]], [x in used for x in OUTPUTS]
        )
        self.assertEqual(list(node.args[-1]), [x in wanted for x in INPUTS])

    @by_case
    @dtypes(torch.float, torch.cfloat)
    def test_aot_eager(self, device, dtype, case):
        inputs, grads = case.make(device, dtype)
        recorder = Recorder()
        compiled = torch.compile(torch.attn, fullgraph=True, backend=recorder)
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = compiled(*leaves)
        actual = *outputs, *torch.autograd.grad(outputs, leaves, grads)
        expected = evaluate(torch.attn, inputs, grads)
        self.assertIs(type(outputs), torch.return_types.attn)
        self.assertEqual(of_attn(recorder.forward()), ATTN)
        self.assertEqual(of_attn(recorder.backward()), ATTN_BACKWARD)
        self.assertEqual(describe(actual), describe(expected))
        self.assert_bitwise(actual, expected)

    # Dynamo has no vmap of a hessian, whatever it is of.
    @parametrize(
        "derivative,samples",
        (
            ("jacfwd", None),
            ("jacfwd", 3),
            ("jvp_of_grad", None),
            ("jvp_of_grad", 3),
            ("hessian", None),
        ),
    )
    @parametrize("name", INPUTS)
    @parametrize("run", ("compile", "make_fx"))
    def test_derivatives_of_one(self, device, name, derivative, samples, run):
        """The other inputs have no tangent; samples share their memory."""
        inputs, _ = SMALL_BATCH.make(device, torch.float)
        function = along((name,), DERIVATIVES[derivative])
        if samples:
            inputs = [x.expand(samples, *x.shape) for x in inputs]

        def compute(op, inputs):
            f = vmap(function(op)) if samples else function(op)
            if op is torch.attn and run == "compile":
                f = torch.compile(f, backend="aot_eager")
            elif op is torch.attn:
                f = make_fx(f, tracing_mode="symbolic")(*inputs)
            return f(*inputs)

        if run == "make_fx":
            f = function(attn_composed)
            self.skip_unless_traced(vmap(f) if samples else f, inputs)
        self.assert_agrees(compute, SMALL_BATCH, inputs)

    @by_case_in((SMALL, BATCHED))
    @dtypes(torch.double, torch.cdouble)
    def test_double_backward(self, device, dtype, case):
        inputs, grads = case.make(device, dtype)
        u, _ = case.make(device, dtype)

        def op(inputs, grads, u):
            def pullback(inputs, grads):
                return torch.func.vjp(lambda *x: tuple(torch.attn(*x)), *inputs)[1](
                    grads
                )

            first, again = torch.func.vjp(pullback, inputs, grads)
            return *first, *pytree.tree_leaves(again(u))

        args = tuple(inputs), tuple(grads), tuple(u)
        expected = op(*args)
        # torch.func gives the gradients of q, k and v first, autograd those of grads.
        by_autograd = double_backward(torch.attn, *args)
        self.assert_bitwise(expected[3:], [*by_autograd[2:], *by_autograd[:2]])
        recorder = Recorder()
        compiled = torch.compile(op, fullgraph=True, backend=recorder)
        self.assert_bitwise(compiled(*args), expected)
        # The backward is there for the first order, and once more for the way from the
        # attn that it reads to q and k.
        self.assertEqual(
            of_attn(recorder.forward()), ATTN + ATTN_BACKWARD + ATTN_BACKWARD
        )

    @parametrize("aggressive", (False, True))
    @parametrize(
        "partition",
        (
            subtest(default_partition, name="default"),
            subtest(min_cut_rematerialization_partition, name="min_cut"),
        ),
    )
    def test_partitioner_does_not_recompute(self, device, partition, aggressive):
        """Cheap operations around it may be computed again, never the operator."""
        inputs, grads = BATCHED.make(device, torch.float)
        forward, backward = [], []

        def op(q, k, v):
            output, attn = torch.attn(q.relu(), 2 * k, v.neg())
            return output.relu(), (attn * attn).relu()

        compiled = aot_function(
            op,
            fw_compiler=keep_in(forward),
            bw_compiler=keep_in(backward),
            partition_fn=partition,
        )
        with torch._functorch.config.patch(aggressive_recomputation=aggressive):
            actual = gradients(compiled, inputs, grads)
        self.assert_bitwise(actual, gradients(op, inputs, grads))
        self.assertEqual([of_attn(calls(x)) for x in forward], [ATTN])
        self.assertEqual([of_attn(calls(x)) for x in backward], [ATTN_BACKWARD])

    def test_checkpoint_recomputes(self, device):
        inputs, grads = BATCHED.make(device, torch.float)

        def op(q, k, v):
            return checkpoint(
                lambda *x: torch.attn(*x), q.relu(), k, v, use_reentrant=False
            )

        recorder = Recorder()
        compiled = torch.compile(op, fullgraph=True, backend=recorder)
        self.assert_bitwise(
            gradients(compiled, inputs, grads), gradients(op, inputs, grads)
        )
        self.assertEqual(of_attn(recorder.forward()), ATTN)
        self.assertEqual(of_attn(recorder.backward()), ATTN + ATTN_BACKWARD)

    def test_cond(self, device):
        inputs, grads = BATCHED.make(device, torch.float)

        def op(q, k, v, where):
            return torch.cond(
                where,
                lambda *x: tuple(torch.attn(*x)),
                lambda q, k, v: tuple(torch.attn(q, -k, v)),
                (q, k, v),
            )

        recorder = Recorder()
        compiled = torch.compile(op, fullgraph=True, backend=recorder)
        for where in (True, False):
            q, k, v = inputs
            flag = torch.tensor(where, device=device)
            self.assert_bitwise(
                evaluate(lambda *x: compiled(*x, flag), inputs, grads),
                evaluate(
                    lambda q, k, v: torch.attn(q, k if where else -k, v), inputs, grads
                ),
            )

    def test_vmap(self, device):
        inputs, grads = BATCHED.make(device, torch.float)
        op = torch.vmap(lambda *x: tuple(torch.attn(*x)))
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        self.assert_bitwise(
            evaluate(compiled, inputs, grads), evaluate(op, inputs, grads)
        )

    def test_symbolic_trace(self, device):
        graph = torch.fx.symbolic_trace(lambda q, k, v: torch.attn(q, k, v).output)
        self.assertEqual(calls(graph)[torch.attn], 1)
        for case in (SMALL, BATCHED):
            inputs, _ = case.make(device, torch.float)
            self.assert_bitwise([graph(*inputs)], [torch.attn(*inputs).output])

    def test_results_by_name(self, device):
        """One graph, however the results are taken."""
        inputs, _ = SMALL.make(device, torch.float)

        def op(q, k, v):
            result = torch.attn(v=v, q=q, k=k)
            output, attn = result
            return result.output, result.attn, result[0] + output, attn, len(result)

        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        *actual, length = compiled(*inputs)
        output, attn = torch.attn(*inputs)
        self.assert_bitwise(actual, [output, attn, 2 * output, attn])
        self.assertEqual(length, 2)

    # In which of the sizes of q, k and v each letter is.
    @parametrize(
        "dims",
        [
            subtest(x, name=name)
            for name, x in (
                ("m", (-2, None, None)),
                ("n", (None, -2, -2)),
                ("d", (-1, -1, None)),
                ("e", (None, None, -1)),
                ("b", (0, 0, 0)),
            )
        ],
    )
    @parametrize("backend", ("aot_eager", "inductor"))
    def test_data_dependent_size(self, device, dims, backend):
        inputs, _ = Case("square", 4, 4, 4, 4, batch=(4,)).make(device, torch.float)

        def op(q, k, v, where):
            index = where.nonzero().squeeze(1)
            return tuple(
                torch.attn(
                    *(
                        x if dim is None else x.index_select(dim, index)
                        for x, dim in zip((q, k, v), dims)
                    )
                )
            )

        recorder = CompileCounterWithBackend(backend)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            compiled = torch.compile(op, fullgraph=True, backend=recorder)
            selections = [(1, 0, 1, 1), (1, 1, 0, 0), (0, 1, 0, 0)]
            # 2.6's Inductor expects other strides for an empty result.
            selections += [(0, 0, 0, 0)] * (backend == "aot_eager")
            for where in selections:
                where = torch.tensor(where, device=device)
                grads = [torch.randn_like(x) for x in op(*inputs, where)]
                self.assert_bitwise(
                    evaluate(lambda *x: compiled(*x, where), inputs, grads),
                    evaluate(lambda *x: op(*x, where), inputs, grads),
                )
        # One graph is for the outputs alone, one has gradients.
        self.assertEqual(recorder.frame_count, 2)

    def test_data_dependent_mismatch(self, device):
        """Sizes that only the run knows are checked there."""
        (q, k, v), _ = SMALL.make(device, torch.float)

        def op(q, k, v, of_k, of_v):
            return torch.attn(
                q, k[of_k.nonzero().squeeze(1)], v[of_v.nonzero().squeeze(1)]
            )

        two, also_two, three = (
            torch.tensor(x, device=device)
            for x in ((1, 0, 1, 0), (0, 0, 1, 1), (1, 1, 1, 0))
        )
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
            self.assert_bitwise(
                compiled(q, k, v, two, also_two), op(q, k, v, two, also_two)
            )
            with self.assertRaises(RuntimeError):
                compiled(q, k, v, two, three)

    @parametrize("backend", ("aot_eager", "inductor"))
    def test_unbacked_sizes(self, device, backend):
        """All sizes at once, so that nothing may be asked about any of them."""
        recorder = CompileCounterWithBackend(backend)
        compiled = torch.compile(torch.attn, fullgraph=True, backend=recorder)
        for sizes in (*SIZES, (3, 3, 3, 3, 3), (1, 1, 1, 1, 1)):
            inputs, grads = sized(*sizes).make(device, torch.float)
            leaves = [x.requires_grad_() for x in inputs]
            for x in leaves:
                mark_unbacked(x, [0, 1, 2])
            outputs = compiled(*leaves)
            actual = *outputs, *torch.autograd.grad(outputs, leaves, grads)
            self.assert_bitwise(actual, evaluate(torch.attn, inputs, grads))
        self.assertEqual(recorder.frame_count, 1)

    # How many graphs there are after each of SIZES, and after the first of them again.
    @parametrize(
        "dynamic,graphs",
        [
            subtest((False, (1, 2, 3, 3)), name="False"),
            subtest((None, (1, 2, 2, 2)), name="None"),
            subtest((True, (1, 1, 1, 1)), name="True"),
        ],
    )
    @parametrize("backend", ("aot_eager", "inductor"))
    def test_dynamic(self, device, backend, dynamic, graphs):
        recorder = CompileCounterWithBackend(backend)
        compiled = torch.compile(
            torch.attn, fullgraph=True, dynamic=dynamic, backend=recorder
        )
        for sizes, count in zip((*SIZES, SIZES[0]), graphs):
            inputs, grads = sized(*sizes).make(device, torch.float)
            leaves = [x.requires_grad_() for x in inputs]
            outputs = compiled(*leaves)
            actual = *outputs, *torch.autograd.grad(outputs, leaves, grads)
            self.assert_bitwise(actual, evaluate(torch.attn, inputs, grads))
            self.assertEqual(recorder.frame_count, count)


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return tuple(torch.attn(q, k, v))


class BiggerModel(torch.nn.Module):
    """Around the operator only what inductor computes exactly as eager does."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, bias=False)

    def forward(self, q, k, v):
        output, attn = torch.attn(self.linear(q).relu(), 2 * k, v)
        return output.relu(), attn.neg()


NAMED = {0: Dim("b"), 1: Dim("m"), 2: Dim("d")}
DYNAMIC_SHAPES = (
    subtest(
        (
            NAMED,
            {0: NAMED[0], 1: Dim("n"), 2: NAMED[2]},
            {0: NAMED[0], 1: Dim("n"), 2: Dim("e")},
        ),
        name="named",
    ),
    subtest(({i: Dim.AUTO for i in range(3)},) * 3, name="auto"),
    subtest(({i: Dim.DYNAMIC for i in range(3)},) * 3, name="dynamic"),
)


class TestAttnExport(CompileTestCase):
    def inputs(self, device, sizes=SIZES[0]):
        return tuple(sized(*sizes).make(device, torch.float)[0])

    # What export writes an operator as must be that operator, for complex tensors too.
    @dtypes(torch.double, torch.cdouble)
    @parametrize("given", subsets(OUTPUTS))
    def test_decomposition(self, device, dtype, given):
        (q, k, v), grads = BATCHED.make(device, dtype)
        table = torch._decomp.decomposition_table
        results = torch.attn(q, k, v)
        self.assertEqual(table[aten.attn.default](q, k, v), tuple(results))
        grads = [g if name in given else None for name, g in zip(OUTPUTS, grads)]
        for mask in product((False, True), repeat=3):
            tensors = *grads, q, k, v, results.attn, list(mask)
            actual = table[aten._attn_backward.default](*tensors)
            self.assertEqual(actual, aten._attn_backward(*tensors))

    @parametrize("dynamic_shapes", DYNAMIC_SHAPES)
    @parametrize("strict", (False, True))
    def test_export(self, device, strict, dynamic_shapes):
        program = export(
            Model(), self.inputs(device), dynamic_shapes=dynamic_shapes, strict=strict
        )
        self.assertEqual(of_attn(calls(program.graph_module)), ATTN)
        # The sizes b, m, d, n and e are a symbol each.
        self.assertEqual(len(program.range_constraints), 5)

        decomposed = program.run_decompositions()
        self.assertFalse(of_attn(calls(decomposed.graph_module)))
        for op in calls(decomposed.graph_module):
            # PyTorch 2.8 has assertions without the tag.
            if isinstance(op, torch._ops.OpOverload) and op._schema.returns:
                self.assertIn(torch.Tag.core, op.tags, msg=str(op))

        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        loaded = torch.export.load(buffer)
        self.assertEqual(of_attn(calls(loaded.graph_module)), ATTN)

        for sizes in SIZES:
            inputs = self.inputs(device, sizes)
            for exported in (program, loaded):
                self.assert_bitwise(exported.module()(*inputs), torch.attn(*inputs))
            self.assert_bitwise(decomposed.module()(*inputs), attn_composed(*inputs))

    @parametrize(
        "change",
        [
            subtest(change, name=name)
            for name, change in (
                ("b", lambda q, k, v: (q, k[:1], v)),
                ("d", lambda q, k, v: (q, k[..., :2], v)),
                ("n", lambda q, k, v: (q, k, v[:, :2])),
                ("dims", lambda q, k, v: (q[0], k[0], v[0])),
            )
        ],
    )
    def test_wrong_shape(self, device, change):
        inputs = self.inputs(device)
        program = export(
            Model(), inputs, dynamic_shapes=({i: Dim.AUTO for i in range(3)},) * 3
        )
        module = program.module()
        self.assert_bitwise(module(*inputs), torch.attn(*inputs))
        with self.assertRaises((AssertionError, RuntimeError, ValueError)):
            module(*change(*inputs))

    def test_wrong_shape_of_example(self, device):
        q, k, v = self.inputs(device)
        with self.assertRaisesRegex(RuntimeError, "attn: .* the same n, but got"):
            export(Model(), (q, k, v[:, :2]))

    def test_specialized_by_example(self, device):
        """Sizes that the operator says are equal cannot be told apart by name."""
        sizes = ({1: Dim("m")}, {1: Dim("n")}, {1: Dim("other_n")})
        with self.assertRaisesRegex(Exception, "Constraints violated"):
            export(Model(), self.inputs(device), dynamic_shapes=sizes)

    def test_results_by_name(self, device):
        class Named(torch.nn.Module):
            def forward(self, q, k, v):
                return torch.attn(q, k, v)

        inputs = self.inputs(device)
        result = export(Named(), inputs).module()(*inputs)
        self.assertIs(type(result), torch.return_types.attn)
        self.assert_bitwise(result, torch.attn(*inputs))

    @parametrize(
        "dims", [subtest((0, 0, 0), name="b"), subtest((None, 1, 1), name="n")]
    )
    def test_data_dependent_size(self, device, dims):
        class Selected(torch.nn.Module):
            def forward(self, q, k, v, where):
                index = where.nonzero().squeeze(1)
                return tuple(
                    torch.attn(
                        *(
                            x if dim is None else x.index_select(dim, index)
                            for x, dim in zip((q, k, v), dims)
                        )
                    )
                )

        inputs, _ = Case("square", 4, 4, 4, 4, batch=(4,)).make(device, torch.float)
        where = torch.tensor((1, 0, 1, 1), device=device)
        program = export(Selected(), (*inputs, where))
        self.assertEqual(of_attn(calls(program.graph_module)), ATTN)
        decomposed = program.run_decompositions()
        self.assertFalse(of_attn(calls(decomposed.graph_module)))
        for where in ((1, 0, 1, 1), (0, 1, 0, 0), (0, 0, 0, 0)):
            where = torch.tensor(where, device=device)
            index = where.nonzero().squeeze(1)
            selected = [
                x if dim is None else x.index_select(dim, index)
                for x, dim in zip(inputs, dims)
            ]
            self.assert_bitwise(program.module()(*inputs, where), torch.attn(*selected))
            self.assert_bitwise(
                decomposed.module()(*inputs, where), attn_composed(*selected)
            )


class TestAttnInductor(CompileTestCase):
    """Of the operator alone inductor makes no C++, which takes seconds to compile."""

    @by_case
    def test_values(self, device, case):
        inputs, grads = case.make(device, torch.float)
        compiled = torch.compile(torch.attn, fullgraph=True)
        actual = evaluate(compiled, inputs, grads)
        expected = evaluate(torch.attn, inputs, grads)
        self.assertEqual(describe(actual), describe(expected))
        self.assert_bitwise(actual, expected)

    @parametrize("wanted,used", SOME_GRADIENTS)
    def test_gradients(self, device, wanted, used):
        inputs, grads = BATCHED.make(device, torch.float)
        compiled = torch.compile(only(used), fullgraph=True)
        self.assert_bitwise(
            run_only(compiled, inputs, grads, wanted, used),
            run_only(only(used), inputs, grads, wanted, used),
        )

    def implicit_fallbacks(self, device):
        inputs, grads = SMALL.make(device, torch.float)
        with Messages(self, "torch._inductor") as messages:
            evaluate(torch.compile(torch.attn, fullgraph=True), inputs, grads)
        return [x for x in messages if "implicit fallback" in x]

    def test_no_implicit_fallback(self, device):
        with torch._inductor.config.patch(force_disable_caches=True):
            self.assertEqual(self.implicit_fallbacks(device), [])
            # Without the overlay's lines Inductor logs a message, which with CI set would
            # be an error.
            torch._dynamo.reset()
            without = {
                op: x
                for op, x in lowering.lowerings.items()
                if op
                not in (
                    aten.attn.default,
                    aten._attn_backward.default,
                    aten.attn,
                    aten._attn_backward,
                )
            }
            with (
                mock.patch.dict(lowering.lowerings, without, clear=True),
                mock.patch.dict(os.environ, {"CI": ""}),
                # An implicit fallback adds a constraint here, and never takes it away.
                mock.patch.dict(lowering._maybe_layout_constraints),
            ):
                self.assertEqual(
                    len([x for x in self.implicit_fallbacks(device) if "attn" in x]), 2
                )

    # With CI set, a fallback for an operator that has a decomposition must say that it is
    # meant. Else the import of Inductor raises, and nothing could be compiled.
    def test_import_in_ci(self, device):
        run = subprocess.run(
            [sys.executable, "-c", "import torch._inductor.lowering"],
            env=os.environ | {"CI": "1"},
            capture_output=True,
            text=True,
        )
        self.assertEqual(run.returncode, 0, run.stderr)

    def test_in_a_bigger_graph(self, device):
        model = BiggerModel().to(device)
        recorder = CompileCounterWithBackend("inductor")
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=recorder)

        def run(model, inputs, grads):
            leaves = [x.detach().requires_grad_() for x in inputs]
            outputs = model(*leaves)
            asked = (*leaves, *model.parameters())
            return *outputs, *torch.autograd.grad(outputs, asked, grads)

        for m, _, n, e, b in SIZES:
            inputs, grads = sized(m, 3, n, e, b).make(device, torch.float)
            if recorder.frame_count:
                actual = run(compiled, inputs, grads)
            else:
                # run_and_get_code resets Dynamo, so it runs the first time alone.
                actual, code = run_and_get_code(run, compiled, inputs, grads)
                forward, backward = code
                self.assertEqual(forward.count("torch.ops.aten.attn.default("), 1)
                self.assertEqual(backward.count("torch.ops.aten.attn.default("), 0)
                self.assertEqual(backward.count("aten._attn_backward.default("), 1)
            self.assert_bitwise(actual, run(model, inputs, grads))
        self.assertEqual(recorder.frame_count, 1)


class TestAttnJit(CompileTestCase):
    def check(self, script, op=torch.attn, dtype=torch.float, inputs=None):
        """Several runs: the first ones of a script only profile it."""
        for case in (SMALL, SMALL, BATCHED, SMALL):
            inputs, grads = case.make("cpu", dtype)
            self.assert_bitwise(
                evaluate(script, inputs, grads), evaluate(op, inputs, grads)
            )

    def count(self, graph):
        return str(graph).count("aten::attn(")

    def saved(self, script):
        buffer = io.BytesIO()
        torch.jit.save(script, buffer)
        buffer.seek(0)
        return torch.jit.load(buffer)

    def test_script(self):
        @torch.jit.script
        def by_name(q, k, v):
            result = torch.attn(q=q, k=k, v=v)
            return result.output, result.attn

        @torch.jit.script
        def unpacked(q, k, v):
            output, attn = torch.attn(q, k, v)
            return output, attn

        @torch.jit.script
        def namespace(q, k, v):
            return torch.ops.aten.attn(q, k, v)

        for script in (by_name, unpacked, namespace):
            self.assertEqual(self.count(script.graph), 1)
            self.check(script)
            self.check(self.saved(script))

    @parametrize("name", OUTPUTS)
    def test_script_one_output(self, name):
        script = torch.jit.CompilationUnit(
            f"def f(q, k, v):\n    return torch.attn(q, k, v).{name}\n"
        ).f
        inputs, _ = SMALL.make("cpu", torch.float)
        for _ in range(3):
            self.assert_bitwise([script(*inputs)], [getattr(torch.attn(*inputs), name)])

    def test_script_error(self):
        @torch.jit.script
        def script(q, k, v):
            return torch.attn(q, k, v)

        (q, k, v), _ = SMALL.make("cpu", torch.float)
        with self.assertRaisesRegex(RuntimeError, "attn: .* the same n, but got"):
            script(q, k, v[:1])

    def test_trace(self):
        inputs, _ = SMALL.make("cpu", torch.float)
        other, _ = BATCHED.make("cpu", torch.float)
        traced = torch.jit.trace(
            lambda q, k, v: torch.attn(q, k, v),
            tuple(inputs),
            check_trace=True,
            check_inputs=[tuple(other)],
        )
        self.assertEqual(self.count(traced.graph), 1)
        self.check(traced)
        self.check(self.saved(traced))

    def test_freeze(self):
        model = BiggerModel().eval()
        frozen = torch.jit.freeze(torch.jit.script(model))
        self.assertEqual(self.count(frozen.graph), 1)
        for case in (SMALL, SMALL, BATCHED):
            inputs, _ = case.make("cpu", torch.float)
            with torch.no_grad():
                self.assert_bitwise(frozen(*inputs), model(*inputs))
                self.assert_bitwise(self.saved(frozen)(*inputs), model(*inputs))

    def test_constants(self):
        """Of constants, freezing may compute the result."""

        class Constant(torch.nn.Module):
            def __init__(self, q, k, v):
                super().__init__()
                self.q, self.k, self.v = q, k, v

            def forward(self, x):
                result = torch.attn(self.q, self.k, self.v)
                return result.output * x, result.attn

        inputs, _ = SMALL.make("cpu", torch.float)
        frozen = torch.jit.freeze(torch.jit.script(Constant(*inputs).eval()))
        output, attn = torch.attn(*inputs)
        self.assert_bitwise(frozen(torch.tensor(2.0)), [2 * output, attn])

    def test_autocast_around(self):
        @torch.jit.script
        def script(q, k, v):
            return torch.attn(q, k, v)

        inputs, _ = SMALL.make("cpu", torch.float)
        for _ in range(3):
            with torch.autocast("cpu"):
                self.assert_bitwise(
                    script(*inputs), torch.attn(*(x.bfloat16() for x in inputs))
                )


class TestAttnStubs(CompileTestCase):
    """What type checkers read."""

    def definitions(self, name):
        tree = ast.parse((Path(torch.__file__).parent / name).read_text())
        return [x for x in tree.body if getattr(x, "name", None) == "attn"]

    @parametrize("name", ("_C/_VariableFunctions.pyi", "_VF.pyi"))
    def test_function(self, name):
        (function,) = self.definitions(name)
        # In a build from source, stubs have the docstring.
        if ast.get_docstring(function):
            del function.body[0]
        self.assertEqual(
            ast.unparse(function),
            "def attn(q: Tensor, k: Tensor, v: Tensor) -> torch.return_types.attn:\n"
            "    ...",
        )

    def test_result(self):
        (result,) = self.definitions("return_types.pyi")
        self.assertEqual(
            [ast.unparse(x) for x in result.bases], ["tuple[Tensor, Tensor]"]
        )
        fields = [
            (x.name, [ast.unparse(y) for y in x.decorator_list], ast.unparse(x.returns))
            for x in result.body
            if isinstance(x, ast.FunctionDef) and x.name in OUTPUTS
        ]
        self.assertEqual(fields, [(x, ["property"], "Tensor") for x in OUTPUTS])

    def test_listed(self):
        stub = Path(torch.__file__).parent / "_C" / "_VariableFunctions.pyi"
        listed = [
            ast.literal_eval(x.value)
            for x in ast.parse(stub.read_text()).body
            if isinstance(x, (ast.Assign, ast.AnnAssign, ast.AugAssign))
            and "__all__" in ast.unparse(x).split()[0]
        ]
        # The generator lists what returns a namedtuple twice.
        self.assertIn("attn", [y for x in listed for y in x])


instantiate_device_type_tests(TestAttnMeta, globals())
instantiate_device_type_tests(TestAttnTracing, globals())
instantiate_device_type_tests(TestAttnExport, globals())
# On other devices inductor wants Triton.
instantiate_device_type_tests(TestAttnInductor, globals(), only_for="cpu")
instantiate_parametrized_tests(TestAttnJit)
instantiate_parametrized_tests(TestAttnStubs)

if __name__ == "__main__":
    run_tests()
