"""torch.attn_output of sequences that are sharded over a mesh.

Note [The ring of attn_output]
Of all rows of q (*, m, d), k (*, n, d) and v (*, n, e) each rank has some. They are cut into
blocks of ``block`` rows, the last one shorter, and the ranks share whole blocks. Block i of q
and block j of k and v are a pair; each pair is one call of attn_output, or of its backward,
whose results are addends of row block i and of column block j.

 - The blocks of k and v travel: in step s a rank r works on what rank r + s has, and sends
   it on to rank r - 1 while it does. Sums of row blocks (output, grad_q) stay, sums of
   column blocks (grad_k, grad_v) travel behind their blocks.
 - A block has a home in 0 .. homes - 1, and a rank has the blocks of a range of homes. Pairs
   are added in the order of (home(j) - home(i)) mod homes. That is the order in which the
   blocks of k and v reach a row block, and the one in which a column block reaches the
   blocks of q. It says nothing of ranks: so results have the same bits for any number of
   them. What a rank's own rows see last of its own columns waits for the end.
 - If attn is causal, a home is two blocks, one from each end: all homes then have the same
   number of pairs, and ranks the same work in each step.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode


__all__ = ["attn_output_ring", "ring_attention"]

aten = torch.ops.aten

# Rows of a block: of one matrix of 64 columns, a call then takes milliseconds.
BLOCK = 1024

# A block's number -> the rows of some tensors that belong to that block.
Blocks = dict[int, list[Tensor]]
# The sizes before the rows, and the number of columns.
Shape = tuple[tuple[int, ...], int]
# Takes the tensors of a row block and of a column block, and whether the diagonal of a causal
# attn goes through that pair. Returns the addends of the row block and of the column block.
Compute = Callable[[list[Tensor], list[Tensor], bool], tuple[Sequence, Sequence]]


def _count(shards: Sequence[int], block: int) -> int:
    return -(-sum(shards) // block)


def _shape(x: Tensor) -> Shape:
    return tuple(x.shape[:-2]), x.shape[-1]


@dataclass(frozen=True)
class _Side:
    """The rows of q, or those of k and v: where they are sharded, and where their blocks are."""

    shards: tuple[int, ...]  # how many rows each rank has
    block: int
    most: int  # blocks, of the side that has more
    paired: bool  # whether a home is a block from each end

    @property
    def homes(self) -> int:
        return (self.most + 1) // 2 if self.paired else self.most

    @property
    def count(self) -> int:
        return _count(self.shards, self.block)

    def size(self, index: int) -> int:
        return min(self.block, sum(self.shards) - index * self.block)

    def home(self, index: int) -> int:
        if self.paired:
            return min(index, self.most - 1 - index)
        return index * self.most // self.count

    def owner(self, index: int) -> int:
        return self.home(index) * len(self.shards) // self.homes

    @cached_property
    def owned(self) -> list[list[int]]:
        """Returns the blocks of each rank."""
        owned: list[list[int]] = [[] for _ in self.shards]
        for index in range(self.count):
            owned[self.owner(index)].append(index)
        return owned

    def make(
        self, rank: int, shapes: Sequence[Shape], like: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Blocks]:
        """Returns a zero buffer, to be sent whole, and the blocks of a rank as views of it."""
        sizes = {
            index: [(*batch, self.size(index), width) for batch, width in shapes]
            for index in self.owned[rank]
        }
        lengths = [torch.Size(x).numel() for x in chain(*sizes.values())]
        buffer = torch.zeros(sum(lengths), dtype=dtype, device=like.device)
        parts = iter(buffer.split(lengths))
        return buffer, {
            index: [next(parts).view(x) for x in tensors]
            for index, tensors in sizes.items()
        }

    def pieces(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Cuts the rows where a shard or a block ends, and yields each piece.

        A piece is five numbers: the rank whose shard it is in and its first row there, the
        block that it is in and its first row there, and how many rows it has.
        """
        for rank, end in enumerate(accumulate(self.shards)):
            first = row = end - self.shards[rank]
            while row < end:
                index, at = divmod(row, self.block)
                count = min(end - row, self.block - at)
                yield rank, row - first, index, at, count
                row += count


