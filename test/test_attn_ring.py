# Owner(s): ["oncall: distributed"]

"""The ring of attn_output: values, bits, errors, traffic and memory."""

import os
import re
import threading
import unittest
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, product
from typing import NamedTuple
from unittest import mock

from test_attn import rule
from test_attn_dtensor import AttnProcesses
from test_attn_kernel import growth, sized
from test_attn_output import composed

import torch
import torch.distributed as dist
from torch.autograd.forward_ad import dual_level, make_dual
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental._attn_ring import (
    attn_output_ring,
    ring_attention,
)
from torch.testing._internal.common_utils import (
    run_tests,
    TEST_WITH_ASAN,
    TEST_WITH_SLOW,
)


BLOCK = 8
# Each call tells the other ranks its arguments: first how long that is, then what they are.
GATHERS = {torch.ops.c10d.allgather_: 2}
NAMES = ("output", "grad_q", "grad_k", "grad_v")
SECOND = ("second_grad", "second_q", "second_k", "second_v")


class Problem(NamedTuple):
    m: int
    n: int
    dtype: torch.dtype = torch.float
    is_causal: bool = False
    scale: float = 1.0
    batch: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()

    @property
    def options(self):
        return {"is_causal": self.is_causal, "scale": self.scale}

    def make(self):
        """q, k, v, a gradient of the output, and gradients of the gradients of q, k and v."""
        generator = torch.Generator().manual_seed(self.m * 1000 + self.n)
        shapes = (
            (*self.batch, self.m, 5),
            (*self.shared, self.n, 5),
            (*self.shared, self.n, 6),
        )
        shapes = (*shapes, (*self.batch, self.m, 6), *shapes)
        return [torch.randn(x, generator=generator).to(self.dtype) for x in shapes]


PROBLEMS = (
    Problem(96, 96),
    Problem(96, 96, is_causal=True),
    Problem(50, 50, torch.double, True, -0.7),
    Problem(47, 61, torch.double, scale=0.3),
    Problem(61, 47, torch.bfloat16),
    Problem(61, 61, torch.bfloat16, True),
    Problem(61, 47, torch.half, True, 2.0),
    Problem(47, 61, is_causal=True),
    # There are fewer blocks than ranks, then fewer rows than ranks.
    Problem(7, 90),
    Problem(90, 7, is_causal=True),
    Problem(3, 2, is_causal=True),
    Problem(1, 1),
    Problem(40, 40, torch.float, True, 0.5, (2, 3), (2, 1)),
    Problem(41, 33, torch.bfloat16, False, 1.0, (3,), (1,)),
    Problem(0, 20, batch=(2,), shared=(2,)),
    Problem(20, 0, is_causal=True),
)


