# Owner(s): ["module: amp (automated mixed precision)"]

from contextlib import nullcontext
from functools import partial
from itertools import product

from attn_function import tangents
from test_attn import (
    attn_composed,
    AttnTestCase,
    by_case,
    by_case_in,
    Case,
    evaluate,
    SMALL,
)

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.autocast_test_lists import (
    AutocastCPUTestLists,
    AutocastTestLists,
)
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_utils import parametrize, run_tests
from torch.utils._python_dispatch import TorchDispatchMode


LOW = (torch.bfloat16, torch.half)
# Autocast leaves float64 and complex as they are.
CAST = (torch.float, *LOW)
KEPT = (torch.double, torch.cfloat)
MIXED = tuple(product((*CAST, *KEPT), repeat=3))


BATCHED = Case("batched", 2, 3, 4, 5, batch=(3,))
by_two = by_case_in((SMALL, BATCHED))


def cast(x, dtype):
    """What autocast does to a tensor of its device."""
    return x.to(dtype) if x.dtype in CAST else x


def explicit(dtype):
    """torch.attn after the casts that autocast to ``dtype`` makes."""
    return lambda *inputs: torch.attn(*(cast(x, dtype) for x in inputs))


class Inside(torch.nn.Module):
    """For TorchScript, whose autocast is a pass with a list of its own."""

    __constants__ = ["device", "dtype"]

    def __init__(self, device, dtype):
        super().__init__()
        self.device = device
        self.dtype = dtype


class Whole(Inside):
    def forward(self, q, k, v):
        with torch.autocast(self.device, self.dtype):
            output, attn = torch.attn(q, k, v)
        return output, attn


class Within(Inside):
    """One autocast in another, in a branch and in a loop; then outside of both."""

    def forward(self, q, k, v):
        results = []
        with torch.autocast(self.device, self.dtype):
            for i in range(2):
                if i > 0:
                    with torch.autocast(self.device, self.dtype, enabled=False):
                        output, attn = torch.attn(q, k, v)
                else:
                    output, attn = torch.attn(q, k, v)
                results += [output, attn]
            output, attn = torch.attn(k, k, k)  # each is cast
            results += [output, attn]
        output, attn = torch.attn(q, k, v)
        return results + [output, attn]


class Nowhere(Inside):
    def forward(self, q, k, v):
        output, attn = torch.attn(q, k, v)
        return output, attn


class CountCasts(TorchDispatchMode):
    """How often the values of ``x`` are cast."""

    def __init__(self, x):
        super().__init__()
        self.x = x
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default and args[0] is self.x
        return func(*args, **(kwargs or {}))