@dataclass(frozen=True)
class _Ring:
    """A call of the ring, the same on all ranks but for `rank`."""

    group: dist.ProcessGroup
    rank: int
    rows: _Side
    cols: _Side
    is_causal: bool
    scale: float
    wanted: tuple[bool, ...]  # which of q, k and v have a gradient

    @property
    def ranks(self) -> int:
        return len(self.rows.shards)

    def communicate(
        self, sends: dict[int, Tensor], receives: dict[int, Tensor], tag: int = 0
    ) -> list[dist.Work]:
        """Begins to send and to receive, by rank; what has no elements is left out."""
        operations = [
            dist.P2POp(how, x, dist.get_global_rank(self.group, peer), self.group, tag)
            for how, tensors in ((dist.isend, sends), (dist.irecv, receives))
            for peer, x in tensors.items()
            if x.numel()
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def move(
        self, side: _Side, shards: list[Tensor], blocks: Blocks, back: bool = False
    ) -> None:
        """Copies this rank's shards into the blocks of all ranks, or these back into shards."""
        sends, receives = defaultdict(list), defaultdict(list)
        for rank, first, index, at, count in side.pieces():
            owner = side.owner(index)
            ends = {}
            if rank == self.rank:
                ends[back] = [x.narrow(-2, first, count) for x in shards]
            if owner == self.rank:
                ends[not back] = [x.narrow(-2, at, count) for x in blocks[index]]
            if len(ends) == 2:
                for x, y in zip(ends[True], ends[False]):
                    x.copy_(y)
            for is_target, parts in ends.items() if len(ends) == 1 else ():
                peer = owner if rank == self.rank else rank
                (receives if is_target else sends)[peer] += parts
        sent = {
            peer: torch.cat([x.flatten() for x in parts])
            for peer, parts in sends.items()
        }
        received = {
            peer: parts[0].new_empty(sum(x.numel() for x in parts))
            for peer, parts in receives.items()
        }
        for work in self.communicate(sent, received):
            work.wait()
        for peer, parts in receives.items():
            found = received[peer].split([x.numel() for x in parts])
            for x, y in zip(parts, found):
                x.copy_(y.view(x.shape))

    def pairs(self, step: int) -> list[tuple[int, int]]:
        """Returns what this rank works on in a step, in order: row and column blocks."""
        found = []
        for i in self.rows.owned[self.rank]:
            for j in self.cols.owned[(self.rank + step) % self.ranks]:
                if self.is_causal and j > i:
                    continue
                distance = self.cols.home(j) - self.rows.home(i)
                # A rank works on its own columns in two steps. The first step takes the
                # columns from the row's home on, the last step those before it.
                if step in (0, self.ranks) and (distance < 0) != (step == self.ranks):
                    continue
                found.append((distance % self.rows.homes, i, j))
        return [(i, j) for _, i, j in sorted(found)]

    def run(
        self,
        rows: Sequence[Tensor],
        cols: Sequence[Tensor],
        of_rows: Sequence[Shape],
        of_cols: Sequence[Shape],
        compute: Compute,
    ) -> list[Tensor]:
        """Returns this rank's shards of the sums, which have these shapes."""
        like = rows[0]
        sum_dtype = torch.promote_types(like.dtype, torch.float)
        make_rows = partial(self.rows.make, self.rank, like=like)
        _, row_blocks = make_rows(list(map(_shape, rows)), dtype=like.dtype)
        self.move(self.rows, [*rows], row_blocks)
        _, row_sums = make_rows(of_rows, dtype=sum_dtype)

        make_cols = partial(self.cols.make, like=like)
        shapes = list(map(_shape, cols))
        buffer, own = make_cols(self.rank, shapes, dtype=like.dtype)
        self.move(self.cols, [*cols], own)
        sums_buffer, col_sums = make_cols(self.rank, of_cols, dtype=sum_dtype)

        before, after = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks
        col_blocks, sums_works = own, []
        for step in range(self.ranks + 1):
            source = (self.rank + step + 1) % self.ranks  # of what comes next
            next_buffer, next_blocks, works = None, own, []
            if step < self.ranks - 1:
                next_buffer, next_blocks = make_cols(source, shapes, dtype=like.dtype)
                works = self.communicate({before: buffer}, {after: next_buffer})
            for i, j in self.pairs(step):
                is_diagonal = self.is_causal and i == j
                to_row, to_col = compute(row_blocks[i], col_blocks[j], is_diagonal)
                for x, y in zip(row_sums[i], to_row):
                    x.add_(y)
                # These sums were on their way while the first pair was computed.
                while sums_works:
                    sums_works.pop().wait()
                for x, y in zip(col_sums[j], to_col):
                    x.add_(y)
            for work in chain(works, sums_works):
                work.wait()
            if step < self.ranks and self.ranks > 1:
                sent = sums_buffer
                sums_buffer, col_sums = make_cols(source, of_cols, dtype=sum_dtype)
                sums_works = self.communicate(
                    {before: sent}, {after: sums_buffer}, tag=1
                )
            buffer, col_blocks = next_buffer, next_blocks

        return [
            x
            for side, sums, shapes in (
                (self.rows, row_sums, of_rows),
                (self.cols, col_sums, of_cols),
            )
            for x in self.shards_of(side, sums, shapes, like)
        ]

    def shards_of(
        self, side: _Side, sums: Blocks, shapes: Sequence[Shape], like: Tensor
    ) -> list[Tensor]:
        if not shapes:
            return []
        blocks = {
            index: [x.to(like.dtype) for x in found] for index, found in sums.items()
        }
        count = side.shards[self.rank]
        shards = [like.new_empty(*batch, count, width) for batch, width in shapes]
        self.move(side, shards, blocks, back=True)
        return shards

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def compute(rows, cols, is_diagonal):
            return [
                torch.attn_output(*rows, *cols, is_causal=is_diagonal, scale=self.scale)
            ], ()

        batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
        (output,) = self.run([q], [k, v], [(batch, v.shape[-1])], [], compute)
        return output

    def gradients(self, wanted, grad, q, k, v, is_diagonal):
        return aten._attn_output_backward(
            grad, q, k, v, is_diagonal, self.scale, wanted
        )

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> list[Tensor | None]:
        def compute(rows, cols, is_diagonal):
            grads = self.gradients(self.wanted, *rows, *cols, is_diagonal)
            return tuple(
                [x for x in part if x is not None] for part in (grads[:1], grads[1:])
            )

        want_q, *want_cols = self.wanted
        of_rows = [_shape(q)] if want_q else []
        of_cols = [_shape(x) for x, want in zip((k, v), want_cols) if want]
        found = iter(self.run([grad, q], [k, v], of_rows, of_cols, compute))
        return [next(found) if want else None for want in self.wanted]

    def double_backward(self, grad, q, k, v, u: Sequence[Tensor]) -> list[Tensor]:
        """Returns the gradients of <u, gradients of q, k and v> by grad, q, k and v."""

        def compute(rows, cols, is_diagonal):
            (grad, q, u_q), (k, v, u_k, u_v) = rows, cols
            leaves = [x.detach().requires_grad_() for x in (grad, q, k, v)]
            with torch.enable_grad():
                grads = self.gradients((True,) * 3, *leaves, is_diagonal)
                found = torch.autograd.grad(
                    grads, leaves, (u_q, u_k, u_v), materialize_grads=True
                )
            return found[:2], found[2:]

        u_q, u_k, u_v = (
            torch.zeros_like(x) if y is None else y for x, y in zip((q, k, v), u)
        )
        shapes = list(map(_shape, (grad, q, k, v)))
        rows, cols = [grad, q, u_q], [k, v, u_k, u_v]
        return self.run(rows, cols, shapes[:2], shapes[2:], compute)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ring: _Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.ring = ring
        ctx.save_for_backward(q, k, v)
        return ring.forward(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        return None, *_Backward.apply(ctx.ring, grad, *ctx.saved_tensors)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ring: _Ring, grad: Tensor, q: Tensor, k: Tensor, v: Tensor):
        ctx.set_materialize_grads(False)
        ctx.ring = ring
        ctx.save_for_backward(grad, q, k, v)
        return tuple(ring.backward(grad, q, k, v))

    @staticmethod
    def backward(ctx, *u):
        return None, *_DoubleBackward.apply(ctx.ring, *ctx.saved_tensors, *u)


class _DoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ring: _Ring, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *u):
        return tuple(ring.double_backward(grad, q, k, v, u))

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("attn_output_ring: has no third derivatives")