def even(rows, ranks):
    """As DTensor shards them: the last ranks may have fewer rows, or none."""
    size = -(-rows // ranks)
    return [max(0, min(size, rows - rank * size)) for rank in range(ranks)]


def growing(rows, ranks):
    """Rank r has r times as many as rank 1, so that rank 0 has none, if there are others."""
    total = ranks * (ranks - 1) // 2
    found = [rows * rank // total for rank in range(ranks - 1)] if total else []
    return [*found, rows - sum(found)]


def shard(x, mesh, sizes=even):
    counts = sizes(x.shape[-2], mesh.size())
    begin = [0, *accumulate(counts)][mesh.get_local_rank()]
    return x.narrow(-2, begin, counts[mesh.get_local_rank()])


def whole(x, mesh):
    shards = [None] * mesh.size()
    dist.all_gather_object(shards, x, mesh.get_group())
    return torch.cat(shards, -2)


def derivatives(op, inputs, grad, u):
    """The output, the gradients of the inputs, and those of <u, gradients>."""
    leaves = [x.detach().requires_grad_() for x in (grad, *inputs)]
    grad, *inputs = leaves
    output = op(*inputs)
    first = torch.autograd.grad(output, inputs, grad, create_graph=True)
    second = torch.autograd.grad(first, leaves, u, materialize_grads=True)
    return dict(zip(NAMES + SECOND, [x.detach() for x in (output, *first, *second)]))


def by_ring(problem, mesh, sizes=even):
    """All of `derivatives`, whole, by a ring of the mesh's ranks."""
    q, k, v, grad, *u = (shard(x, mesh, sizes) for x in problem.make())

    def ring(*inputs):
        return attn_output_ring(*inputs, mesh, block=BLOCK, **problem.options)

    found = derivatives(ring, (q, k, v), grad, u)
    return {name: whole(x, mesh) for name, x in found.items()}


class AttnRing(AttnProcesses):
    def mesh(self, ranks):
        """Of some ranks: all processes call it, and get None if they are not among these."""
        group = dist.new_group(ranks)
        return DeviceMesh.from_group(group, "cpu") if self.rank in ranks else None

    @contextmanager
    def meshes(self, sizes):
        """This rank alone, and the first ranks, by their number, where this is one of them."""
        alone = [self.mesh([rank]) for rank in range(self.world_size)][self.rank]
        first = {size: self.mesh([*range(size)]) for size in sizes}
        yield alone, {size: mesh for size, mesh in first.items() if mesh is not None}

    def assert_same_bits(self, problem, alone, meshes):
        torch.set_num_threads(1)
        expected = by_ring(problem, alone)
        torch.set_num_threads(1 + self.rank % 2)
        for ranks, mesh in meshes.items():
            for sizes in (even, growing):
                for name, x in by_ring(problem, mesh, sizes).items():
                    where = f"{name} of {ranks} ranks, {sizes.__name__}"
                    self.assertTrue(torch.equal(x, expected[name]), where)
        return expected

    def assert_within_rule(self, found, problem):
        q, k, v, grad, *u = problem.make()

        def plain(*inputs):
            return composed(*inputs, **problem.options)

        results = derivatives(plain, (q, k, v), grad, u)
        wide = [[x.double() for x in y] for y in ((q, k, v), [grad], u)]
        inputs, (grad,), u = wide
        exact = derivatives(plain, inputs, grad, u)
        case = sized(problem.m, problem.n, 5, 6, *problem.batch)
        for name, x in found.items():
            self.assertEqual(x.dtype, problem.dtype, msg=name)
            self.assertEqual(x.shape, exact[name].shape, msg=name)
            if x.numel():
                bound = rule(problem.dtype, results[name].double(), exact[name], case)
                error = (x.double() - exact[name]).abs().max().item()
                self.assertLessEqual(error, bound.item(), msg=name)


class TestAttnRingFourProcesses(AttnRing):
    world_size = 4

    def test_values_and_bits(self):
        with self.processes(), self.meshes((2, 3, 4)) as (alone, meshes):
            for problem in PROBLEMS:
                with self.case(str(problem)):
                    found = self.assert_same_bits(problem, alone, meshes)
                    self.assert_within_rule(found, problem)

    def test_dtensor_with_a_batch(self):
        with self.processes():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "rows"))
            for shared in ((2,), (1,)):
                problem = Problem(40, 33, torch.double, False, 0.5, (2,), shared)
                q, k, v, grad, *_ = problem.make()
                heads = Replicate() if shared == (1,) else Shard(0)
                placed = [heads, Shard(1)]
                inputs = [distribute_tensor(x, mesh, placed) for x in (q, k, v)]
                with ring_attention(block=BLOCK), CommDebugMode() as comm:
                    output = torch.attn_output(*inputs, **problem.options)
                self.assertEqual(tuple(output.placements), tuple(placed))
                self.assertEqual(comm.get_comm_counts(), GATHERS)
                expected = composed(q, k, v, **problem.options)
                self.assertEqual(output.full_tensor(), expected)
            # Inputs that are cut by rows over two dimensions of a mesh make no ring.
            inputs = [distribute_tensor(x, mesh, [Shard(1)] * 2) for x in (q, k, v)]
            with ring_attention(block=BLOCK), CommDebugMode() as comm:
                output = torch.attn_output(*inputs, **problem.options)
            self.assertNotIn(torch.ops.c10d.allgather_, comm.get_comm_counts())
            self.assertEqual(output.full_tensor(), expected)