class TestAttnAutocast(AttnTestCase):
    def autocast(self, device, dtype=None, **kwargs):
        return torch.autocast(torch.device(device).type, dtype=dtype, **kwargs)

    def under_autocast(self, device, dtype, op=torch.attn):
        """``op`` under autocast; its backward is not, as the documentation asks."""

        def run(*inputs):
            with self.autocast(device, dtype):
                return op(*inputs)

        return run

    @by_case
    @dtypes(*LOW)
    def test_as_by_casts(self, device, dtype, case):
        """Values in ``dtype``; gradients in that of the inputs."""
        inputs, grads = case.make(device, torch.float)
        grads = [x.to(dtype) for x in grads]
        actual = evaluate(self.under_autocast(device, dtype), inputs, grads)
        self.assert_bitwise(actual, evaluate(explicit(dtype), inputs, grads))
        self.assertEqual([x.dtype for x in actual], 2 * [dtype] + 3 * [torch.float])

    @dtypes(*LOW)
    def test_mixed_dtypes(self, device, dtype):
        """The dtype of torch.bmm, or an error where it has one, for each three."""
        count = 0
        for mixed in MIXED:
            made, grads = BATCHED.make(device, torch.float)
            inputs = [x.to(y) for x, y in zip(made, mixed)]
            with self.subTest(dtypes=mixed):
                try:
                    expected = self.under_autocast(device, dtype, attn_composed)(
                        *inputs
                    )
                except RuntimeError:
                    with self.assertRaisesRegex(RuntimeError, "the same dtype"):
                        self.under_autocast(device, dtype)(*inputs)
                    continue
                count += 1
                grads = [x.to(y.dtype) for x, y in zip(grads, expected)]
                actual = evaluate(self.under_autocast(device, dtype), inputs, grads)
                self.assertEqual(
                    [x.dtype for x in actual], [*(x.dtype for x in expected), *mixed]
                )
                self.assert_bitwise(actual, evaluate(explicit(dtype), inputs, grads))
        # The dtypes that are cast come in any mixture, each that is kept with itself.
        self.assertEqual(count, len(CAST) ** 3 + len(KEPT))

    def test_default_dtype(self, device):
        inputs, _ = SMALL.make(device, torch.float)
        expected = torch.get_autocast_dtype(torch.device(device).type)
        for x in self.under_autocast(device, None)(*inputs):
            self.assertEqual(x.dtype, expected)

    def test_integers(self, device):
        inputs, _ = SMALL.make(device, torch.float)
        with self.assertRaisesRegex(RuntimeError, "floating point or complex"):
            self.under_autocast(device, None)(*(x.long() for x in inputs))

    def test_disabled(self, device):
        inputs, _ = SMALL.make(device, torch.float)
        q, k, v = inputs
        with self.autocast(device, enabled=False):
            self.assert_bitwise(torch.attn(*inputs), torch.attn(*inputs))
            self.assertEqual(torch.attn(*inputs).attn.dtype, torch.float)
            with self.assertRaisesRegex(RuntimeError, "the same dtype"):
                torch.attn(q.bfloat16(), k, v)

    def test_nested(self, device):
        inputs, _ = SMALL.make(device, torch.float)
        q, k, v = inputs
        bfloat16 = explicit(torch.bfloat16)(*inputs)
        with self.autocast(device, torch.bfloat16):
            with self.autocast(device, torch.half):
                self.assert_bitwise(torch.attn(*inputs), explicit(torch.half)(*inputs))
            self.assert_bitwise(torch.attn(*inputs), bfloat16)
            with self.autocast(device, enabled=False):
                inner = torch.attn(*inputs)
                with self.assertRaisesRegex(RuntimeError, "the same dtype"):
                    torch.attn(bfloat16.output, inner.output, inner.output)
            self.assert_bitwise(torch.attn(*inputs), bfloat16)
        self.assert_bitwise(inner, torch.attn(*inputs))
        self.assertEqual(inner.attn.dtype, torch.float)

    def test_of_another_device(self, device):
        """Autocast is for the tensors of its own device only, as for torch.bmm."""
        inputs, _ = BATCHED.make("meta", torch.float)
        actual, expected = (
            self.under_autocast(device, torch.bfloat16, op)(*inputs)
            for op in (torch.attn, attn_composed)
        )
        self.assertEqual([x.dtype for x in actual], [x.dtype for x in expected])

    @dtypes(*LOW)
    def test_backward_inside(self, device, dtype):
        """Not what the documentation asks for; the gradients are the same."""
        inputs, grads = SMALL.make(device, torch.float)
        grads = [x.to(dtype) for x in grads]
        expected = evaluate(explicit(dtype), inputs, grads)
        with self.autocast(device, dtype):
            actual = evaluate(torch.attn, inputs, grads)
        self.assert_bitwise(actual, expected)

    @by_two
    @dtypes(*LOW)
    def test_double_backward(self, device, dtype, case):
        inputs, grads = case.make(device, torch.float)
        grads = [x.to(dtype) for x in grads]

        def twice(op):
            leaves = [x.detach().requires_grad_() for x in inputs]
            first = torch.autograd.grad(op(*leaves), leaves, grads, create_graph=True)
            return *first, *torch.autograd.grad(first, leaves, inputs)

        actual = twice(self.under_autocast(device, dtype))
        self.assert_bitwise(actual, twice(explicit(dtype)))
        for x in actual:
            self.assertEqual(x.dtype, torch.float)

    @by_two
    @dtypes(*LOW)
    def test_forward_ad(self, device, dtype, case):
        inputs, _ = case.make(device, torch.float)
        u, _ = case.make(device, torch.float)
        actual = tangents(self.under_autocast(device, dtype), inputs, u)
        self.assert_bitwise(actual, tangents(explicit(dtype), inputs, u))
        self.assertEqual([x.dtype for x in actual], [dtype, dtype])

    # How often a tensor that is used twice is cast.
    @parametrize(
        "leaf,cache_enabled,casts",
        ((True, True, 1), (True, False, 2), (False, True, 2)),
    )
    @parametrize("index", range(3), name_fn="qkv".__getitem__)
    def test_cache(self, device, index, leaf, cache_enabled, casts):
        inputs, grads = SMALL.make(device, torch.float)
        inputs[index].requires_grad_(leaf)
        with CountCasts(inputs[index]) as mode:
            with self.autocast(device, torch.bfloat16, cache_enabled=cache_enabled):
                outputs = [torch.attn(*inputs).output for _ in range(2)]
        self.assertEqual(mode.count, casts)
        if not leaf:
            return
        # The gradients of the uses are added before a cast that they share, else after.
        low = [x.bfloat16() for x in inputs]
        expected = []
        for _ in range(2):
            if not cache_enabled:
                low[index] = inputs[index].bfloat16()
            expected.append(torch.attn(*low).output)
        grads = [x.bfloat16() for x in (grads[0], grads[0].flip(0))]
        self.assert_bitwise(
            *(torch.autograd.grad(x, inputs[index], grads) for x in (outputs, expected))
        )

    @parametrize("cast_inputs", (None, torch.float, torch.half))
    def test_custom_fwd(self, device, cast_inputs):
        """With cast_inputs there is no autocast in forward, without it there is."""
        device_type = torch.device(device).type

        class Function(torch.autograd.Function):
            @staticmethod
            @partial(
                torch.amp.custom_fwd, device_type=device_type, cast_inputs=cast_inputs
            )
            def forward(ctx, q, k, v):
                result = torch.attn(q, k, v)
                ctx.save_for_backward(q, k, v, result.attn)
                return tuple(result)

            @staticmethod
            @partial(torch.amp.custom_bwd, device_type=device_type)
            def backward(ctx, grad_output, grad_attn):
                tensors = (x.to(grad_attn.dtype) for x in ctx.saved_tensors)
                found = torch.ops.aten._attn_backward(
                    grad_output, grad_attn, *tensors, (True,) * 3
                )
                return tuple(x.float() for x in found)

        dtype = cast_inputs or torch.bfloat16
        inputs, grads = SMALL.make(device, torch.float)
        grads = [x.to(dtype) for x in grads]
        self.assert_bitwise(
            evaluate(
                self.under_autocast(device, torch.bfloat16, Function.apply),
                inputs,
                grads,
            ),
            evaluate(explicit(dtype), inputs, grads),
        )

    @dtypes(*LOW)
    def test_vmap(self, device, dtype):
        (q, k, v), grads = BATCHED.make(device, torch.float)
        grads = [x.to(dtype) for x in grads]
        for inputs, in_dims in (
            ((q, k, v), (0, 0, 0)),
            ((q, k[0], v[0]), (0, None, None)),
            ((q[0], k[0], v), (None, None, 0)),
        ):
            with self.subTest(in_dims=in_dims):
                # Autocast around vmap, and inside.
                for op in (
                    self.under_autocast(
                        device,
                        dtype,
                        torch.vmap(lambda *x: tuple(torch.attn(*x)), in_dims),
                    ),
                    torch.vmap(
                        lambda *x: tuple(self.under_autocast(device, dtype)(*x)),
                        in_dims,
                    ),
                ):
                    expected = torch.vmap(
                        lambda *x: tuple(explicit(dtype)(*x)), in_dims
                    )
                    outputs = expected(*inputs)
                    given = [x.expand_as(y) for x, y in zip(grads, outputs)]
                    self.assert_bitwise(
                        evaluate(op, inputs, given), evaluate(expected, inputs, given)
                    )
                    self.assertEqual([x.dtype for x in outputs], [dtype, dtype])

    @parametrize("inside", (True, False))
    @dtypes(*LOW)
    def test_compile(self, device, dtype, inside):
        inputs, grads = BATCHED.make(device, torch.float)
        grads = [x.to(dtype) for x in grads]
        torch._dynamo.reset()
        compile = partial(torch.compile, fullgraph=True, backend="aot_eager")
        if inside:
            op = compile(self.under_autocast(device, dtype))
        else:
            op = self.under_autocast(device, dtype, compile(torch.attn))
        self.assert_bitwise(
            evaluate(op, inputs, grads), evaluate(explicit(dtype), inputs, grads)
        )

    @dtypes(*LOW)
    def test_compile_again_for_another_dtype(self, device, dtype):
        inputs, _ = SMALL.make(device, torch.float)
        torch._dynamo.reset()
        compiled = torch.compile(torch.attn, fullgraph=True, backend="aot_eager")
        for context, op in (
            (nullcontext(), torch.attn),
            (self.autocast(device, dtype), explicit(dtype)),
            (self.autocast(device, enabled=False), torch.attn),
        ):
            with context:
                actual = compiled(*inputs)
            self.assert_bitwise(actual, op(*inputs))

    @dtypes(*LOW)
    def test_fake(self, device, dtype):
        for mixed in product(CAST, repeat=3):
            made, _ = BATCHED.make(device, torch.float)
            inputs = [x.to(y) for x, y in zip(made, mixed)]
            expected = self.under_autocast(device, dtype)(*inputs)
            with FakeTensorMode() as mode:
                fakes = [mode.from_tensor(x) for x in inputs]
                actual = self.under_autocast(device, dtype)(*fakes)
            for x, y in zip(actual, expected):
                self.assertEqual(x.dtype, y.dtype)
                self.assertEqual(x.shape, y.shape)
                self.assertEqual(x.stride(), y.stride())

    @parametrize("around", (False, True))
    @parametrize("module", (Whole, Within, Nowhere))
    @dtypes(*LOW)
    def test_script(self, device, dtype, module, around):
        """As without TorchScript, each time: it is profiled first, then optimized."""
        if around and module is Within:
            self.skipTest("in TorchScript an autocast around is not disabled, of no op")
        inputs, _ = BATCHED.make(device, torch.float)
        eager = module(torch.device(device).type, dtype)
        scripted = torch.jit.script(eager)

        def run(op):
            leaves = [x.detach().requires_grad_() for x in inputs]
            with self.autocast(device, dtype, enabled=around):
                results = op(*leaves)
            # The loss is that of one attn: gradients of several are added in another order.
            loss = sum((x.float() ** 2).sum() for x in results[:2])
            return *results, *torch.autograd.grad(loss, leaves)

        expected = run(eager)
        for _ in range(4):
            actual = run(scripted)
            self.assertEqual([x.dtype for x in actual], [x.dtype for x in expected])
            self.assert_bitwise(actual, expected)
        # What stands in for attn while the pass runs is gone.
        self.assertNotIn("matmul", str(scripted.graph_for(*inputs)))

    def test_script_without_the_pass(self, device):
        class Fresh(Whole):
            """Not compiled yet, as the others are once for all."""

        inputs, _ = BATCHED.make(device, torch.float)
        scripted = torch.jit.script(Fresh(torch.device(device).type, torch.bfloat16))
        before = torch._C._jit_set_autocast_mode(False)
        try:
            self.assert_bitwise(scripted(*inputs), torch.attn(*inputs))
        finally:
            torch._C._jit_set_autocast_mode(before)

    def test_script_of_other_dtypes(self, device):
        """TorchScript casts float alone: what torch.mm refuses then, attn does."""
        made, _ = SMALL.make(device, torch.float)
        scripted = torch.jit.script(Whole(torch.device(device).type, torch.bfloat16))
        for mixed in MIXED:
            low = [torch.bfloat16 if x is torch.float else x for x in mixed]
            inputs = [x.to(y) for x, y in zip(made, mixed)]
            with self.subTest(dtypes=mixed):
                if len({*low}) == 1:
                    expected = torch.attn(*(x.to(low[0]) for x in inputs))
                    self.assert_bitwise(scripted(*inputs), expected)
                else:
                    with self.assertRaisesRegex(RuntimeError, "the same dtype"):
                        scripted(*inputs)

    @dtypes(*LOW)
    def test_grad_scaler(self, device, dtype):
        """Two steps, of which the first has an infinite gradient and is skipped."""
        (q, k, v), _ = SMALL.make(device, torch.float)

        def train(op):
            weight = torch.eye(3, device=device, requires_grad=True)
            optimizer = torch.optim.SGD([weight], lr=0.5)
            scaler = torch.amp.GradScaler(
                torch.device(device).type, init_scale=4.0, growth_interval=1
            )
            seen = []
            for factor in (float("inf"), 1.0):
                optimizer.zero_grad()
                loss = factor * op(q, k @ weight, v).output.float().square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                seen.append((weight.detach().clone(), scaler.get_scale()))
            return seen

        actual = train(self.under_autocast(device, dtype))
        expected = train(explicit(dtype))
        self.assert_bitwise([x for x, _ in actual], [x for x, _ in expected])
        self.assertEqual([x for _, x in actual], [2.0, 4.0])
        eye = torch.eye(3, device=device)
        self.assertEqual([torch.equal(x, eye) for x, _ in actual], [True, False])

    def test_overload(self, device):
        inputs, _ = SMALL.make(device, torch.float)
        self.assert_bitwise(
            self.under_autocast(device, torch.bfloat16, torch.ops.aten.attn)(*inputs),
            explicit(torch.bfloat16)(*inputs),
        )

    @parametrize(
        "lists,name",
        ((AutocastTestLists, "torch_fp16"), (AutocastCPUTestLists, "torch_16")),
    )
    def test_in_upstream_lists(self, device, lists, name):
        """Upstream's test_autocast.py and test_cuda.py run what is in these lists."""
        ((_, args),) = (
            x for x in getattr(lists(torch.device(device)), name) if x[0] == "attn"
        )
        self.assertEqual([x.dtype for x in args], [torch.float] * 3)
        self.assert_bitwise(
            self.under_autocast(device, torch.bfloat16)(*args),
            explicit(torch.bfloat16)(*args),
        )


instantiate_device_type_tests(TestAttnAutocast, globals())

if __name__ == "__main__":
    run_tests()