@dataclass(frozen=True)
class _Options:
    """How attn_output_ring is called."""

    is_causal: bool
    scale: float
    block: int
    check: bool


def _cast(x: Tensor) -> Tensor:
    """Returns x in the dtype that autocast wants."""
    kind = x.device.type
    if x.is_floating_point() and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _prepare(
    tensors: Sequence[Any], options: _Options
) -> tuple[list[Tensor], dict[str, Any]]:
    """Returns the tensors to work on, and what this rank tells the others of its call."""
    for name, x in zip("qkv", tensors):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a Tensor, but is a {type(x).__name__}")
        if isinstance(x, DTensor):
            raise TypeError(
                f"{name} must be this rank's shard, but is a DTensor: take its to_local(), "
                "or call torch.attn_output in the context ring_attention()"
            )
        layout = "nested" if x.is_nested else x.layout
        if layout != torch.strided:
            raise TypeError(f"{name} must be strided, but is {layout}")
    if torch._C._are_functorch_transforms_active():
        raise TypeError("the ring has no rule for vmap, grad and jvp of torch.func")
    tensors = list(map(_cast, tensors))
    is_causal, scale, block = options.is_causal, options.scale, options.block
    empty = (torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tensors)
    torch.attn_output(*empty, is_causal=is_causal, scale=scale)  # raises if it cannot
    try:
        block = operator.index(block)
    except TypeError:
        raise TypeError(f"block must be a whole number, but is {block!r}") from None
    if block < 1:
        raise ValueError(f"block must be positive, but is {block}")
    call = {"is_causal": bool(is_causal), "scale": float(scale), "block": block}
    for name, x in zip("qkv", tensors):
        has_gradient = x.requires_grad and torch.is_grad_enabled()
        call[name] = tuple(x.shape), x.dtype, x.device.type, has_gradient
    return tensors, call


