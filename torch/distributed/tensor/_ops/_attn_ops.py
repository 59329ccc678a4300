"""Sharding strategies for attn and its backward.

Note [Sharding attn]
With attn = tanh(q kᵀ) and output = attn v, of q (*, m, d), k (*, n, d) and v (*, n, e),
and backward, with G = grad_output vᴴ + grad_attn and S = G ∘ conj(1 - attn²),

    grad_q = S conj(k),  grad_k = Sᵀ conj(q),  grad_v = attnᴴ grad_output

each row of the tables below is one way to split the work over one mesh dimension:
where the results end up if the arguments are placed so. A sum whose terms are on
different ranks is Partial. So is an average over the ranks, Partial("avg"), which also
passes through what is linear but for a constant: that is replicated, the average of
itself. What DTensor makes of the rows:

 - Of all combinations over the mesh's dimensions it takes the one for which the
   arguments are the cheapest to redistribute, and of equals the first. Replicated
   tensors are cut or turned into partial sums for free, so the replicated row is the
   first: what is replicated stays so.
 - A gradient that is None has no placement, nor has a result that is None.
"""

from collections.abc import Sequence

import torch
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import (
    expand_to_full_mesh_op_strategy,
    normalize_dim,
)
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
)


try:
    from torch.distributed.tensor._ops.utils import register_op_strategy
except ImportError:  # PyTorch 2.10
    from torch.distributed.tensor._ops.registration import register_op_strategy

aten = torch.ops.aten

# The placements of all results and arguments, on one mesh dimension.
Row = tuple[Placement | None, ...]

_R, _P, _AVG = Replicate(), Partial(), Partial("avg")
_ROWS, _COLS = Shard(-2), Shard(-1)

# output, attn, q, k, v
_FORWARD: tuple[Row, ...] = (
    (_R, _R, _R, _R, _R),
    # m: a row of q gives that row of attn, and a row of attn that row of output.
    (_ROWS, _ROWS, _ROWS, _R, _R),
    # n: a row of k gives that column of attn; output = Σ_j attn[:, j] v[j, :].
    (_P, _COLS, _R, _ROWS, _ROWS),
    # e: a column of v gives that column of output.
    (_COLS, _R, _R, _R, _COLS),
    # output is linear in v.
    (_P, _R, _R, _R, _P),
    (_AVG, _R, _R, _R, _AVG),
    # No row for d: q kᵀ is a sum over d, and tanh of a partial sum is of no use.
)

# grad_q, grad_k, grad_v, grad_output, grad_attn, q, k, v, attn
_BACKWARD: tuple[Row, ...] = (
    (_R, _R, _R, _R, _R, _R, _R, _R, _R),
    # m: S is split by rows, and so is grad_q; grad_k and grad_v are sums over rows.
    (_ROWS, _P, _P, _ROWS, _ROWS, _ROWS, _R, _R, _ROWS),
    # n: S is split by columns: these are rows of grad_k and grad_v; grad_q is a sum.
    (_P, _ROWS, _ROWS, _R, _COLS, _R, _ROWS, _ROWS, _COLS),
    # d: the columns of k are those of grad_q, the columns of q those of grad_k.
    (_COLS, _COLS, _R, _R, _R, _COLS, _COLS, _R, _R),
    # e: grad_output vᴴ is a sum over e, G too if grad_attn is, and S is linear in G.
    (_P, _P, _COLS, _COLS, _P, _R, _R, _COLS, _R),
    # G is linear in grad_output and grad_attn together, grad_v in grad_output ...
    (_P, _P, _P, _P, _P, _R, _R, _R, _R),
    # ... and G in v and grad_attn together.
    (_P, _P, _R, _R, _P, _R, _R, _P, _R),
    # The same for averages, to which what is replicated is added as it is.
    (_AVG, _AVG, _AVG, _AVG, _AVG, _R, _R, _R, _R),
    (_AVG, _AVG, _AVG, _AVG, _R, _R, _R, _R, _R),
    (_AVG, _AVG, _R, _R, _AVG, _R, _R, _AVG, _R),
    (_AVG, _AVG, _R, _R, _AVG, _R, _R, _R, _R),
    (_AVG, _AVG, _R, _R, _R, _R, _R, _AVG, _R),
)
# Only without grad_output, when v is not read and its columns may be anywhere.
_V_UNREAD = tuple((_R, _R, _R, _R, _R, _R, _R, v, _R) for v in (_COLS, _P, _AVG))

