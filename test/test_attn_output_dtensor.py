# Owner(s): ["oncall: distributed"]

"""attn_output of DTensors: where its results are, and what they are."""

from itertools import product
from typing import NamedTuple

from attn_function import INPUTS
from test_attn_dtensor import AttnProcesses, place, ShardingTestCase, summed
from test_attn_output import composed
from test_attn_output_second_order import GIVEN
from test_attn_output_triple_backward import GIVEN as THIRD_ORDER_GIVEN, NAMES

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


class Layout(NamedTuple):
    """Where the output and the gradients are for inputs placed so.

    The gradient of the output is where the output is, replicated where that is Partial. The
    letters are those of test_attn_dtensor.
    """

    name: str
    inputs: str  # q, k, v
    output: str
    grads: str  # of q, k, v
    is_causal: bool = False
    forward: int = 0
    batch: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()


LAYOUTS = (
    Layout("replicated", "R R R", "R", "R R R"),
    Layout("rows", "r R R", "r", "r P P"),
    Layout("keys", "R r r", "P", "P r r"),
    Layout("columns_of_v", "R R c", "c", "P P c"),
    Layout("partial_v", "R R P", "P", "P P R"),
    Layout("average_v", "R R A", "A", "A A R"),
    Layout("causal_columns_of_v", "R R c", "c", "P P c", True),
    # Which elements are masked depends on their rows and columns in the whole matrix, so
    # tensors that are sharded by rows are gathered first.
    Layout("causal_rows", "r R R", "R", "R R R", True, forward=1),
    Layout("causal_keys", "R r r", "R", "R R R", True, forward=2),
    Layout("batch", "b b b", "b", "b b b", True, batch=(4,), shared=(4,)),
    Layout("samples_that_share", "b R R", "b", "b P P", True, batch=(4,), shared=(1,)),
    Layout("groups", "b b b", "b", "b b b", True, batch=(4, 2), shared=(4, 1)),
)


def make(layout):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*batch, *size, dtype=torch.double, generator=generator)
        for batch, size in (
            (layout.batch, (8, 8)),
            (layout.shared, (8, 8)),
            (layout.shared, (8, 8)),
            (layout.batch, (8, 8)),
        )
    ]


def step(layout, mesh):
    """The placed inputs, the output and the gradients; the number of communications."""
    *inputs, grad_output = make(layout)
    letters = layout.inputs.split()
    leaves = [place(x, mesh, y).requires_grad_() for x, y in zip(inputs, letters)]
    with CommDebugMode() as forward:
        output = torch.attn_output(*leaves, is_causal=layout.is_causal)
    where = layout.output.replace("P", "R").replace("A", "R")
    grads = torch.autograd.grad(output, leaves, place(grad_output, mesh, where))
    return output, grads, forward.get_total_counts()


def second_order(layout, mesh):
    """The second derivatives, where each input is its own tangent; the same without DTensor; the
    number of communications.
    """
    *inputs, grad_output = make(layout)
    options = layout.is_causal, 1.0, [True] * 4
    double_backward = torch.ops.aten._attn_output_double_backward
    plain = double_backward(grad_output, *inputs, *inputs, *options)
    placed = [place(x, mesh, y) for x, y in zip(inputs, layout.inputs.split())]
    grad = place(grad_output, mesh, layout.output.replace("P", "R").replace("A", "R"))
    with CommDebugMode() as counted:
        found = double_backward(grad, *placed, *placed, *options)
    tangent = torch.ops.aten._attn_output_jvp(*placed, *placed, *options[:2])
    return [tangent, *found], [plain[0], *plain], counted.get_total_counts()


def third_order(layout, mesh):
    """The same of the third order, where each input is also both of its tangents."""
    *inputs, grad_output = make(layout)
    options = layout.is_causal, 1.0, [True] * 4
    triple_backward = torch.ops.aten._attn_output_triple_backward

    def run(grad_output, inputs):
        both = grad_output, *inputs
        return triple_backward(*both, *inputs, *both, *options)

    placed = [place(x, mesh, y) for x, y in zip(inputs, layout.inputs.split())]
    grad = place(grad_output, mesh, layout.output.replace("P", "R").replace("A", "R"))
    with CommDebugMode() as counted:
        found = run(grad, placed)
    return found, run(grad_output, inputs), counted.get_total_counts()