@unittest.skipUnless(
    TEST_WITH_SLOW, "eight processes take a minute to start on two cores"
)
class TestAttnRingEightProcesses(AttnRing):
    world_size = 8

    def test_bits(self):
        with self.processes(), self.meshes((8,)) as (alone, meshes):
            for problem in PROBLEMS:
                with self.case(str(problem)):
                    self.assert_same_bits(problem, alone, meshes)


class Call(NamedTuple):
    """How a rank calls the ring."""

    q: tuple[int, ...] = (4, 5)
    k: tuple[int, ...] = (3, 5)
    v: tuple[int, ...] = (3, 6)
    dtype: torch.dtype = torch.float
    has_gradient: bool = False
    is_causal: bool = False
    scale: float = 1.0
    block: int = 8


# What rank 0 calls, what rank 1 calls, and the error that both raise.
DISAGREE = "attn_output_ring: ranks must agree on "
MISTAKES = (
    (
        Call(),
        Call(q=(9, 7), k=(2, 7), v=(2, 6)),
        DISAGREE
        + "q, but rank 0 has (any, 5) torch.float32 cpu without a gradient and "
        + "rank 1 has (any, 7) torch.float32 cpu without a gradient",
    ),
    (
        Call(v=(2, 3, 6), k=(2, 3, 5), q=(2, 4, 5)),
        Call(v=(2, 3, 7), k=(2, 3, 5), q=(2, 4, 5)),
        DISAGREE + "v, but rank 0 has (2, any, 6) torch.float32 ",
    ),
    (
        Call(),
        Call(dtype=torch.double),
        DISAGREE + "q, but rank 0 has (any, 5) torch.float32 ",
    ),
    (
        Call(),
        Call(has_gradient=True),
        DISAGREE + "q, but rank 0 has (any, 5) torch.float32 cpu without a gradient ",
    ),
    (
        Call(),
        Call(is_causal=True),
        DISAGREE + "is_causal, but rank 0 has False and rank 1 has True",
    ),
    (
        Call(scale=2),
        Call(),
        DISAGREE + "scale, but rank 0 has 2.0 and rank 1 has 1.0",
    ),
    (Call(), Call(block=4), DISAGREE + "block, but rank 0 has 8 and rank 1 has 4"),
    (
        Call(block=0),
        Call(block=0),
        "attn_output_ring: rank 0: block must be positive, but is 0",
    ),
    (Call(), Call(v=(4, 6)), "attn_output_ring: rank 1: "),
    (Call(v=(2, 6)), Call(), "attn_output_ring: rank 0: "),
    (Call(q=(5,)), Call(q=(5,)), "attn_output_ring: rank 0: "),
    (Call(), Call(q=()), "attn_output_ring: rank 1: "),
    (
        Call(dtype=torch.int64),
        Call(dtype=torch.int64),
        "attn_output_ring: rank 0: ",
    ),
)


# One rank alone gets each of these wrong: an argument, what it becomes, and what both ranks say.
ALONE = (
    ("q", lambda *_: None, "q must be a Tensor, but is a NoneType"),
    ("k", lambda x, _: x.tolist(), "k must be a Tensor, but is a list"),
    (
        "v",
        lambda x, mesh: DTensor.from_local(x, mesh, [Shard(0)], run_check=False),
        "v must be this rank's shard, but is a DTensor: take its to_local(), or call ",
    ),
    (
        "q",
        lambda x, _: x.to_sparse(),
        "q must be strided, but is torch.sparse_coo",
    ),
    (
        "k",
        lambda x, _: torch.nested.nested_tensor([x, x]),
        "k must be strided, but is nested",
    ),
    ("v", lambda x, _: x[0], "attn_output: "),
    ("scale", lambda *_: "a", "argument 'scale' must be float, not str"),
    ("is_causal", lambda *_: "no", "argument 'is_causal' must be bool, not str"),
    ("block", lambda *_: 2.5, "block must be a whole number, but is 2.5"),
    ("block", lambda *_: None, "block must be a whole number, but is None"),
    ("block", lambda *_: -1, "block must be positive, but is -1"),
)


