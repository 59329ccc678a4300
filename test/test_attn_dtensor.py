# Owner(s): ["oncall: distributed"]

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, product
from typing import NamedTuple

from attn_function import double_backward, gradients, INPUTS, OUTPUTS
from test_attn import attn_composed, rule

import torch
import torch.distributed as dist


if not dist.is_available():
    print("torch.distributed is not available, skipping tests", file=sys.stderr)
    sys.exit(0)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.distributed.fake_pg import FakeStore


# A tensor's placements are written as one letter for each dimension of the mesh:
# Replicate, Partial, Average, and Shard of the first batch dimension, the rows or the
# columns.
# "rR Rr Rr", say, are those of q, k and v on a mesh of two dimensions.
NONE = "-"  # no gradient
# What each rank of a mesh dimension has of a Partial tensor: in all, the tensor. Of an
# average it has as many times that as there are ranks.
PARTS = {2: (2, -1), 4: (2, -1, 0.5, -0.5)}


def placements(letters: str, ndim: int) -> list[Placement]:
    kinds = dict(
        R=Replicate(),
        P=Partial(),
        A=Partial("avg"),
        b=Shard(0),
        r=Shard(ndim - 2),
        c=Shard(ndim - 1),
    )
    return [kinds[letter] for letter in letters]


def place(x: torch.Tensor, mesh: DeviceMesh, letters: str) -> DTensor:
    """``x``, which every rank has, as a DTensor with these placements."""
    wanted = placements(letters, x.ndim)
    # redistribute() does not make a tensor Partial.
    whole = [Replicate() if p.is_partial() else p for p in wanted]
    local = DTensor.from_local(x, mesh, run_check=False).redistribute(mesh, whole)
    local = local.to_local()
    for dim, placement in enumerate(wanted):
        if placement.is_partial():
            local = local * PARTS[mesh.size(dim)][mesh.get_local_rank(dim)]
            local = local * (mesh.size(dim) if letters[dim] == "A" else 1)
    return DTensor.from_local(
        local, mesh, wanted, run_check=False, shape=x.shape, stride=x.stride()
    )


def part(x: torch.Tensor, like: DTensor) -> torch.Tensor:
    """What this rank has of ``x`` if it is placed like ``like``, which is not Partial."""
    whole = DTensor.from_local(x, like.device_mesh, run_check=False)
    return whole.redistribute(placements=like.placements).to_local()


def summed(x: DTensor) -> DTensor:
    """Without an average of gloo, which PyTorch 2.6 does not have."""
    mesh, local, kinds = x.device_mesh, x.to_local(), list(x.placements)
    for dim, placement in enumerate(kinds):
        if placement == Partial("avg"):
            local, kinds[dim] = local / mesh.size(dim), Partial()
    x = DTensor.from_local(
        local, mesh, kinds, run_check=False, shape=x.shape, stride=x.stride()
    )
    return x.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in kinds]
    )