def _common(value: Any) -> str:
    """Returns the part of a tensor's description that all ranks must agree on: not its rows."""
    if not isinstance(value, tuple):
        return str(value)
    shape, dtype, device, has_gradient = value
    sizes = [*map(str, shape[:-2]), "any", *map(str, shape[-1:])]
    gradient = "with" if has_gradient else "without"
    return f"({', '.join(sizes)}) {dtype} {device} {gradient} a gradient"


def _ring(
    group: dist.ProcessGroup,
    tensors: Sequence[Any],
    options: _Options,
    shards: list[tuple[int, ...]] | None = None,
) -> Tensor:
    """attn_output_ring over a group. `shards` has the rows of q and of k on each rank, if known.

    Until the ranks have told each other what they call, an error on one of them would leave
    the others waiting. So they tell each other errors as well, and all raise the same one.
    """
    rank = dist.get_rank(group)
    mine: Any
    try:
        tensors, mine = _prepare(tensors, options)
    except Exception as e:
        mine = f"rank {rank}: {e}"
    calls: list[Any] = [mine] * dist.get_world_size(group)
    if options.check:
        dist.all_gather_object(calls, mine, group)
    for call in calls:
        if isinstance(call, str):
            raise ValueError(f"attn_output_ring: {call}")
    for peer, call in enumerate(calls):
        for name, value in call.items():
            if (one := _common(value)) != (other := _common(calls[0][name])):
                raise ValueError(
                    f"attn_output_ring: ranks must agree on {name}, but rank 0 has {other} "
                    f"and rank {peer} has {one}"
                )

    is_causal, block = mine["is_causal"], mine["block"]
    if shards is None:
        shards = [tuple(call[x][0][-2] for call in calls) for x in "qk"]
    most = max(_count(x, block) for x in shards)
    rows, cols = (_Side(x, block, most, is_causal) for x in shards)
    wanted = tuple(mine[x][-1] for x in "qkv")
    ring = _Ring(group, rank, rows, cols, is_causal, mine["scale"], wanted)
    return _Forward.apply(ring, *tensors)