class TestAttnRingTwoProcesses(AttnRing):
    world_size = 2

    def assert_same_error(self, message, call):
        with self.assertRaisesRegex(ValueError, re.escape(message)) as found:
            call()
        errors = [None] * 2
        dist.all_gather_object(errors, str(found.exception))
        self.assertEqual(errors[0], errors[1])

    def test_mistakes_of_one_rank(self):
        """The other rank, which is right, does not wait: it raises the same error."""
        with self.processes():
            mesh = init_device_mesh("cpu", (2,))
            right = dict(zip("qkv", Problem(5, 5).make()))
            right |= {"is_causal": False, "scale": 1.0, "block": 8}
            for rank, (name, change, message) in product(range(2), ALONE):
                with self.case(f"{rank}: {message}"):
                    call = dict(right)
                    if rank == self.rank:
                        call[name] = change(right[name], mesh)
                    call = partial(attn_output_ring, mesh=mesh, **call)
                    self.assert_same_error(f"rank {rank}: ", call)
                    self.assert_same_error(message, call)
            q, k, v, *_ = Problem(5, 5).make()

            def call(q):
                return attn_output_ring(q, k, v, mesh)

            message = "rank 1: the ring has no rule for vmap"
            batched = partial(torch.func.vmap(call), q[None])
            self.assert_same_error(message, batched if self.rank else partial(call, q))
            self.assertEqual(
                call(q), torch.attn_output(q, torch.cat([k, k]), torch.cat([v, v]))
            )

    def test_mistakes(self):
        """Each rank raises the same error, and the next call is not disturbed."""
        with self.processes():
            mesh = init_device_mesh("cpu", (2,))
            for *calls, message in MISTAKES:
                q, k, v, dtype, has_gradient, *options = calls[self.rank]
                inputs = [torch.zeros(x, dtype=dtype) for x in (q, k, v)]
                if has_gradient:
                    inputs = [x.requires_grad_() for x in inputs]
                options = dict(zip(("is_causal", "scale", "block"), options))
                with self.case(message):
                    call = partial(attn_output_ring, *inputs, mesh, **options)
                    self.assert_same_error(message, call)
            q, k, v, *_ = Problem(5, 5).make()
            mesh = init_device_mesh("cpu", (2, 1))
            for wrong in (mesh, None):
                with self.assertRaisesRegex(
                    ValueError, "needs a mesh of one dimension"
                ):
                    attn_output_ring(q, k, v, wrong)
            mesh = self.mesh([0]) or DeviceMesh("cpu", [0], _init_backend=False)
            if self.rank == 1:
                with self.assertRaisesRegex(ValueError, "rank 1 is not in the mesh"):
                    attn_output_ring(q, k, v, mesh)

    def test_unchecked(self):
        """The ranks tell each other nothing, and have the same bits."""
        with self.processes():
            mesh = init_device_mesh("cpu", (2,))
            for is_causal in (False, True):
                problem = Problem(96, 64, torch.float, is_causal, 0.5)
                q, k, v, grad, *u = (shard(x, mesh) for x in problem.make())
                options = {"block": BLOCK, **problem.options}
                found = []
                for check in (True, False):
                    op = partial(attn_output_ring, mesh=mesh, check=check, **options)
                    with CommDebugMode() as comm:
                        found.append(derivatives(op, (q, k, v), grad, u))
                    self.assertEqual(comm.get_comm_counts(), GATHERS if check else {})
                for name, x in found[0].items():
                    self.assertTrue(torch.equal(x, found[1][name]), name)
            if self.rank == 1:  # the other one does not wait
                message = "attn_output_ring: rank 1: q must be a Tensor"
                with self.assertRaisesRegex(ValueError, message):
                    attn_output_ring(None, k, v, mesh, check=False)

    def test_derivatives_that_are_not_there(self):
        with self.processes():
            mesh = init_device_mesh("cpu", (2,))
            q, k, v, *_ = (shard(x, mesh) for x in Problem(20, 20).make())
            with dual_level(), self.assertRaisesRegex(RuntimeError, "jvp"):
                attn_output_ring(make_dual(q, q), k, v, mesh, block=BLOCK)
            q.requires_grad_()
            output = attn_output_ring(q, k, v, mesh, block=BLOCK)
            (first,) = torch.autograd.grad(output.sum(), q, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), q, create_graph=True)
            with self.assertRaisesRegex(RuntimeError, "no third derivatives"):
                torch.autograd.grad(second.sum(), q)

    def test_a_rank_that_is_gone(self):
        """The other one gets an error. It would wait for the group's timeout of half an hour
        otherwise, which is longer than this test may take."""
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        q, k, v, *_ = (x.chunk(2, -2)[self.rank] for x in Problem(64, 64).make())
        attn_output_ring(q, k, v, mesh, block=BLOCK)
        if self.rank == 1:
            with mock.patch("torch.attn_output", lambda *_, **__: os._exit(0)):
                attn_output_ring(q, k, v, mesh, block=BLOCK)
        with self.assertRaises(RuntimeError):
            attn_output_ring(q, k, v, mesh, block=BLOCK)

    def test_traffic(self):
        """Shards of whole blocks are sent once a rank, their gradients once more, and no more."""
        with self.processes():
            mesh = init_device_mesh("cpu", (2,))
            send, sent = dist.batch_isend_irecv, []

            def counted(operations):
                sent.extend(x.tensor.nbytes for x in operations if x.op is dist.isend)
                return send(operations)

            for dtype in (torch.float, torch.bfloat16):
                problem = Problem(64, 96, dtype)
                shards = [shard(x, mesh) for x in problem.make()]
                q, k, v = (x.requires_grad_() for x in shards[:3])
                with mock.patch("torch.distributed.batch_isend_irecv", counted):
                    with CommDebugMode() as comm:
                        output = attn_output_ring(q, k, v, mesh, block=BLOCK)
                    self.assertEqual(sent, [k.nbytes + v.nbytes])
                    self.assertEqual(comm.get_comm_counts(), GATHERS)
                    sent.clear()
                    with CommDebugMode() as comm:
                        output.backward(shards[3])
                    sums = 4 * (k.numel() + v.numel())
                    self.assertEqual(sent, [k.nbytes + v.nbytes, sums, sums])
                    self.assertEqual(comm.get_comm_counts(), {})
                    sent.clear()

    def test_memory(self):
        """A step takes memory for a few shards, and none that grows with m n."""
        if TEST_WITH_ASAN:
            self.skipTest("ASan has memory of its own")
        with self.processes():
            mesh = init_device_mesh("cpu", (2,))
            for n, is_causal in ((8192, False), (16384, True)):
                shards = [torch.randn(n // 2, 64) / 8 for _ in range(4)]
                leaves = [x.requires_grad_() for x in shards[:3]]

                def step():
                    output = attn_output_ring(*leaves, mesh, is_causal=is_causal)
                    return output, *torch.autograd.grad(output, leaves, shards[3])

                step()  # starts the threads
                # The shards in memory are of q, k, v and the gradient, of three sums, of what
                # is sent and what comes, and if causal of what is exchanged before and after.
                bound = 24 * shards[0].nbytes + (16 << 20)
                self.assertLess(growth(step), bound)
                self.assertLess(bound, n // 2 * n * 4 / 2)

    def test_dtensor(self):
        with self.processes():
            mesh = init_device_mesh("cpu", (2,))
            for is_causal, check in product((False, True), repeat=2):
                problem = Problem(45, 45, torch.float, is_causal, 0.5, (2,), (2,))
                tensors = [
                    distribute_tensor(x, mesh, [Shard(1)]) for x in problem.make()
                ]
                local = [x.to_local() for x in tensors]
                q, k, v, grad, *u = tensors
                op = partial(torch.attn_output, **problem.options)
                ring = partial(
                    attn_output_ring, mesh=mesh, block=BLOCK, **problem.options
                )
                expected = derivatives(ring, local[:3], local[3], local[4:])

                def call(q, k, v):
                    with ring_attention(block=BLOCK, check=check):
                        return op(q, k, v)

                with CommDebugMode() as comm:
                    found = derivatives(call, (q, k, v), grad, u)
                self.assertEqual(comm.get_comm_counts(), GATHERS if check else {})
                # Only k requires grad, and the output's gradient has other placements.
                k.requires_grad_()
                (found["grad_k of a whole"],) = torch.autograd.grad(
                    call(q, k, v), k, grad.redistribute(placements=[Replicate()])
                )
                expected["grad_k of a whole"] = expected["grad_k"]
                for name, x in found.items():
                    self.assertEqual(tuple(x.placements), (Shard(1),), name)
                    # A composed product's bits depend on where its operands lie.
                    bits = {} if name in SECOND else {"rtol": 0, "atol": 0}
                    self.assertEqual(x.to_local(), expected[name], name, **bits)
                    self.assertEqual(x.shape[1], 45)

    def test_dtensor_contexts(self):
        """A context is a thread's own, leaves DTensor's table alone, and ends in any order."""
        with self.processes():
            mesh = init_device_mesh("cpu", (2,))
            tensors = Problem(8, 8).make()[:3]
            sharded = [distribute_tensor(x, mesh, [Shard(0)]) for x in tensors]

            def is_ring():
                with CommDebugMode() as comm:
                    torch.attn_output(*sharded)
                return torch.ops.c10d.allgather_ in comm.get_comm_counts()

            handlers = DTensor._op_dispatcher._custom_op_handlers
            before, found = dict(handlers), []
            first, second = ring_attention(block=4), ring_attention(block=8)
            first.__enter__()
            second.__enter__()
            self.assertTrue(is_ring())
            self.assertIs(DTensor._op_dispatcher._custom_op_handlers, handlers)
            self.assertEqual(handlers, before)
            thread = threading.Thread(target=lambda: found.append(is_ring()))
            thread.start()
            thread.join()
            self.assertEqual(found, [False])
            compiled = torch.compile(torch.sin, backend="eager", fullgraph=True)
            self.assertEqual(compiled(tensors[0]), tensors[0].sin())
            first.__exit__(None, None, None)
            self.assertTrue(is_ring())
            second.__exit__(None, None, None)
            self.assertFalse(is_ring())

    def test_dtensor_elsewhere(self):
        """DTensor's own rules hold for other placements, and outside of the context."""
        with self.processes():
            mesh = init_device_mesh("cpu", (2,))
            problem = Problem(8, 8, torch.double, True, 0.5, (2,), (2,))
            q, k, v, *_ = problem.make()
            op = partial(torch.attn_output, **problem.options)
            expected = op(q, k, v)
            for letters in ("000", "1RR", "RRR", "R11", "222"):
                places = [Replicate() if x == "R" else Shard(int(x)) for x in letters]
                inputs = [
                    distribute_tensor(x, mesh, [p]) for x, p in zip((q, k, v), places)
                ]
                with ring_attention(block=BLOCK), CommDebugMode() as comm:
                    output = op(*inputs)
                self.assertNotIn(torch.ops.c10d.allgather_, comm.get_comm_counts())
                self.assertEqual(output.full_tensor(), expected)
            inputs = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
            with CommDebugMode() as comm:
                output = op(*inputs)
            self.assertNotIn(torch.ops.c10d.allgather_, comm.get_comm_counts())
            self.assertEqual(output.full_tensor(), expected)

    def test_autocast(self):
        with self.processes():
            mesh = init_device_mesh("cpu", (2,))
            q, k, v, *_ = (shard(x, mesh) for x in Problem(40, 40).make())
            with torch.autocast("cpu", torch.bfloat16):
                actual = attn_output_ring(q, k, v, mesh, block=BLOCK)
            low = [x.bfloat16() for x in (q, k, v)]
            expected = attn_output_ring(*low, mesh, block=BLOCK)
            self.assertEqual(actual.dtype, torch.bfloat16)
            self.assertTrue(torch.equal(actual, expected))


if __name__ == "__main__":
    run_tests()