class Sizes(NamedTuple):
    """q (*batch, m, d), k (*batch, n, d), v (*batch, n, e)."""

    m: int = 8
    d: int = 8
    n: int = 8
    e: int = 8
    batch: tuple[int, ...] = ()

    def make(self, dtype: torch.dtype = torch.double) -> tuple[list, list]:
        """The inputs and a gradient for each of the outputs, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        m, d, n, e, batch = self
        tensors = [
            torch.randn(*batch, *size, dtype=dtype, generator=generator)
            for size in ((m, d), (n, d), (n, e), (m, e), (m, n))
        ]
        return tensors[:3], tensors[3:]


class Layout(NamedTuple):
    """Where the results are for inputs that are placed so.

    The gradients of the outputs are where the outputs are, replicated where these are
    Partial, unless ``given`` says otherwise; ``used`` has those that there are. Each communication is counted.
    """

    name: str
    inputs: str  # q, k, v
    outputs: str  # output, attn
    grads: str  # of q, k, v
    forward: int = 0
    backward: int = 0
    used: tuple[str, ...] = OUTPUTS
    given: str = ""


LAYOUTS = (
    Layout("replicated", "R R R", "R R", "R R R"),
    Layout("rows", "r R R", "r r", "r P P"),
    Layout("keys", "R r r", "P c", "P r r"),
    Layout("keys_of_k", "R r R", "P c", "P r r"),
    Layout("columns_of_v", "R R c", "c R", "P P c"),
    Layout("partial_v", "R R P", "P R", "P P R"),
    Layout("average_v", "R R A", "A R", "A A R"),
    Layout("average_v_output", "R R A", "A R", "A A R", used=("output",)),
    Layout("average_v_attn", "R R A", "A R", "R R -", used=("attn",)),
    Layout("average_grads", "R R R", "R R", "A A A", given="A A"),
    Layout("average_grad_output", "R R R", "R R", "A A A", given="A R"),
    Layout("average_grad_attn", "R R R", "R R", "A A R", given="R A"),
    Layout("average_v_grad_attn", "R R A", "A R", "A A R", given="R A"),
    # A sum and an average are not added.
    Layout("sum_and_average_grads", "R R R", "R R", "A A R", backward=1, given="P A"),
    Layout("batch", "b b b", "b b", "b b b"),
    Layout("batch_of_q", "b R R", "b b", "b b b"),
    # q and k are gathered for the forward, but not for the backward.
    Layout("features", "c c R", "R R", "c c R", forward=2),
    # v is not read without a gradient of output.
    Layout("columns_of_v_attn", "R R c", "c R", "R R -", used=("attn",)),
    Layout("partial_v_attn", "R R P", "P R", "R R -", used=("attn",)),
    Layout("columns_of_v_output", "R R c", "c R", "P P c", used=("output",)),
    Layout("rows_output", "r R R", "r r", "r P P", used=("output",)),
    Layout("rows_attn", "r R R", "r r", "r P -", used=("attn",)),
    Layout("keys_attn", "R r r", "P c", "P r -", used=("attn",)),
    # Two mesh dimensions
    Layout("replicated_2d", "RR RR RR", "RR RR", "RR RR RR"),
    Layout("rows_2d", "rr RR RR", "rr rr", "rr PP PP"),
    Layout("rows_and_keys", "rR Rr Rr", "rP rc", "rP Pr Pr"),
    Layout("rows_and_columns_of_v", "rR RR Rc", "rc rR", "rP PP Pc"),
    Layout("keys_and_columns_of_v", "RR rR rc", "Pc cR", "PP rP rc"),
    Layout("average_and_partial_v", "RR RR AP", "AP RR", "AP AP RR"),
    Layout("rows_and_average_v", "rR RR RA", "rA rR", "rA PA PR"),
    Layout("batch_and_rows", "br bR bR", "br br", "br bP bP"),
    Layout("batch_and_keys", "bR br br", "bP bc", "bP br br"),
    Layout("batch_and_columns_of_v", "bR bR bc", "bc bR", "bP bP bc"),
)

WANTED = ("q", "k", "v", "qk", "qv", "kv", "qkv")
USED = (OUTPUTS, ("output",), ("attn",))


class ShardingTestCase(TestCase):
    """For what needs no values: four ranks, of which only this one runs."""

    world_size = 4

    def setUp(self):
        super().setUp()
        dist.init_process_group(
            "fake", rank=0, world_size=self.world_size, store=FakeStore()
        )

    def tearDown(self):
        dist.destroy_process_group()
        super().tearDown()

    def mesh(self, ndim: int = 1) -> DeviceMesh:
        return init_device_mesh("cpu", (4,) if ndim == 1 else (2, 2))

    def assert_placed(self, tensors, expected: str):
        found = [None if x is None else list(x.placements) for x in tensors]
        wanted = [
            None if letters == NONE else placements(letters, x.ndim)
            for letters, x in zip(expected.split(), tensors)
        ]
        self.assertEqual(found, wanted)


def said(error):
    """An error's message, and that of its cause: in PyTorch 2.9 DTensor tells no more than that
    an operator cannot be sharded.
    """
    return f"{error} {error.__cause__}"


class OtherPartial(Partial):
    """Equal to a sum, but may be more: an embedding's has a mask."""


