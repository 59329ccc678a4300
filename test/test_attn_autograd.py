# Owner(s): ["module: autograd"]

"""Derivatives of attn beyond the first gradient, and how it fits into autograd."""

import re
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import combinations, product
from typing import NamedTuple

from attn_function import double_backward, INPUTS, OUTPUTS, tangents
from test_attn import (
    attn_composed,
    AttnTestCase,
    by_case,
    by_case_in,
    by_small_or_empty_case,
    Case,
    evaluate,
    GRADIENTS,
    SMALL,
    SMALL_BATCH,
    unsupported,
    WANTED,
)

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import jvp, vjp
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
    onlyCPU,
)
from torch.testing._internal.common_utils import parametrize, run_tests
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


by_small_case = by_case_in((SMALL, SMALL_BATCH))


# Ways in which `attn`, or a gradient that is given, has a wrong shape, dtype or device.
WRONG = {
    "transposed": lambda x: x.mT,
    "one_row": lambda x: x[..., :1, :],
    "no_row": lambda x: x[..., :0, :],
    "one_column": lambda x: x[..., :1],
    "more_rows": lambda x: x.repeat_interleave(9, -2),
    "0d": lambda x: x.sum(),
    "first": lambda x: x[0],
    "batch": lambda x: x[None],
    "half": lambda x: torch.zeros_like(x, dtype=torch.half),
    "double": lambda x: torch.zeros_like(x, dtype=torch.double),
    "cdouble": lambda x: torch.zeros_like(x, dtype=torch.cdouble),
    "bool": lambda x: torch.zeros_like(x, dtype=torch.bool),
    "on_meta": lambda x: torch.zeros_like(x, device="meta"),
}
# Mistakes in q, k and v: the same check refuses them in the forward.
REFUSED = {
    "d": ("q", lambda q: q[..., :1], "attn: q (*, m, d) and k (*, n, d) must"),
    "n": ("v", lambda v: v[..., :1, :], "attn: k (*, n, d) and v (*, n, e) must"),
    "dims": ("k", lambda k: k[None], "attn: q, k and v must have the same number"),
    "0d": ("q", lambda q: q.sum(), "attn: q, k and v must have at least 2"),
    "dtype": ("v", WRONG["half"], "attn: q, k and v must have the same dtype"),
}


def subsets(names):
    return [
        some for size in range(len(names)) for some in combinations(names, size + 1)
    ]


def described(x):
    """A pattern of how a message describes x."""
    size = re.escape(str([*x.shape]))
    # Without a decomposition in Python, a fake tensor is a meta tensor to the operator.
    device = f"(?:{x.device}|meta)" if isinstance(x, FakeTensor) else x.device
    return f"{x.dtype} of sizes {size} on {device}"


def like(tensors):
    return [torch.randn_like(x.contiguous()) for x in tensors]


def first_gradients(op, inputs, grads, wanted, used, of_grads=True):
    """The leaves, and the gradients as functions of them; both by name.

    Only ``wanted`` requires grad, only ``used`` has a gradient, which itself requires
    grad if ``of_grads``. A gradient that does not depend on any leaf is left out.
    """
    leaves = {i: x.detach().requires_grad_(i in wanted) for i, x in zip(INPUTS, inputs)}
    outputs = dict(zip(OUTPUTS, op(*leaves.values())))
    cotangents = {
        name: grad.detach().requires_grad_(of_grads)
        for name, grad in zip(OUTPUTS, grads)
        if name in used and outputs[name].requires_grad
    }
    leaves = {i: leaves[i] for i in wanted}
    found = torch.autograd.grad(
        [outputs[name] for name in cotangents],
        list(leaves.values()),
        list(cotangents.values()),
        create_graph=True,
        allow_unused=True,
    )
    if of_grads:
        leaves |= cotangents
    return leaves, {
        name: grad
        for name, grad in zip(wanted, found)
        if grad is not None and grad.requires_grad
    }