@torch.compiler.disable
def attn_output_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh,
    *,
    is_causal: bool = False,
    scale: float = 1.0,
    block: int = BLOCK,
    check: bool = True,
) -> Tensor:
    """:func:`torch.attn_output` of sequences that are sharded over a mesh of one dimension.

    Each rank calls it with its shards, and gets its shard of the output. With ``attn`` the
    matrix of all rows of ``q`` and all rows of ``k``, masked as a whole if ``is_causal``,
    ``output = attn @ v``. Needs memory for a few shards, and for one block of ``attn`` where
    :func:`torch.attn_output` stores that.

    Args:
        q: ``(*, m, d)``, of which the rank has ``m`` rows; 0 are possible.
        k: ``(*, n, d)``; dimensions before the last two may be 1, as in
            :func:`torch.attn_output`.
        v: ``(*, n, e)``, with as many rows as the rank's ``k``.
        mesh: of one dimension; all its ranks take part, in the backward as well.
        is_causal: whether a row sees only columns up to its own place in the whole.
        scale: what the scores are multiplied by.
        block: how many rows are worked on at a time. Results depend on it by rounding, as
            sums are made block by block. Ranks are idle if there are fewer blocks than
            ranks, or, if causal, than twice as many.
        check: whether the ranks first tell each other what they call, which takes one
            ``all_gather_object``. If not, the caller promises that they agree, and that each
            has as many rows as this one.

    Returns:
        ``(*, m, e)``, and its first and second derivatives. All have the same bits for any
        number of ranks, any shards and any number of threads, for real inputs of at most
        1024 columns on a CPU; elsewhere that depends on :func:`torch.matmul`. In
        ``bfloat16`` and ``half`` a block's part of a sum is rounded, and the sum is in
        ``float``.

    Raises:
        ValueError: on all ranks, if the ranks don't agree on what they compute, or one has
            inputs that :func:`torch.attn_output` does not take. On this rank alone, if
            ``mesh`` is not of one dimension with this rank in it, or if not ``check``.
        RuntimeError: from the process group, if a rank is gone.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ValueError(
            f"attn_output_ring: needs a mesh of one dimension, but got {mesh}: take one "
            "of its dimensions, mesh[name]"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"attn_output_ring: rank {dist.get_rank()} is not in the mesh {mesh}"
        )
    options = _Options(is_causal, scale, block, check)
    return _ring(mesh.get_group(), (q, k, v), options)


def _sequence_dim(*tensors: Any) -> int | None:
    """The one mesh dimension over which all are sharded by rows, if over others none is.

    Over other dimensions of the mesh all may be replicated, or sharded by the same batch
    dimension: each part of those works by itself.
    """
    if not all(isinstance(x, DTensor) for x in tensors):
        return None
    q, *others = tensors
    if q.device_mesh.get_coordinate() is None:
        return None  # this rank has no part of them
    about = q.ndim, q.device_mesh, q.placements
    if any((x.ndim, x.device_mesh, x.placements) != about for x in others):
        return None
    found = []
    for dim, placement in enumerate(q.placements):
        if placement.is_shard(q.ndim - 2):
            found.append(dim)
        elif placement.is_shard():
            if (
                len({x.shape[placement.dim] for x in tensors}) > 1
                or placement.dim == q.ndim - 1
            ):
                return None
        elif not placement.is_replicate():
            return None
    return found[0] if len(found) == 1 else None


def _chunks(rows: int, ranks: int) -> tuple[int, ...]:
    """Returns how many rows of a DTensor that is sharded by rows each rank has."""
    size = -(-rows // ranks)
    return tuple(max(0, min(size, rows - rank * size)) for rank in range(ranks))


class _Local(torch.autograd.Function):
    """x.to_local() with a gradient that has one too, which that of 2.6 lacks."""

    @staticmethod
    def forward(ctx, x: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = x.device_mesh, x.placements
        ctx.sizes = x.shape, x.stride()
        local = x.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx, grad):
        shape, stride = ctx.sizes
        return DTensor.from_local(
            grad,
            ctx.mesh,
            ctx.placements,
            run_check=False,
            shape=shape,
            stride=stride,
        )


@torch.compiler.disable
def _ring_of_dtensors(
    q: DTensor, k: DTensor, v: DTensor, dim: int, options: _Options
) -> DTensor:
    mesh = q.device_mesh
    known = [_chunks(x.shape[-2], mesh.size(dim)) for x in (q, k)]
    local = _ring(
        mesh.get_group(dim),
        [_Local.apply(x) for x in (q, k, v)],
        options,
        None if options.check else known,
    )
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    shape = torch.Size((*batch, q.shape[-2], v.shape[-1]))
    return DTensor.from_local(
        local,
        mesh,
        q.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


class _RingMode(TorchFunctionMode):
    """In this thread, calls of torch.attn_output go to the ring if it takes their tensors."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.attn_output:
            return self.attn_output(*args, **kwargs)
        return func(*args, **kwargs)

    def attn_output(self, q, k, v, *, is_causal=False, scale=1.0):
        dim = _sequence_dim(q, k, v)
        if dim is None:
            return torch.attn_output(q, k, v, is_causal=is_causal, scale=scale)
        options = _Options(is_causal, scale, **self.options)
        return _ring_of_dtensors(q, k, v, dim, options)


@contextmanager
def ring_attention(*, block: int = BLOCK, check: bool = True) -> Iterator[None]:
    """:func:`torch.attn_output` of DTensors runs as a ring where they are sharded by rows.

    Those are ``q``, ``k`` and ``v`` with ``Shard(-2)`` on the same one dimension of their
    mesh. DTensor's own rules gather ``k`` and ``v`` instead, and ``q`` too if causal; they
    hold for all other placements, in other threads, and outside of this context. The
    derivatives of what was called in the context run as a ring wherever they are computed.
    A backward that calls the forward again, of ``checkpoint``, needs the context as well.

    ``block`` and ``check`` are as in :func:`attn_output_ring`. Without ``check``, shards have
    the sizes that :func:`~torch.distributed.tensor.distribute_tensor` makes.
    """
    with _RingMode(block=block, check=check):
        yield