class TestAttnSharding(ShardingTestCase):
    @parametrize("layout", LAYOUTS, name_fn=lambda layout: layout.name)
    def test_layout(self, layout):
        letters = layout.inputs.split()
        mesh = self.mesh(len(letters[0]))
        inputs, grads = Sizes(batch=(4,) if "b" in layout.inputs else ()).make()
        leaves = [place(*x).requires_grad_() for x in zip(inputs, [mesh] * 3, letters)]

        with CommDebugMode() as forward:
            outputs = torch.attn(*leaves)
        self.assert_placed(outputs, layout.outputs)
        self.assertEqual(forward.get_total_counts(), layout.forward)

        placed = [
            place(grad, mesh, letters)
            for grad, letters in zip(
                grads, (layout.given or re.sub("[PA]", "R", layout.outputs)).split()
            )
        ]
        pairs = [x for x in zip(OUTPUTS, outputs, placed) if x[0] in layout.used]
        _, used, given = zip(*pairs)
        with CommDebugMode() as backward:
            found = torch.autograd.grad(used, leaves, given, allow_unused=True)
        self.assert_placed(found, layout.grads)
        self.assertEqual(backward.get_total_counts(), layout.backward)

    def test_gradient_is_none_unless_needed(self):
        mesh = self.mesh()
        tensors, grads = Sizes().make()
        inputs, placed = ([place(x, mesh, "R") for x in xs] for xs in (tensors, grads))
        # All on the same placements: only the cache of strategies tells them apart.
        for wanted, used in product(WANTED, USED):
            with self.subTest(wanted=wanted, used=used):
                actual = gradients(torch.attn, inputs, placed, wanted, used)
                expected = gradients(attn_composed, tensors, grads, wanted, used)
                found = [None if x is None else x.full_tensor() for x in actual]
                self.assertEqual(found, expected)

    @parametrize("reduce_op", ("max", "min", "product"))
    def test_other_reductions_are_no_partial_sums(self, reduce_op):
        mesh = self.mesh()
        q, k, v = (place(x, mesh, "R") for x in Sizes().make()[0])
        v = DTensor.from_local(v.to_local(), mesh, [Partial(reduce_op)])
        with CommDebugMode() as forward:
            torch.attn(q, k, v)
        self.assertEqual(forward.get_total_counts(), 1)

    def test_a_subclass_of_partial_is_no_plain_sum(self):
        mesh = self.mesh()
        # No other test has these sizes: the cache of strategies cannot tell it from a sum.
        q, k, v = (place(x, mesh, "R") for x in Sizes(batch=(5,)).make()[0])
        v = DTensor.from_local(v.to_local(), mesh, [OtherPartial()])
        with CommDebugMode() as forward:
            torch.attn(q, k, v)
        self.assertEqual(forward.get_total_counts(), 1)

    @parametrize(
        "letters", ("r R R", "R r r", "b b b"), name_fn=lambda x: x.replace(" ", "")
    )
    def test_compile(self, letters):
        mesh = self.mesh()
        inputs, grads = Sizes(batch=(4,)).make()
        inputs = [place(x, mesh, y) for x, y in zip(inputs, letters.split())]
        grads = [place(x, mesh, "R") for x in grads]
        compiled = torch.compile(torch.attn, backend="aot_eager", fullgraph=True)
        results = [
            (*op(*inputs), *gradients(op, inputs, grads))
            for op in (torch.attn, compiled)
        ]
        for expected, actual in zip(*results):
            self.assertEqual(actual.placements, expected.placements)
            self.assertEqual(actual.to_local(), expected.to_local())

    def test_meshes_differ(self):
        inputs, _ = Sizes().make()
        meshes, letters = (self.mesh(), self.mesh(2), self.mesh()), ("R", "RR", "R")
        with self.assertRaises((RuntimeError, NotImplementedError)) as caught:
            torch.attn(*map(place, inputs, meshes, letters))
        self.assertRegex(
            said(caught.exception),
            r"aten\.attn\.default.*does not support cross-mesh operation",
        )

    @parametrize("index", range(3), name_fn=INPUTS.__getitem__)
    def test_plain_tensor_among_dtensors(self, index):
        inputs, _ = Sizes().make()
        mixed = [place(x, self.mesh(), "R") for x in inputs]
        mixed[index] = inputs[index]
        with self.assertRaisesRegex(
            RuntimeError, r"aten\.attn\.default:? got mixed torch\.Tensor and DTensor"
        ):
            torch.attn(*mixed)

    def test_sizes_differ(self):
        q, k, v = (place(x, self.mesh(), "r") for x in Sizes().make()[0])
        wrong = place(torch.randn(7, 8).double(), self.mesh(), "r")
        with self.assertRaises(RuntimeError) as caught:
            torch.attn(q, k, wrong)
        self.assertRegex(said(caught.exception), "attn: .*must have the same n, but")


instantiate_parametrized_tests(TestAttnSharding)


class Case(NamedTuple):
    """Inputs, and gradients of the outputs, that are placed so."""

    inputs: str  # q, k, v
    grads: str = "R R"  # of output and attn
    wanted: str = "qkv"
    sizes: Sizes = Sizes(6, 7, 5, 9)
    dtype: torch.dtype = torch.double

    @property
    def name(self) -> str:
        return str(tuple(self))

    @property
    def used(self) -> list[str]:
        return [x for x, grad in zip(OUTPUTS, self.grads.split()) if grad != NONE]