def second_gradients(op, inputs, grads, u, *, wanted, used, given, of_grads=True):
    """Gradients of those first gradients that are ``given`` a gradient of their own."""
    leaves, firsts = first_gradients(op, inputs, grads, wanted, used, of_grads)
    pairs = [(firsts[i], x) for i, x in zip(INPUTS, u) if i in given and i in firsts]
    if not pairs:
        return [None] * 5
    outputs, grads = zip(*pairs)
    found = torch.autograd.grad(
        outputs, list(leaves.values()), grads, allow_unused=True
    )
    found = dict(zip(leaves, found))
    return [found.get(name) for name in INPUTS + OUTPUTS]


def third_gradients(op, inputs, grads, u, w):
    """Gradients of <second gradients, w>."""
    inputs, grads, u = (
        [x.detach().requires_grad_() for x in xs] for xs in (inputs, grads, u)
    )
    first = torch.autograd.grad(op(*inputs), inputs, grads, create_graph=True)
    second = torch.autograd.grad(first, [*inputs, *grads], u, create_graph=True)
    return torch.autograd.grad(second, [*inputs, *grads, *u], w)


def tangents_of_gradients(op, inputs, grads, u, *, along, used):
    """Forward over reverse, where only ``along`` has a tangent."""
    with forward_ad.dual_level():
        leaves = [x.detach().requires_grad_() for x in inputs]
        named = list(zip(INPUTS + OUTPUTS, [*leaves, *grads], u))
        duals = {
            name: forward_ad.make_dual(x, t) if name in along else x
            for name, x, t in named
        }
        outputs = dict(zip(OUTPUTS, op(*(duals[name] for name in INPUTS))))
        found = torch.autograd.grad(
            [outputs[name] for name in used],
            leaves,
            [duals[name] for name in used],
            create_graph=True,
            allow_unused=True,
        )
        return [None if x is None else forward_ad.unpack_dual(x).tangent for x in found]


def outputs_of(op, used=OUTPUTS):
    """``op`` with a plain tuple of the outputs that are used."""
    return lambda *inputs: tuple(
        x for name, x in zip(OUTPUTS, op(*inputs)) if name in used
    )


def pullback(op, used=OUTPUTS):
    """The gradients as a function of the inputs and of the used outputs' gradients."""
    return lambda *x: vjp(outputs_of(op, used), *x[:3])[1](tuple(x[3:]))


def pushforward(op):
    """The tangents as a function of the inputs and of their tangents."""
    return lambda *x: jvp(outputs_of(op), tuple(x[:3]), tuple(x[3:]))[1]


# Each takes the inputs x, the gradients g of the outputs, and for their derivatives u
# and w like the inputs and h like the outputs.
TRANSFORMS = {
    "forward": lambda op, x, g, u, w, h: pushforward(op)(*x, *u),
    "reverse_over_reverse": lambda op, x, g, u, w, h: vjp(pullback(op), *x, *g)[1](
        tuple(u)
    ),
    "forward_over_reverse": lambda op, x, g, u, w, h: jvp(
        pullback(op), (*x, *g), (*u, *h)
    )[1],
    "reverse_over_forward": lambda op, x, g, u, w, h: vjp(pushforward(op), *x, *u)[1](
        tuple(g)
    ),
    "forward_over_forward": lambda op, x, g, u, w, h: jvp(
        pushforward(op), (*x, *u), (*w, *u)
    )[1],
    "forward_over_reverse_over_reverse": lambda op, x, g, u, w, h: jvp(
        lambda *y: vjp(pullback(op), *y)[1](tuple(u)), (*x, *g), (*w, *h)
    )[1],
    "forward_over_reverse_over_forward": lambda op, x, g, u, w, h: jvp(
        lambda *y: vjp(pushforward(op), *y)[1](tuple(g)), (*x, *u), (*w, *u)
    )[1],
}


def nodes(*tensors):
    """The names of all nodes of the graph behind ``tensors``."""
    names, seen = set(), set()
    stack = [x.grad_fn for x in tensors]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name().split("::")[-1])
            stack.extend(following for following, _ in node.next_functions)
    return names