# output, q, k, v of attn_output. It has no row for m or n if it is causal: which elements
# are masked goes by the place of a row and a column in the whole.
_OUTPUT: tuple[Row, ...] = (
    (_R, _R, _R, _R),
    (_COLS, _R, _R, _COLS),
    (_P, _R, _R, _P),
    (_AVG, _R, _R, _AVG),
)
_OUTPUT_UNMASKED: tuple[Row, ...] = (
    (_ROWS, _ROWS, _R, _R),
    (_P, _R, _ROWS, _ROWS),
)
# grad_q, grad_k, grad_v, grad_output, q, k, v. attn is made again of all of q and k, so
# there is no row for d.
_OUTPUT_BACKWARD: tuple[Row, ...] = (
    (_R, _R, _R, _R, _R, _R, _R),
    (_P, _P, _COLS, _COLS, _R, _R, _COLS),
    (_P, _P, _P, _P, _R, _R, _R),
    (_P, _P, _R, _R, _R, _R, _P),
    (_AVG, _AVG, _AVG, _AVG, _R, _R, _R),
    (_AVG, _AVG, _R, _R, _R, _R, _AVG),
)
_OUTPUT_BACKWARD_UNMASKED: tuple[Row, ...] = (
    (_ROWS, _P, _P, _ROWS, _ROWS, _R, _R),
    (_P, _ROWS, _ROWS, _R, _R, _ROWS, _ROWS),
)
# The same for a batch dimension in which k and v are 1, and q is not. Shard(0) stands for
# that dimension.
_SHARED: Row = (Shard(0), Shard(0), _R, _R)
_SHARED_BACKWARD: Row = (Shard(0), _P, _P, Shard(0), Shard(0), _R, _R)

# output_tangent, grad_q, grad_k, grad_v, grad_output, q, k, v and their tangents: the double
# backward of attn_output. Its first result, without grad_output, is the operator's tangent.
_SECOND_ORDER: tuple[Row, ...] = (
    (_R,) * 11,
    # e: the columns of v and of its tangent
    (_COLS, _P, _P, _COLS, _COLS, _R, _R, _COLS, _R, _R, _COLS),
    # All is linear in v and its tangent together, and in all tangents together; the gradients
    # are in grad_output.
    (_P, _P, _P, _R, _R, _R, _R, _P, _R, _R, _P),
    (_AVG, _AVG, _AVG, _R, _R, _R, _R, _AVG, _R, _R, _AVG),
    (_P, _P, _P, _P, _R, _R, _R, _R, _P, _P, _P),
    (_AVG, _AVG, _AVG, _AVG, _R, _R, _R, _R, _AVG, _AVG, _AVG),
    (_R, _P, _P, _P, _P, _R, _R, _R, _R, _R, _R),
    (_R, _AVG, _AVG, _AVG, _AVG, _R, _R, _R, _R, _R, _R),
)
_SECOND_ORDER_UNMASKED: tuple[Row, ...] = (
    (_ROWS, _ROWS, _P, _P, _ROWS, _ROWS, _R, _R, _ROWS, _R, _R),
    (_P, _P, _ROWS, _ROWS, _R, _R, _ROWS, _ROWS, _R, _ROWS, _ROWS),
)
_SHARED_SECOND_ORDER: Row = (
    *(Shard(0), Shard(0), _P, _P),
    *(Shard(0), Shard(0), _R, _R),
    *(Shard(0), _R, _R),
)

# output_tangent, grad_q, grad_k, grad_v; grad_output, q, k, v; u of q, k, v; w of grad_output, q,
# k, v: attn_output's third order.
_THIRD_ORDER: tuple[Row, ...] = (
    (_R,) * 15,
    # e: the columns of v, of its tangents and of what is as the output is
    (
        *(_COLS, _P, _P, _COLS),
        *(_COLS, _R, _R, _COLS),
        *(_R, _R, _COLS),
        *(_COLS, _R, _R, _COLS),
    ),
    # All is linear in v and its tangents together, in u, and in w; the gradients are in
    # grad_output and its tangent together.
    *(
        row
        for x in (_P, _AVG)
        for row in (
            (x, x, x, _R, _R, _R, _R, x, _R, _R, x, _R, _R, _R, x),
            (x, x, x, x, _R, _R, _R, _R, x, x, x, _R, _R, _R, _R),
            (x, x, x, x, _R, _R, _R, _R, _R, _R, _R, x, x, x, x),
            (_R, x, x, x, x, _R, _R, _R, _R, _R, _R, x, _R, _R, _R),
        )
    ),
)
_THIRD_ORDER_UNMASKED: tuple[Row, ...] = (
    (
        *(_ROWS, _ROWS, _P, _P),
        *(_ROWS, _ROWS, _R, _R),
        *(_ROWS, _R, _R),
        *(_ROWS, _ROWS, _R, _R),
    ),
    (
        *(_P, _P, _ROWS, _ROWS),
        *(_R, _R, _ROWS, _ROWS),
        *(_R, _ROWS, _ROWS),
        *(_R, _R, _ROWS, _ROWS),
    ),
)
_SHARED_THIRD_ORDER: Row = (
    *(Shard(0), Shard(0), _P, _P),
    *(Shard(0), Shard(0), _R, _R),
    *(Shard(0), _R, _R),
    *(Shard(0), Shard(0), _R, _R),
)