# Not a multiple of 2 or 4, and on 4 ranks some have nothing.
BATCH = Sizes(6, 7, 5, 9, batch=(3,))
TWO_BATCH = Sizes(2, 3, 4, 3, batch=(4, 2))
GRADS = [" ".join(pair) for pair in product("RPrc", repeat=2)]

ONE_DIM = [
    # Every choice of placements, with one of the choices of gradients in turn. There are
    # 15 of these, so that all pairs come.
    *(
        Case(" ".join(letters), grads)
        for letters, grads in zip(product("RPrc", repeat=3), cycle(GRADS[:-1]))
    ),
    *(Case("r R R", grads) for grads in GRADS),
    *(Case("R r r", f"{x} -") for x in "RPrc"),
    *(Case("R R c", f"- {x}") for x in "RPrc"),
    *(Case(x, wanted=wanted) for x in ("r R R", "R r r") for wanted in WANTED),
    # Averages that pass through: gloo of PyTorch 2.6 cannot average.
    *(Case("R R A", grads) for grads in ("R R", "R A", "R -", "- R", "- A")),
    *(Case("R R R", grads) for grads in ("A R", "R A", "A A", "P A", "A -", "- A")),
    Case("R R A", "R R", sizes=BATCH),
    *(Case(" ".join(x), "b R", sizes=BATCH) for x in product("Rbr", repeat=3)),
    Case("b b b", "r b", sizes=TWO_BATCH),
    Case("r r r", "b c", sizes=TWO_BATCH),
    Case("r R R", "r r", sizes=Sizes(1, 3, 4, 2)),
    Case("R r r", "R c", sizes=Sizes(4, 3, 1, 2)),
    *(
        Case(x, dtype=dtype)
        for x in ("R R R", "r R R", "R r r", "c c c")
        for dtype in (torch.float, torch.bfloat16)
    ),
    # Nothing is sent in these: gloo of PyTorch 2.6 cannot send complex numbers.
    Case("R R R", dtype=torch.cdouble),
    Case("b b b", "b b", sizes=TWO_BATCH, dtype=torch.cdouble),
]
TWO_DIMS = [
    *(Case(f"{x} {y} {y}", "RR RR") for x in ("rR", "cr", "rr") for y in ("Rr", "rc")),
    Case("rR Rr Rr", "rR rc"),
    Case("rR Rr Rr", "rP Pc"),
    Case("RR rR rc", "Rc cR"),
    Case("RP PR PP", "PP RP"),
    Case("rP cP PR", "Pr cP"),
    Case("RR RR AP", "RR RR"),
    Case("rR RR RA", "rR rR"),
    Case("RR RR PA", "RR PA"),
    Case("br bR bR", "br br", sizes=BATCH),
    Case("bR br br", "bR bc", sizes=BATCH),
    Case("bR bR bc", "bc bR", sizes=BATCH),
    Case("bb bb bb", "bb bb", sizes=TWO_BATCH),
    Case("rR Rr Rr", "- rc"),
    Case("rR Rr Rr", "rR -"),
    *(Case("rR Rr Rr", "rR rc", wanted) for wanted in WANTED),
]

DOUBLE = {1: ("R R R", "r R R", "R r r", "R R c"), 2: ("rR Rr Rr", "RR RR RR")}