class Record(TorchDispatchMode):
    """The operators that are run, without the aliases by which autograd saves."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.detach.default:
            self.calls.append(func)
        return func(*args, **(kwargs or {}))


class Wrapper(torch.Tensor):
    """A tensor around another one, to which it passes on all that it is asked."""

    calls = []

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner):
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.detach.default:
            cls.calls.append(func)
        args, kwargs = pytree.tree_map_only(
            Wrapper, lambda x: x.inner, (args, kwargs or {})
        )
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


FORWARD = torch.ops.aten.attn.default
BACKWARD = torch.ops.aten._attn_backward.default


class Kind(NamedTuple):
    """Tensors that are no plain strided ones."""

    make: Callable
    computes: bool  # whether the definition computes with some of them


KINDS = {
    "sparse_coo": Kind(torch.Tensor.to_sparse, True),
    "sparse_csr": Kind(torch.Tensor.to_sparse_csr, True),
    "sparse_csc": Kind(torch.Tensor.to_sparse_csc, True),
    # The products are MKL's.
    "sparse_bsr": Kind(
        lambda x: x.to_sparse_bsr((1, 1)), torch.backends.mkl.is_available()
    ),
    "mkldnn": Kind(torch.Tensor.to_mkldnn, False),
    "quantized": Kind(
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), False
    ),
}


class TestAttnAutograd(AttnTestCase):
    def make(self, device, dtype, case=SMALL):
        """The inputs, each a leaf that requires grad, and the outputs' gradients."""
        inputs, grads = case.make(device, dtype)
        return [x.detach().requires_grad_() for x in inputs], grads

    def assert_same_memory(self, actual, expected):
        """The same tensors in any order, each just as often."""
        addresses = [sorted(x.data_ptr() for x in xs) for xs in (actual, expected)]
        self.assertEqual(*addresses)

    # The derivatives beyond the first gradient. The rule for tolerances needs a higher
    # precision to compare with: in double only gradcheck is used.

    @by_case
    @dtypes(torch.float, torch.cfloat)
    def test_double_backward(self, device, dtype, case):
        inputs, grads = case.make(device, dtype)
        self.assert_agrees(double_backward, case, inputs, grads, like(inputs))

    # attn has no gradient for v.
    @parametrize("wanted,used", [x for x in GRADIENTS if x.name != "v_of_attn"])
    @by_small_case
    @dtypes(torch.float, torch.cfloat)
    def test_double_backward_of_some(self, device, dtype, case, wanted, used):
        inputs, grads = case.make(device, dtype)
        u = like(inputs)
        for given, of_grads in product(subsets(wanted), (True, False)):
            with self.subTest(given=given, of_grads=of_grads):
                compute = partial(
                    second_gradients,
                    wanted=wanted,
                    used=used,
                    given=given,
                    of_grads=of_grads,
                )
                self.assert_agrees(compute, case, inputs, grads, u)

    @by_case
    @dtypes(torch.float, torch.cfloat)
    def test_third_derivatives(self, device, dtype, case):
        inputs, grads = case.make(device, dtype)
        w = like([*inputs, *grads])
        self.assert_agrees(third_gradients, case, inputs, grads, like(inputs), w)

    @parametrize("transform", TRANSFORMS)
    @by_case
    @dtypes(torch.float, torch.cfloat)
    def test_transforms(self, device, dtype, case, transform):
        # All have one layout: for an expanded primal, no forward AD takes a dense tangent.
        (x, g), (u, h), (w, _) = (case.make(device, dtype) for _ in range(3))
        self.assert_agrees(TRANSFORMS[transform], case, x, g, u, w, h)

    @parametrize("along", subsets(INPUTS), name_fn="".join)
    @by_small_case
    @dtypes(torch.float, torch.cfloat)
    def test_tangents_of_some(self, device, dtype, case, along):
        inputs, _ = case.make(device, dtype)

        def compute(op, inputs, u):
            u = [x if name in along else None for name, x in zip(INPUTS, u)]
            return tangents(op, inputs, u)

        self.assert_agrees(compute, case, inputs, like(inputs))

    def test_no_tangent(self, device):
        (q, k, v), _ = SMALL.make(device, torch.double)
        with forward_ad.dual_level():
            output, attn = torch.attn(q, k, forward_ad.make_dual(v, torch.ones_like(v)))
            self.assertIsNotNone(forward_ad.unpack_dual(output).tangent)
            # A tangent of zeros may be given, but none may be computed.
            tangent = forward_ad.unpack_dual(attn).tangent
            self.assertTrue(tangent is None or tangent._is_zerotensor())

    @parametrize("wanted,used", GRADIENTS)
    @dtypes(torch.float, torch.cfloat)
    def test_forward_over_reverse_of_some(self, device, dtype, wanted, used):
        inputs, grads = SMALL_BATCH.make(device, dtype)
        u = like([*inputs, *grads])
        for with_grads in subsets(used) + [()]:
            with self.subTest(with_grads=with_grads):
                compute = partial(
                    tangents_of_gradients, along=wanted + with_grads, used=used
                )
                self.assert_agrees(compute, SMALL_BATCH, inputs, grads, u)

    @by_small_case
    @dtypes(torch.double, torch.cdouble)
    def test_gradcheck_of_both(self, device, dtype, case):
        inputs, _ = self.make(device, dtype, case)
        self.assertTrue(
            gradcheck(
                outputs_of(torch.attn),
                inputs,
                check_forward_ad=True,
                check_backward_ad=True,
                check_batched_grad=True,
                check_batched_forward_grad=True,
            )
        )
        self.assertTrue(
            gradgradcheck(
                outputs_of(torch.attn),
                inputs,
                check_batched_grad=True,
                check_fwd_over_rev=True,
            )
        )

    @parametrize("derivative", (pullback, pushforward), name_fn=lambda f: f.__name__)
    @dtypes(torch.double, torch.cdouble)
    def test_gradcheck_of_derivative(self, device, dtype, derivative):
        inputs, grads = self.make(device, dtype, Case("tiny", 2, 1, 2, 1))
        more = grads if derivative is pullback else like(inputs)
        given = [*inputs, *(x.requires_grad_() for x in more)]
        op = derivative(torch.attn)
        # gradcheck's own forward AD has one level only.
        forward = derivative is pullback
        self.assertTrue(gradcheck(op, given, check_forward_ad=forward))
        self.assertTrue(gradgradcheck(op, given, check_fwd_over_rev=forward))

    # The following look at the graph that autograd records.

    @by_small_case
    def test_nodes(self, device, case):
        inputs, grads = self.make(device, torch.double, case)
        result = torch.attn(*inputs)
        self.assertIs(result.output.grad_fn, result.attn.grad_fn)
        self.assertEqual(nodes(*result), {"AttnBackward0", "AccumulateGrad"})

        with Record() as record:
            found = torch.autograd.grad(result, inputs, grads, retain_graph=True)
        self.assertEqual(record.calls, [BACKWARD])
        for x in found:
            self.assertFalse(x.requires_grad)

        with Record() as record:
            found = torch.autograd.grad(result, inputs, grads, create_graph=True)
        self.assertEqual(record.calls, [BACKWARD])
        for x in found:
            self.assertEqual(x.grad_fn.name(), "AttnBackwardBackward0")
        self.assertEqual(
            nodes(*found), {"AttnBackwardBackward0", "AttnBackward0", "AccumulateGrad"}
        )

        # In the second derivative only the way through attn is a node of its own.
        with Record() as record:
            torch.autograd.grad(found, inputs, like(found))
        self.assertEqual(record.calls.count(BACKWARD), 1)
        self.assertNotIn(FORWARD, record.calls)

    @parametrize("wanted", WANTED, name_fn="".join)
    def test_saved_tensors(self, device, wanted):
        inputs, grads = SMALL.make(device, torch.double)
        leaves = [x.requires_grad_(i in wanted) for i, x in zip(INPUTS, inputs)]
        packed, unpacked = [], []

        def pack(x):
            packed.append(x)
            return len(packed) - 1

        def unpack(index):
            unpacked.append(index)
            return packed[index]

        with saved_tensors_hooks(pack, unpack):
            result = torch.attn(*leaves)
        self.assert_same_memory(packed, [*leaves, result.attn])
        self.assertEqual(unpacked, [])
        output, grad = result.output, grads[0]
        wanted = [x for x in leaves if x.requires_grad]
        found = torch.autograd.grad(output, wanted, grad, retain_graph=True)
        self.assertEqual(sorted(unpacked), [0, 1, 2, 3])
        expected = torch.autograd.grad(torch.attn(*leaves).output, wanted, grad)
        self.assertEqual(found, expected, rtol=0, atol=0)

    def test_nothing_saved_without_grad(self, device):
        inputs, _ = self.make(device, torch.double)
        packed = []
        with saved_tensors_hooks(packed.append, lambda x: x), torch.no_grad():
            torch.attn(*inputs)
        self.assertEqual(packed, [])

    def test_backward_saves_nothing_unless_needed(self, device):
        inputs, grads = self.make(device, torch.double)
        packed = []

        def pack(x):
            packed.append(x)
            return x

        result = torch.attn(*inputs)
        with saved_tensors_hooks(pack, lambda x: x):
            torch.autograd.grad(result, inputs, grads, retain_graph=True)
            self.assertEqual(packed, [])
            torch.autograd.grad(result, inputs, grads, create_graph=True)
        self.assert_same_memory(packed, [*grads, *inputs, result.attn])

    @by_small_case
    @dtypes(torch.double, torch.cdouble)
    def test_save_on_cpu(self, device, dtype, case):
        inputs, grads = self.make(device, dtype, case)
        u = like(inputs)
        expected = double_backward(torch.attn, inputs, grads, u)
        with save_on_cpu():
            actual = double_backward(torch.attn, inputs, grads, u)
        self.assertEqual(actual, expected, rtol=0, atol=0)

    @parametrize("use_reentrant", (False, True))
    @by_small_case
    def test_checkpoint(self, device, case, use_reentrant):
        inputs, grads = self.make(device, torch.double, case)

        def op(*inputs):
            return tuple(torch.attn(*inputs))

        expected = torch.autograd.grad(op(*inputs), inputs, grads)
        with Record() as record:
            result = checkpoint(op, *inputs, use_reentrant=use_reentrant)
            torch.autograd.backward(result, grads)
        self.assertEqual(record.calls.count(FORWARD), 2)
        self.assertEqual([x.grad for x in inputs], expected, rtol=0, atol=0)

    def test_double_backward_of_checkpoint(self, device):
        inputs, grads = SMALL.make(device, torch.double)
        u = like(inputs)

        def op(*inputs):
            return checkpoint(outputs_of(torch.attn), *inputs, use_reentrant=False)

        expected = double_backward(torch.attn, inputs, grads, u)
        actual = double_backward(op, inputs, grads, u)
        self.assertEqual(actual, expected, rtol=0, atol=0)

    @parametrize("order", (1, 2))
    def test_anomaly(self, device, order):
        inputs, grads = self.make(device, torch.double)
        node = "Attn" + order * "Backward" + "0"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.autograd.detect_anomaly():
                found = torch.attn(*inputs)
                for _ in range(order - 1):
                    found = torch.autograd.grad(found, inputs, grads, create_graph=True)
                with self.assertRaisesRegex(
                    RuntimeError, f"Function '{node}' returned nan values"
                ):
                    # Differences of infinities make the first NaN.
                    torch.autograd.grad(
                        found, inputs, [torch.full_like(x, torch.inf) for x in found]
                    )
        blamed = [str(x.message) for x in caught if "Error detected" in str(x.message)]
        self.assertEqual(len(blamed), 1)
        self.assertIn(f"Error detected in {node}.", blamed[0])
        # It says where the forward was called. The forward of the second order runs in the
        # backward of the first, which a GPU has in a thread that has no lines of Python.
        if order == 1 or torch.device(device).type == "cpu":
            self.assertIn("test_attn_autograd.py", blamed[0])

    def test_retain_graph(self, device):
        inputs, grads = self.make(device, torch.double)
        result = torch.attn(*inputs)
        first, second, third = (
            torch.autograd.grad(result, inputs, grads, retain_graph=retain)
            for retain in (True, True, False)
        )
        self.assertEqual(second, first, rtol=0, atol=0)
        self.assertEqual(third, first, rtol=0, atol=0)
        for access in (
            lambda: torch.autograd.grad(result, inputs, grads),
            lambda: result.output.grad_fn._saved_attn,
        ):
            with self.assertRaisesRegex(
                RuntimeError, "backward through the graph a sec"
            ):
                access()

    @parametrize("name", (*INPUTS, "attn"))
    @parametrize("order", (1, 2))
    def test_modified(self, device, name, order):
        leaves, grads = self.make(device, torch.double)
        inputs = [x.clone() for x in leaves]
        result = torch.attn(*inputs)
        found = list(result)
        for _ in range(order - 1):
            found = torch.autograd.grad(found, inputs, grads, create_graph=True)
        named = dict(zip((*INPUTS, *OUTPUTS), (*inputs, *result)))
        named[name].mul_(2)
        # Autograd knows the output's number only if its node returned that tensor itself.
        culprit = f"output {2 - order} of Attn" if name == "attn" else "output 0 of Mul"
        with self.assertRaisesRegex(
            RuntimeError, f"modified by an inplace operation: .* which is {culprit}"
        ):
            torch.autograd.grad(found, leaves, like(found))

    def test_modified_output(self, device):
        inputs, grads = self.make(device, torch.double)
        expected = torch.autograd.grad(torch.attn(*inputs).output, inputs, 3 * grads[0])
        output = torch.attn(*inputs).output
        output.mul_(3)
        actual = torch.autograd.grad(output, inputs, grads[0])
        self.assertEqual(actual, expected, rtol=0, atol=0)

    def test_hooks(self, device):
        inputs, grads = self.make(device, torch.double)
        expected = torch.autograd.grad(
            torch.attn(*inputs), inputs, [grads[0], 5 * grads[1]]
        )
        seen = []
        for name, x in zip(INPUTS, inputs):
            x.register_hook(lambda grad, name=name: seen.append(name))
            x.register_post_accumulate_grad_hook(lambda x: seen.append(x))
        result = torch.attn(*inputs)
        result.attn.register_hook(lambda grad: 5 * grad)
        for x in result:
            x.retain_grad()
        result.output.grad_fn.register_prehook(lambda grads: seen.append("before"))
        result.output.grad_fn.register_hook(lambda *_: seen.append("after"))
        torch.autograd.backward(result, grads)
        self.assertEqual([x.grad for x in inputs], expected, rtol=0, atol=0)
        self.assertEqual(result.output.grad, grads[0])
        self.assertEqual(result.attn.grad, 5 * grads[1])
        self.assertEqual(seen[:2], ["before", "after"])
        # Each input comes as its name, then itself.
        rest = seen[2:]
        self.assertEqual(sorted(rest[::2]), sorted(INPUTS))
        for name, x in zip(rest[::2], rest[1::2]):
            self.assertIs(x, inputs[INPUTS.index(name)])

    def test_accumulation(self, device):
        inputs, grads = self.make(device, torch.double)
        once = torch.autograd.grad(torch.attn(*inputs), inputs, grads)
        for _ in range(2):
            torch.autograd.backward(torch.attn(*inputs), grads)
        for x, grad in zip(inputs, once):
            self.assertEqual(x.grad, 2 * grad, rtol=0, atol=0)

    @dtypes(torch.float, torch.cfloat)
    def test_one_tensor_as_all(self, device, dtype):
        case = Case("one_tensor", 4, 4, 4, 4)
        (x, *_), grads = case.make(device, dtype)

        def compute(op, inputs, grads):
            x = inputs[0].detach().requires_grad_()
            return torch.autograd.grad(op(x, x, x), x, grads)

        self.assert_agrees(compute, case, [x], grads)

    @by_small_case
    @dtypes(torch.float, torch.cfloat)
    def test_views(self, device, dtype, case):
        inputs, grads = case.make(device, dtype)
        sizes = [x.shape for x in inputs]

        def compute(op, packed, grads):
            # q, k and v are views of one buffer, as those that one linear layer makes.
            leaf = packed[0].detach().requires_grad_()
            parts = leaf.split([size.numel() for size in sizes])
            views = [x.view(size) for x, size in zip(parts, sizes)]
            return torch.autograd.grad(op(*views), leaf, grads)

        buffer = torch.cat([x.flatten() for x in inputs])
        self.assert_agrees(compute, case, [buffer], grads)

    @parametrize("vectorize", (False, True))
    @dtypes(torch.float)
    def test_hessian(self, device, dtype, vectorize):
        inputs, grads = SMALL_BATCH.make(device, dtype)

        def compute(op, inputs, grads):
            def loss(*inputs):
                return sum((x * grad).sum() for x, grad in zip(op(*inputs), grads))

            blocks = torch.autograd.functional.hessian(
                loss, tuple(inputs), vectorize=vectorize
            )
            return [block for row in blocks for block in row]

        self.assert_agrees(compute, SMALL_BATCH, inputs, grads)

    @parametrize(
        "strategy,vectorize",
        [("reverse-mode", False), ("reverse-mode", True), ("forward-mode", True)],
    )
    @dtypes(torch.float)
    def test_jacobian(self, device, dtype, strategy, vectorize):
        inputs, _ = SMALL_BATCH.make(device, dtype)

        def compute(op, inputs):
            blocks = torch.autograd.functional.jacobian(
                outputs_of(op), tuple(inputs), vectorize=vectorize, strategy=strategy
            )
            return [block for row in blocks for block in row]

        self.assert_agrees(compute, SMALL_BATCH, inputs)

    @by_small_or_empty_case
    def test_backward_of_unsupported_dtypes(self, device, case):
        inputs, grads = case.make("meta", torch.float)
        sizes = [x.shape for x in (*inputs, *grads, grads[1])]
        for dtype, where, mode, message in unsupported(device):
            with self.subTest(dtype=dtype, device=where, mode=mode), mode:
                q, k, v, grad_output, grad_attn, attn = (
                    torch.empty(size, dtype=dtype, device=where) for size in sizes
                )
                for given in product((grad_output, None), (grad_attn, None)):
                    with self.assertRaisesRegex(RuntimeError, message):
                        torch.ops.aten._attn_backward(
                            *given, q, k, v, attn, (True,) * 3
                        )

    def assert_backward_refuses(self, arguments, message):
        for mask in product((True, False), repeat=3):
            with self.assertRaisesRegex(RuntimeError, f"^{message}"):
                torch.ops.aten._attn_backward(*arguments.values(), mask)

    # Each kernel is called, and what stands for one where there are no values.
    @by_case_in((SMALL, SMALL._replace(name="batch", batch=(3,))))
    @parametrize("where", ("device", "meta", "fake"))
    @dtypes(torch.float, torch.cfloat)
    def test_backward_of_wrong_arguments(self, device, dtype, where, case):
        place = "meta" if where == "meta" else device
        with FakeTensorMode() if where == "fake" else nullcontext():
            (q, k, v), (grad_output, grad_attn) = case.make(place, dtype)
            right = {
                "grad_output": grad_output,
                "grad_attn": grad_attn,
                **{"q": q, "k": k, "v": v},
                "attn": torch.zeros_like(grad_attn),
            }
            for name, kind in product(("grad_output", "grad_attn", "attn"), WRONG):
                x, wrong = right[name], WRONG[kind](right[name])
                if kind == "on_meta" and where != "device":
                    continue
                must = f"_attn_backward: {name} must be {described(x)}"
                message = f"{must}, but got {described(wrong)}$"
                with self.subTest(argument=name, kind=kind):
                    self.assert_backward_refuses(right | {name: wrong}, message)
            for kind, (name, wrong, message) in REFUSED.items():
                with self.subTest(argument=name, kind=kind):
                    self.assert_backward_refuses(
                        right | {name: wrong(right[name])}, re.escape(message)
                    )

    def test_deterministic(self, device):
        case = Case("deterministic", 65, 33, 128, 70, batch=(3,))
        inputs, grads = case.make(device, torch.float)
        u = like(inputs)
        before = torch.are_deterministic_algorithms_enabled()
        try:
            torch.use_deterministic_algorithms(True)
            first, second = (
                [
                    *evaluate(torch.attn, inputs, grads),
                    *double_backward(torch.attn, inputs, grads, u),
                ]
                for _ in range(2)
            )
        finally:
            torch.use_deterministic_algorithms(before)
        self.assertEqual(second, first, rtol=0, atol=0)

    def test_threads(self, device):
        inputs, grads = self.make(device, torch.double)
        # One graph, of which each thread runs a backward.
        result = torch.attn(*inputs)
        expected = torch.autograd.grad(result, inputs, grads, retain_graph=True)
        found = []

        def run():
            for _ in range(20):
                found.append(
                    torch.autograd.grad(result, inputs, grads, retain_graph=True)
                )

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(found), 80)
        for grads in found:
            self.assertEqual(grads, expected, rtol=0, atol=0)

    # The following pass other kinds of tensors.

    @by_small_case
    @dtypes(torch.double, torch.cdouble)
    def test_dispatch_mode(self, device, dtype, case):
        inputs, grads = self.make(device, dtype, case)
        with Record() as record:
            result = torch.attn(*inputs)
            torch.autograd.backward(result, grads)
        self.assertEqual(record.calls, [FORWARD, BACKWARD])

    @parametrize("wrapped", subsets(INPUTS), name_fn="".join)
    @by_small_case
    @dtypes(torch.double, torch.cdouble)
    def test_subclass(self, device, dtype, case, wrapped):
        inputs, grads = self.make(device, dtype, case)
        result = torch.attn(*inputs)
        expected = (*result, *torch.autograd.grad(result, inputs, grads))

        leaves = [
            Wrapper(x).requires_grad_() if name in wrapped else x
            for name, x in zip(INPUTS, inputs)
        ]
        Wrapper.calls.clear()
        result = torch.attn(*leaves)
        grads = [Wrapper(x) for x in grads]
        actual = (*result, *torch.autograd.grad(result, leaves, grads))
        self.assertEqual(Wrapper.calls, [FORWARD, BACKWARD])
        for x, y in zip(actual, expected):
            self.assertIsInstance(x, Wrapper)
            self.assertEqual(x.inner, y, rtol=0, atol=0)

    @parametrize("layout", (torch.strided, torch.jagged))
    @parametrize("nested", subsets(INPUTS), name_fn="".join)
    @parametrize("requires_grad", (False, True))
    def test_nested(self, device, layout, nested, requires_grad):
        inputs, _ = SMALL_BATCH.make(device, torch.double)
        inputs = [
            torch.nested.nested_tensor(list(x), layout=layout) if name in nested else x
            for name, x in zip(INPUTS, inputs)
        ]
        for x in inputs:
            x.requires_grad_(requires_grad)
        # The message is that of any operator without a kernel for them.
        if layout == torch.strided:
            message = "Could not run 'aten::attn' .* 'NestedTensor"
        else:
            message = "aten.attn.default"
        with self.assertRaisesRegex(NotImplementedError, message):
            torch.attn(*inputs)

    @onlyCPU
    @parametrize("kind", KINDS)
    @parametrize("converted", subsets(INPUTS), name_fn="".join)
    def test_other_layout(self, device, kind, converted):
        """Where the definition computes so does attn, and to the same."""
        make, computes = KINDS[kind]
        inputs, grads = SMALL.make(device, torch.float)

        def compute(op, wanted, used):
            leaves = [
                (make(x) if name in converted else x).detach()
                for name, x in zip(INPUTS, inputs)
            ]
            for name, x in zip(INPUTS, leaves):
                # A quantized tensor cannot require grad.
                x.requires_grad_(name in wanted and x.is_floating_point())
            results = dict(zip(OUTPUTS, op(*leaves)))
            pairs = [
                (results[name], grad)
                for name, grad in zip(OUTPUTS, grads)
                if name in used and results[name].requires_grad
            ]
            if pairs:
                torch.autograd.backward(*zip(*pairs))
            return [
                None if x is None else x.to_dense() if x.layout != torch.strided else x
                for x in (*results.values(), *(x.grad for x in leaves))
            ]

        computed = False
        for wanted, used in (((), ()), *product(WANTED, subsets(OUTPUTS))):
            with self.subTest(wanted=wanted, used=used):
                try:
                    expected = compute(attn_composed, wanted, used)
                except RuntimeError:
                    with self.assertRaises(RuntimeError):
                        compute(torch.attn, wanted, used)
                else:
                    computed = True
                    self.assertEqual(compute(torch.attn, wanted, used), expected)
        if len(converted) == 1 and converted != ("v",):
            self.assertEqual(computed, computes)


instantiate_device_type_tests(TestAttnAutograd, globals())

if __name__ == "__main__":
    run_tests()