# The kinds of Partial that a replicated tensor can be turned into. Older releases know
# only the sum, newer ones the average too.
_MADE = getattr(Partial, "LINEAR_REDUCE_OPS", ("sum",))


def _fits(wanted: Placement, given: Placement) -> bool:
    """Whether what is given can be made what is wanted: not every release asks that."""
    if not wanted.is_partial():
        return True
    if not given.is_partial():
        return wanted.reduce_op in _MADE
    # Not == : a subclass of Partial is no plain sum, and may compare equal to one.
    return type(given) is Partial and given.reduce_op == wanted.reduce_op


def _expand(
    op_schema: OpSchema, rows: Sequence[Row], input_index: int, shared: Row = ()
) -> OpStrategy:
    """The rows, and one for each batch dimension, over all of the mesh.

    Where k has 1 in place of such a dimension of q, that is ``shared``.
    """
    args = op_schema.args_strategy
    names = [
        argument.name
        for argument, arg in zip(op_schema.op._schema.arguments, op_schema.args_schema)
        if isinstance(arg, OpStrategy)
    ]
    specs = [arg.strategies[0].output_spec for arg in args]
    mesh = specs[0].mesh
    for name, spec in zip(names, specs):
        if spec.mesh != mesh:
            raise RuntimeError(
                f"{op_schema.op}: DTensor does not support cross-mesh operation, but "
                f"got {names[0]} on {mesh} and {name} on {spec.mesh}"
            )

    def normalized(placement: Placement | None) -> Placement | None:
        if isinstance(placement, Shard):
            return Shard(normalize_dim(placement.dim, ndim))
        return placement

    ndim = specs[0].ndim
    q_sizes, k_sizes = (specs[names.index(name)].shape for name in "qk")
    # In a batch, each matrix is a problem of its own.
    whole = tuple(x and Shard(0) for x in rows[0])
    batch = (
        tuple(Shard(dim) if isinstance(x, Shard) else x for x in row)
        for dim in range(ndim - 2)
        for row in ([shared] if shared and q_sizes[dim] != k_sizes[dim] else [whole])
    )
    expanded = expand_to_full_mesh_op_strategy(
        mesh,
        op_schema,
        [[normalized(x) for x in row] for row in (*rows, *batch)],
        input_index=input_index,
    )
    expanded.strategies = [
        strategy
        for strategy in expanded.strategies
        if all(
            _fits(*pair)
            for wanted, given in zip(strategy.input_specs, specs)
            for pair in zip(wanted.placements, given.placements)
        )
    ]
    return expanded


def _of_existing(
    rows: Sequence[Row], exists: Sequence[bool], results: int
) -> tuple[Row, ...]:
    """The rows without what is None; of those for the same arguments the first."""
    found: dict[Row, Row] = {}
    for row in rows:
        row = tuple(x if there else None for x, there in zip(row, exists))
        found.setdefault(row[results:], row)
    return tuple(found.values())


# PyTorch 2.6 passes the mesh before the schema, later releases the schema alone.
@register_op_strategy(aten.attn.default)
def attn_strategy(*args) -> OpStrategy:
    """Each of attn's two results, by rows, keys, columns of v or batch."""
    return _expand(args[-1], _FORWARD, input_index=2)


# What is None among the arguments, and output_mask, decide which results there are:
# the cached strategy is for these too.
@register_op_strategy(
    aten._attn_backward.default, schema_info=RuntimeSchemaInfo(static_argnum=0)
)
def attn_backward_strategy(*args) -> OpStrategy:
    """The gradients of attn that there are, split like the forward or by d."""
    op_schema = args[-1]
    grads, output_mask = op_schema.args_schema[:2], op_schema.args_schema[6]
    has_output, has_attn = (isinstance(grad, OpStrategy) for grad in grads)
    exists = [
        *(wanted and (has_output or has_attn) for wanted in output_mask[:2]),
        output_mask[2] and has_output,
        has_output,
        has_attn,
        *[True] * 4,  # q, k, v, attn
    ]
    replicated, *split = _BACKWARD
    # Before the rows that give partial results for the same placements.
    unread = () if has_output else _V_UNREAD
    rows = _of_existing((replicated, *unread, *split), exists, results=3)
    return _expand(op_schema, rows, input_index=3)