class TestAttnOutputSharding(ShardingTestCase):
    @parametrize("layout", LAYOUTS, name_fn=lambda layout: layout.name)
    def test_layout(self, layout):
        output, grads, communications = step(layout, self.mesh())
        self.assert_placed([output], layout.output)
        if layout.forward == 0:
            self.assert_placed(grads, layout.grads)
        self.assertEqual(communications, layout.forward)

    @parametrize("layout", LAYOUTS, name_fn=lambda layout: layout.name)
    def test_second_order(self, layout):
        (_, *found), _, communications = second_order(layout, self.mesh())
        self.assert_placed(found, f"{layout.output} {layout.grads}")
        # A tensor that is gathered has a tangent, which is gathered too.
        self.assertEqual(communications, 2 * layout.forward)

    @parametrize("layout", LAYOUTS, name_fn=lambda layout: layout.name)
    def test_third_order(self, layout):
        found, _, communications = third_order(layout, self.mesh())
        self.assert_placed(found, f"{layout.output} {layout.grads}")
        self.assertEqual(communications, 3 * layout.forward)

    @parametrize("given", THIRD_ORDER_GIVEN, name_fn="_".join)
    def test_third_order_of_some(self, given):
        mesh = self.mesh()
        *inputs, grad = make(LAYOUTS[0])
        every = grad, *inputs, *inputs, grad, *inputs
        there = [name in (*given, *INPUTS) for name in NAMES]
        plain = [x if is_there else None for x, is_there in zip(every, there)]
        placed = [None if x is None else place(x, mesh, "R") for x in plain]
        triple_backward = torch.ops.aten._attn_output_triple_backward
        for mask in product((False, True), repeat=4):
            expected = triple_backward(*plain, False, 1.0, mask)
            found = triple_backward(*placed, False, 1.0, mask)
            found = [None if x is None else x.full_tensor() for x in found]
            self.assertEqual(found, list(expected))

    @parametrize("given", GIVEN, name_fn="".join)
    def test_second_order_of_some(self, given):
        """Some tangents are missing: the results are those without DTensor."""
        mesh = self.mesh()
        *inputs, grad = make(LAYOUTS[0])
        placed = [place(x, mesh, "R") for x in (grad, *inputs)]
        double_backward = torch.ops.aten._attn_output_double_backward
        tangents = zip(INPUTS, inputs, placed[1:])
        plain, there = zip(
            *((x, y) if name in given else (None, None) for name, x, y in tangents)
        )
        # All calls have the same placements: only the cache of strategies tells them apart.
        for mask in product((False, True), repeat=4):
            expected = double_backward(grad, *inputs, *plain, False, 1.0, mask)
            found = double_backward(*placed, *there, False, 1.0, mask)
            found = [None if x is None else x.full_tensor() for x in found]
            self.assertEqual(found, list(expected))


instantiate_parametrized_tests(TestAttnOutputSharding)


class TestAttnOutputProcesses(AttnProcesses):
    world_size = 2

    def test_values_and_gradients(self):
        with self.processes():
            mesh = init_device_mesh("cpu", (2,))
            for layout in LAYOUTS:
                with self.case(layout.name):
                    if "A" in layout.inputs:
                        continue  # PyTorch 2.6 has no average by gloo
                    *inputs, grad_output = make(layout)
                    leaves = [x.requires_grad_() for x in inputs]
                    plain = composed(*leaves, is_causal=layout.is_causal)
                    expected = torch.autograd.grad(plain, leaves, grad_output)
                    output, grads, _ = step(layout, mesh)
                    for x, y in zip((output, *grads), (plain, *expected)):
                        self.assertEqual(summed(x).full_tensor(), y)
                    for derivatives in (second_order, third_order):
                        found, expected, _ = derivatives(layout, mesh)
                        for x, y in zip(found, expected):
                            self.assertEqual(summed(x).full_tensor(), y)


if __name__ == "__main__":
    run_tests()