class AttnProcesses(MultiProcessTestCase):
    """Values, by processes that communicate: starting these takes the most time."""

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    # A thread of gloo may have yet to drop the last tensors, for which it needs the GIL. A
    # group that is destroyed waits for that thread, with the GIL before 2.8 (#154976), and
    # after the end of Python the thread would abort the process (#190489).
    destroy_pg_upon_exit = False

    @classmethod
    def _run(cls, *args, **kwargs) -> None:
        super()._run(*args, **kwargs)
        os._exit(0)

    @contextmanager
    def processes(self) -> Iterator[None]:
        torch.set_num_threads(1)
        # It has a warning for every all-to-all on a CPU.
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size
        )
        yield
        # A process that ends closes its connections, so all of them end together.
        done = [f"done {rank}" for rank in range(self.world_size)]
        store.set(done[self.rank], "")
        store.wait(done)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Names the case in an error: there is no subTest in these processes."""
        try:
            yield
        except Exception as e:
            raise AssertionError(f"{name}: {e}") from e

    def assert_within_rule(self, actual, plain, reference, sizes, what):
        """At most twice as far from ``reference`` as ``plain``, give or take a floor.

        A rank looks at its own part: gathering all would take most of the time.
        """
        if reference is None:
            self.assertIsNone(actual, msg=what)
            return
        self.assertIsInstance(actual, DTensor, msg=what)
        self.assertEqual(actual.shape, reference.shape, msg=what)
        self.assertEqual(actual.dtype, plain.dtype, msg=what)
        actual = summed(actual)
        error = actual.to_local().to(reference) - part(reference, actual)
        bound = rule(plain.dtype, plain, reference, sizes, ranks=self.world_size)
        if error.numel() > 0:
            self.assertLessEqual(error.abs().max().item(), bound.item(), msg=what)

    def check_case(self, mesh: DeviceMesh, case: Case):
        inputs, grads = case.sizes.make(case.dtype)
        exact = torch.cdouble if case.dtype.is_complex else torch.double
        placed = [place(x, mesh, y) for x, y in zip(inputs, case.inputs.split())]
        given = [
            None if letters == NONE else place(x, mesh, letters)
            for x, letters in zip(grads, case.grads.split())
        ]
        results = [
            (*op(*x), *gradients(op, x, y, case.wanted, case.used))
            for op, x, y in (
                (torch.attn, placed, given),
                (attn_composed, inputs, grads),
                (attn_composed, *([x.to(exact) for x in y] for y in (inputs, grads))),
            )
        ]
        names = (*OUTPUTS, *(f"grad_{name}" for name in INPUTS))
        for name, actual, plain, reference in zip(names, *results):
            self.assert_within_rule(actual, plain, reference, case.sizes, name)

    def check_cases(self, mesh: DeviceMesh, cases: list[Case]):
        for case in cases:
            with self.case(f"{case.name} on {mesh}"):
                self.check_case(mesh, case)

    def check_double_backward(self, mesh: DeviceMesh):
        for letters in DOUBLE[mesh.ndim]:
            with self.case(f"double backward, {letters} on {mesh}"):
                inputs, grads = (sizes := Case("").sizes).make()
                u = [x.flip(0) for x in inputs]
                whole = "R" * mesh.ndim
                actual = double_backward(
                    torch.attn,
                    [place(x, mesh, y) for x, y in zip(inputs, letters.split())],
                    [place(x, mesh, whole) for x in grads],
                    [place(x, mesh, whole) for x in u],
                )
                expected = double_backward(attn_composed, inputs, grads, u)
                for i, (x, y) in enumerate(zip(actual, expected)):
                    self.assert_within_rule(x, y, y, sizes, f"result {i}")

    def check_backward_into_grad(self, mesh: DeviceMesh):
        """As a user would write it: a loss, backward(), and .grad of the leaves."""

        def loss(output, attn):
            return output.sum() + attn.square().sum()

        inputs, _ = (sizes := Sizes(batch=(4,))).make()
        for letters in ("R R R", "b b b", "r R R", "R r r", "b r c"):
            with self.case(f"backward(), {letters} on {mesh}"):
                plain = [x.clone().requires_grad_() for x in inputs]
                loss(*attn_composed(*plain)).backward()
                leaves = [
                    place(x, mesh, y).detach().requires_grad_()
                    for x, y in zip(inputs, letters.split())
                ]
                loss(*torch.attn(*leaves)).backward()
                for name, x, y in zip(INPUTS, leaves, plain):
                    self.assert_within_rule(
                        x.grad, y.grad, y.grad, sizes, f"{name}.grad"
                    )


class TestAttnTwoProcesses(AttnProcesses):
    world_size = 2

    def test_values_and_gradients(self):
        with self.processes():
            mesh = init_device_mesh("cpu", (2,))
            self.check_cases(mesh, ONE_DIM)
            self.check_double_backward(mesh)
            self.check_backward_into_grad(mesh)


class TestAttnFourProcesses(AttnProcesses):
    world_size = 4

    def test_values_and_gradients(self):
        with self.processes():
            line, square = (init_device_mesh("cpu", x) for x in ((4,), (2, 2)))
            self.check_cases(
                line, ONE_DIM[::5]
            )  # the same, with more and smaller shards
            self.check_cases(square, TWO_DIMS)
            for mesh in (line, square):
                self.check_double_backward(mesh)
            self.check_backward_into_grad(line)


if __name__ == "__main__":
    run_tests()