@register_op_strategy(
    aten.attn_output.default,
    schema_info=RuntimeSchemaInfo(static_kwargkey=["is_causal"]),
)
def attn_output_strategy(*args) -> OpStrategy:
    """attn_output by rows and keys unless it is causal, by columns of v or batch."""
    op_schema = args[-1]
    is_causal = op_schema.kwargs_schema.get("is_causal", False)
    rows = _OUTPUT if is_causal else (*_OUTPUT, *_OUTPUT_UNMASKED)
    return _expand(op_schema, rows, input_index=1, shared=_SHARED)


@register_op_strategy(
    aten._attn_output_backward.default,
    schema_info=RuntimeSchemaInfo(static_argnum=4),
)
def attn_output_backward_strategy(*args) -> OpStrategy:
    """The gradients of attn_output that there are, split like the forward."""
    op_schema = args[-1]
    is_causal, _, output_mask = op_schema.args_schema[4:7]
    every = _OUTPUT_BACKWARD
    if not is_causal:
        every += _OUTPUT_BACKWARD_UNMASKED
    exists = [*output_mask, *[True] * 4]
    rows = _of_existing(every, exists, results=3)
    (shared,) = _of_existing([_SHARED_BACKWARD], exists, results=3)
    return _expand(op_schema, rows, input_index=3, shared=shared)


def _second_order_rows(is_causal: bool) -> tuple[Row, ...]:
    return _SECOND_ORDER if is_causal else (*_SECOND_ORDER, *_SECOND_ORDER_UNMASKED)


@register_op_strategy(
    aten._attn_output_jvp.default, schema_info=RuntimeSchemaInfo(static_argnum=0)
)
def attn_output_jvp_strategy(*args) -> OpStrategy:
    """The tangent of attn_output, split like the forward."""
    op_schema = args[-1]
    *tangents, is_causal = op_schema.args_schema[3:7]
    exists = [*[True] * 4, *(isinstance(x, OpStrategy) for x in tangents)]
    rows, (shared,) = (
        _of_existing([(row[0], *row[5:]) for row in of_all], exists, results=1)
        for of_all in (_second_order_rows(is_causal), [_SHARED_SECOND_ORDER])
    )
    return _expand(op_schema, rows, input_index=1, shared=shared)


@register_op_strategy(
    aten._attn_output_double_backward.default,
    schema_info=RuntimeSchemaInfo(static_argnum=0),
)
def attn_output_double_backward_strategy(*args) -> OpStrategy:
    """The second derivatives of attn_output that there are, split like the backward."""
    op_schema = args[-1]
    *tangents, is_causal, _, output_mask = op_schema.args_schema[4:10]
    given = [isinstance(x, OpStrategy) for x in tangents]
    has_any, has_scores = any(given), any(given[:2])
    exists = [
        *(wanted and has_any for wanted in output_mask[:3]),
        output_mask[3] and has_scores,
        *[True] * 4,  # grad_output, q, k, v
        *given,
    ]
    rows, (shared,) = (
        _of_existing(of_all, exists, results=4)
        for of_all in (_second_order_rows(is_causal), [_SHARED_SECOND_ORDER])
    )
    return _expand(op_schema, rows, input_index=4, shared=shared)


@register_op_strategy(
    aten._attn_output_triple_backward.default,
    schema_info=RuntimeSchemaInfo(static_argnum=0),
)
def attn_output_triple_backward_strategy(*args) -> OpStrategy:
    """The third order of attn_output that there is, split like the backward."""
    op_schema = args[-1]
    *tensors, is_causal, _, output_mask = op_schema.args_schema[:14]
    given = [isinstance(x, OpStrategy) for x in tensors]
    has_grad, _, _, _, u_q, u_k, u_v, has_w_grad, w_q, w_k, w_v = given
    has_u, has_w = u_q or u_k, w_q or w_k
    has_output = (has_u and has_w) or (has_u and w_v) or (has_w and u_v)
    has_scores = (has_grad and has_output) or (has_w_grad and (has_u or u_v))
    has_v = has_u and ((has_grad and has_w) or has_w_grad)
    there = (has_output, has_scores, has_scores, has_v)
    exists = [*(x and wanted for x, wanted in zip(there, output_mask)), *given]
    every = _THIRD_ORDER if is_causal else (*_THIRD_ORDER, *_THIRD_ORDER_UNMASKED)
    rows, (shared,) = (
        _of_existing(of_all, exists, results=4)
        for of_all in (every, [_SHARED_THIRD_ORDER])
    )
    return _expand(op_schema, rows, input_index=4, shared=shared)
