"""The operators by the fused kernels, with what the stable ABI has no place for: all derivatives.

An operator of the library computes. A Function outside of it differentiates: by other operators up
to the third order of attn_output, and else by differentiating the same function in composed.py.
"""

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function, forward_ad
from torch.func import vjp

from torch_attn import composed
from torch_attn.composed import Mask, Results

Op = Callable[..., Any]
Dims = Sequence[int | None]
Tensors = Sequence[Tensor | None]

# A library for each set of instructions, of which ATEN_CPU_CAPABILITY may name a lower one.
_libraries = {file.stem: file for file in Path(__file__).parent.glob("*.so")}
capability = torch.backends.cpu.get_cpu_capability()
if capability not in _libraries:
    capability = "DEFAULT"
torch.ops.load_library(_libraries[capability])  # type: ignore[no-untyped-call]
_ops = torch.ops.torch_attn
_registrations: Any = torch.library.Library("torch_attn", "FRAGMENT")  # type: ignore[no-untyped-call]
# PyTorch's builds for CUDA bring the first one, those for ROCm and XPU the others.
TRITON = "triton", "triton-rocm", "triton-xpu"
LEAST_TRITON = 3, 6
# What Function.apply extends. Dynamo of 2.10 fails where it meets a call of it by super().
_apply: Op = torch._C._FunctionBase.__dict__["apply"]


class Result(NamedTuple):
    """What `attn` returns."""

    output: Tensor
    attn: Tensor


def attn(q: Tensor, k: Tensor, v: Tensor) -> Result:
    """Attention whose scores pass through a hyperbolic tangent: attn = tanh(q kᵀ), output = attn v.

    Args:
        q: the queries, of shape (*, m, d).
        k: the keys, of shape (*, n, d).
        v: the values, of shape (*, n, e).

    `*` is any number of batch dimensions, the same for all three: there is no broadcasting, but an
    operand that the samples share can be passed expanded. All three have one floating point or
    complex dtype (half, bfloat16, float, double, cfloat or cdouble) and are on one device. On a
    CPU, real ones of at most 1024 columns are fused.

    Returns:
        A namedtuple of `output`, of shape (*, m, e), and `attn`, of shape (*, m, n). Both are
        differentiable, any number of times, in reverse and in forward mode.

    Raises:
        RuntimeError: if dtypes, devices or sizes are not as described.
    """
    if torch.compiler.is_dynamo_compiling():
        _allow_in_graph()
        return Result(*_traced_attn(q, k, v))
    return Result(*_attn(q, k, v))


def attn_output(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float = 1.0
) -> Tensor:
    """The output of `attn` alone: attn = tanh(scale q kᵀ), output = attn v.

    Where `attn` is fused, the m x n matrix exists only as tiles, also in the derivatives up to the
    third order, which compute them again.

    Args:
        q, k, v: as for `attn`, but batch dimensions of both k and v may be 1, so that samples of q
            share them.
        is_causal: whether query i sees keys j <= i alone: attn is 0 elsewhere.
        scale: by what the scores are multiplied.

    Returns:
        `output`, of shape (*, m, e).

    Raises:
        RuntimeError: as `attn` does.
        TypeError: if is_causal is no bool, or scale no number; None is none.
    """
    if type(is_causal) is not bool or type(scale) is not float:
        scale = _checked_scale(is_causal, scale)
    if torch.compiler.is_dynamo_compiling():
        _allow_in_graph()
        return _traced_attn_output(q, k, v, is_causal, scale)
    return _attn_output(q, k, v, is_causal, scale)


def _checked_scale(is_causal: bool, scale: float) -> float:
    """Returns the scale as an operator of PyTorch's own takes it, or raises what that raises."""
    wrong = "attn_output(): argument '{}' must be {}, not {}"
    if not isinstance(is_causal, bool):
        raise TypeError(wrong.format("is_causal", "bool", type(is_causal).__name__))
    if isinstance(scale, (torch.SymFloat, torch.SymInt)):
        return scale
    is_scalar = getattr(scale, "ndim", None) == 0 and not getattr(scale, "requires_grad", False)
    if isinstance(scale, complex) or not (isinstance(scale, (int, float)) or is_scalar):
        raise TypeError(wrong.format("scale", "float", type(scale).__name__))
    return float(scale)


def _attn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = _autocast(q, k, v)
    found: tuple[Tensor, Tensor] = _call(_Attn, _needs_grad("attn", q, k, v), q, k, v)
    return found


def _attn_output(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    q, k, v = _autocast(q, k, v)
    needs_grad = _needs_grad("attn_output", q, k, v)
    output: Tensor = _call(_AttnOutput, needs_grad, q, k, v, is_causal, scale)
    return output


# A compiled graph calls the following two. Under jvp they are composed, for not every release
# traces the jvp of a Function.


def _traced_attn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return (composed.attn if _in_jvp() else _attn)(q, k, v)


def _traced_attn_output(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    return (composed.attn_output if _in_jvp() else _attn_output)(q, k, v, is_causal, scale)


def _in_jvp() -> bool:
    layers = torch._C._functorch.get_interpreter_stack() or ()
    return any(x.key() == torch._C._functorch.TransformType.Jvp for x in layers)


def _allow_in_graph() -> None:
    """Leaves them to AOTAutograd: Dynamo can't trace a Function that has a gradient and a jvp."""
    if forward_ad._current_level >= 0 and not torch._C._are_functorch_transforms_active():
        # A compiled graph is given tensors without their tangents.
        raise RuntimeError("torch_attn: in torch.compile, forward AD must be torch.func's")
    torch.compiler.allow_in_graph([_traced_attn, _traced_attn_output])  # type: ignore[no-untyped-call]


# Dynamo calls such a function while it traces. To call it now, or torch.compiler's own decorator,
# would import Dynamo, which takes longer than torch itself.
_allow_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _autocast(*inputs: Tensor) -> Sequence[Tensor]:
    if not torch._C._is_any_autocast_enabled():
        return inputs
    device = inputs[0].device.type
    if not torch.is_autocast_enabled(device):
        return inputs
    to = torch.get_autocast_dtype(device)
    stay = torch.double, torch.cfloat, torch.cdouble
    return [x if x.dtype in stay or not x.is_floating_point() else x.to(to) for x in inputs]


def _needs_grad(op: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    try:
        return True in (q.requires_grad, k.requires_grad, v.requires_grad)
    except AttributeError:
        pass
    at, x = next((i, x) for i, x in enumerate((q, k, v)) if not isinstance(x, Tensor))
    where = f"{op}(): argument '{'qkv'[at]}' (position {at + 1})"
    raise TypeError(f"{where} must be Tensor, not {type(x).__name__}")


def _call(function: Any, needs_grad: bool, *args: Any) -> Any:
    """Calls the Function, or its operator alone where nothing is to be differentiated."""
    transformed = torch._C._are_functorch_transforms_active()
    if transformed or needs_grad and torch.is_grad_enabled() or forward_ad._current_level >= 0:
        args = unwrap_dead_wrappers(args)  # what a transform that is over has saved
        if transformed:
            return function.apply(*args)
        # Function.apply would do the same, but it looks up a signature, which takes longer.
        return _apply(function, *args)
    return function.op(*args)


class _Fused(Function):
    """Computes `op`. Its derivatives are those of `formula`, unless a subclass has faster ones."""

    # Of the subclasses, with the same arguments.
    op: ClassVar[Op]
    formula: ClassVar[Op]

    @classmethod
    def paths(cls, saved: Tensors) -> Sequence[Sequence[int]]:
        """Returns which arguments each result of the formula depends on."""
        raise NotImplementedError

    @classmethod
    def forward(cls, *args: Any) -> Any:
        return cls.op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @classmethod
    def backward(cls, ctx: Any, *grads: Tensor | None) -> Results:
        given = zip(cls.paths(ctx.saved_tensors), grads, strict=True)
        reached = {i for path, grad in given if grad is not None for i in path}
        at = [i for i, needed in enumerate(ctx.needs_input_grad) if needed and i in reached]
        results, pull = cls._linearize(ctx.saved_tensors, ctx.others, at)
        pairs = [(y, u) for y, u in zip(results, grads, strict=True) if y is not None]
        pulled = pull(tuple(torch.zeros_like(y) if u is None else u for y, u in pairs))
        found = dict(zip(at, pulled, strict=True))
        return tuple(map(found.get, range(len(ctx.others))))

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Tensor | None) -> Any:
        at = [i for i, tangent in enumerate(tangents) if tangent is not None]
        saved = ctx.saved_tensors
        # Autograd has switched forward AD off, of outer transforms too.
        with forward_ad._set_fwd_grad_enabled(True):
            # The pullback u -> J^H u is linear. Its own pullback takes the tangents to J tangents.
            results, pull = cls._linearize(_primal(saved), ctx.others, at)
            _, push = vjp(pull, tuple(y for y in results if y is not None))[:2]
            (pushed,) = push(tuple(tangents[i] for i in at))
        each = iter(pushed)
        found = tuple(None if y is None else next(each) for y in results)
        return found if len(found) > 1 else found[0]

    @classmethod
    def _linearize(
        cls, saved: Tensors, others: Sequence[Any], at: Sequence[int]
    ) -> tuple[Tensors, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
        """Returns `formula`'s results, and the pullback from them to the arguments `at`."""
        saved = unwrap_dead_wrappers(tuple(saved[: len(others)]))
        args = _args_of(saved, others)
        results: Results = ()

        def of(*some: Tensor) -> tuple[Tensor, ...]:
            nonlocal results
            given = args.copy()
            for i, x in zip(at, some, strict=True):
                given[i] = x
            found = cls.formula(*given)
            results = found if isinstance(found, tuple) else (found,)
            return tuple(y for y in results if y is not None)

        values, pull = vjp(of, *(args[i] for i in at))[:2]  # By its type there may be a third.
        each = iter(values)
        return [None if y is None else next(each) for y in results], pull

    @classmethod
    def vmap(cls, info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        """Makes the samples one more batch dimension, in front."""
        size = info.batch_size
        batched = [
            x if not isinstance(x, Tensor) else _in_front(x, dim, size)
            for x, dim in zip(args, in_dims, strict=True)
        ]
        results = _call(cls, True, *batched)
        if isinstance(results, tuple):
            return results, tuple(None if y is None else 0 for y in results)
        return results, 0


def _in_front(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _sizes(args: Sequence[Any], in_dims: Dims) -> list[list[int]]:
    """The sizes that one sample has of q, k and v."""
    kept = [list(x.shape) for x in args[:3]]
    for size, dim in zip(kept, in_dims, strict=False):
        if dim is not None:
            del size[dim]
    return kept


class _Attn(_Fused):
    op, formula = _ops.attn.default, composed.attn

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.others = (None, None, None)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return _call(_AttnBackward, True, *grads, *ctx.saved_tensors, ctx.needs_input_grad)

    @classmethod
    def vmap(cls, info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        composed.check("attn", *args, sizes=_sizes(args, in_dims))
        return super().vmap(info, in_dims, *args)


class _AttnBackward(_Fused):
    op, formula = _ops._attn_backward.default, composed.attn_backward

    @classmethod
    def paths(cls, saved: Tensors) -> Sequence[Sequence[int]]:
        v = () if saved[0] is None else (4,)  # which is beside grad_output only
        return (0, 1, 3, *v, 5), (0, 1, 2, *v, 5), (0, 5)


class _Gradients(NamedTuple):
    """The gradients of L = <G, attn_output> and of its derivatives at q, k and v.

    The methods take G, which they write as `grad`, tangents of q, k and v, of which any may be
    None, that is zero, and which gradients are wanted: those by G, q, k and v. They return four,
    each None if it is not wanted, or zero.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool
    scale: float

    def jvp(self, tangents: Tensors) -> Tensor | None:
        """The derivative of attn_output along tangents."""
        if not _any(tangents):
            return None
        options = self.is_causal, self.scale
        found: Tensor = _call(_AttnOutputJvp, True, *self[:3], *tangents, *options)
        return found

    def first(self, grad: Tensor | None, wanted: Mask) -> Results:
        """Those of L, but for that by G."""
        if grad is None or not any(wanted[1:]):
            return (None,) * 4
        return None, *_call(_AttnOutputBackward, True, grad, *self, wanted[1:])

    def second(self, grad: Tensor | None, u: Tensors, wanted: Mask) -> Results:
        """Those of D(u) L."""
        if not _any(u) or not any(wanted):
            return (None,) * 4
        if grad is None:
            return self.jvp(u) if wanted[0] else None, None, None, None
        options = self.is_causal, self.scale, wanted
        args = grad, *self[:3], *u, *options
        of_all: Results = _call(_AttnOutputDoubleBackward, True, *args)
        return of_all

    def third(
        self, grad: Tensor | None, u: Tensors, w_grad: Tensor | None, w: Tensors, wanted: Mask
    ) -> Results:
        """Those of D(w) D(u) L, where w has a tangent w_grad of G, too."""
        if _any(u[:2]) and _any(w[:2]):
            options = self.is_causal, self.scale, wanted
            args = grad, *self[:3], *u, w_grad, *w, *options
            of_all: Results = _call(_AttnOutputTripleBackward, True, *args)
            return of_all
        # L is linear in G, and in v: a tangent takes its place.
        found = self.second(w_grad, u, (False, *wanted[1:]))
        for with_v, other in ((u, w), (w, u)):
            if with_v[2] is not None and _any(other[:2]):
                at = self._replace(v=with_v[2])
                found = _add(found, at.second(grad, (*other[:2], None), (*wanted[:3], False)))
        return found


def _any(tensors: Tensors) -> bool:
    return any(x is not None for x in tensors)


def _add(xs: Tensors, ys: Tensors) -> Results:
    """Adds tensors, of which each may be None, that is zero."""
    pairs = zip(xs, ys, strict=True)
    return tuple(y if x is None else x if y is None else x + y for x, y in pairs)


class _OfAttnOutput(_Fused):
    """attn_output or a derivative of it, whose own derivatives a subclass gives as _Gradients."""

    rows: ClassVar[Sequence[int]] = ()  # which arguments have rows of q
    keys: ClassVar[Sequence[int]] = ()  # and which of k
    # Of the subclasses: takes the arguments, and a tangent or None for each.
    push: ClassVar[Op | None] = None

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Tensor | None) -> Any:
        if cls.push is None:
            return super().jvp(ctx, *tangents)
        # Autograd has switched forward AD off, of outer transforms too.
        with forward_ad._set_fwd_grad_enabled(True):
            saved = unwrap_dead_wrappers(ctx.saved_tensors)
            return cls.push(_args_of(_primal(saved), ctx.others), tangents)

    @classmethod
    def vmap(cls, info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        """Computes nothing twice where samples share k and v and want no gradient of these.

        Then their rows are queries of one attn_output or, if it is causal, they share k and v as
        heads of a group do.
        """
        is_causal, _, *masks = args[len(cls.rows) + len(cls.keys) :]
        if any(in_dims[i] is not None for i in cls.keys) or any(any(x[-2:]) for x in masks):
            return super().vmap(info, in_dims, *args)
        given, dims, size = list(args), list(in_dims), info.batch_size
        if is_causal:
            for i in cls.keys:
                if given[i] is not None:
                    given[i], dims[i] = given[i].unsqueeze(0), 0
            return super().vmap(info, dims, *given)
        for i in cls.rows:
            if given[i] is not None:
                of_samples = _in_front(given[i], in_dims[i], size).movedim(0, -3)
                sizes = of_samples.shape[-3:-1]
                given[i] = of_samples.flatten(-3, -2)
        results = _call(cls, True, *given)
        dims_of = _each(results, lambda x: x.dim() - 2)
        return _each(results, lambda x: torch.unflatten(x, -2, sizes)), dims_of


def _primal(saved: Tensors) -> Tensors:
    unpack: Op = forward_ad.unpack_dual
    return [x if x is None else unpack(x, level=0).primal for x in saved]


def _args_of(saved: Tensors, others: Sequence[Any]) -> list[Any]:
    return [other if x is None else x for x, other in zip(saved, others, strict=True)]


def _each(results: Tensor | Results, function: Callable[[Tensor], object]) -> object:
    if isinstance(results, Tensor):
        return function(results)
    return tuple(None if x is None else function(x) for x in results)


class _AttnOutput(_OfAttnOutput):
    rows, keys = (0,), (1, 2)

    @staticmethod
    def op(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Any:
        return _ops.attn_output.default(q, k, v, is_causal=is_causal, scale=scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Results:
        at = _Gradients(*_args_of(ctx.saved_tensors, ctx.others))
        return *at.first(grads[0], (False, *ctx.needs_input_grad[:3]))[1:], None, None

    @staticmethod
    def push(args: Sequence[Any], tangents: Tensors) -> Tensor | None:
        return _Gradients(*args).jvp(tangents[:3])

    @classmethod
    def vmap(cls, info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
        composed.check("attn_output", *args[:3], grouped=True, sizes=_sizes(args, in_dims))
        return super().vmap(info, in_dims, *args)


class _AttnOutputBackward(_OfAttnOutput):
    op = _ops._attn_output_backward.default
    rows, keys = (0, 1), (2, 3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Results:
        grad, *x, _ = _args_of(ctx.saved_tensors, ctx.others)
        return *_Gradients(*x).second(grad, grads, ctx.needs_input_grad[:4]), None, None, None

    @staticmethod
    def push(args: Sequence[Any], tangents: Tensors) -> Results:
        grad, *x, mask = args
        wanted = False, *mask
        at = _Gradients(*x)  # linear in grad
        return _add(at.second(grad, tangents[1:4], wanted), at.first(tangents[0], wanted))[1:]


class _AttnOutputJvp(_OfAttnOutput):
    op = _ops._attn_output_jvp.default
    rows, keys = (0, 3), (1, 2, 4, 5)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Results:
        at, u = _AttnOutputJvp.split(_args_of(ctx.saved_tensors, ctx.others))
        needs = ctx.needs_input_grad
        of_x = at.second(grads[0], u, (False, *needs[:3]))[1:]
        of_u = at.first(grads[0], (False, *needs[3:6]))[1:]
        return *of_x, *of_u, None, None

    @staticmethod
    def push(args: Sequence[Any], tangents: Tensors) -> Tensor | None:
        at, u = _AttnOutputJvp.split(args)
        along = at.third(None, u, None, tangents[:3], (True, False, False, False))
        return _add(along[:1], [at.jvp(tangents[3:6])])[0]

    @staticmethod
    def split(args: Sequence[Any]) -> tuple[_Gradients, Sequence[Any]]:
        return _Gradients(*args[:3], *args[6:]), args[3:6]


class _AttnOutputDoubleBackward(_OfAttnOutput):
    op = _ops._attn_output_double_backward.default
    rows, keys = (0, 1, 4), (2, 3, 5, 6)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Results:
        w_grad, *w = grads
        args = _args_of(ctx.saved_tensors, ctx.others)
        at, (grad, *_), u = _Gradients(*args[1:4], *args[7:9]), args, args[4:7]
        needs, of_u = ctx.needs_input_grad, (False, *ctx.needs_input_grad[4:7])
        along = _add(at.second(grad, w, of_u), at.first(w_grad, of_u))[1:]
        return *at.third(grad, u, w_grad, w, needs[:4]), *along, None, None, None

    @staticmethod
    def push(args: Sequence[Any], tangents: Tensors) -> Results:
        at, (grad, *_), u = _Gradients(*args[1:4], *args[7:9]), args, args[4:7]
        w_grad, w, u_tangents = tangents[0], tangents[1:4], tangents[4:7]
        along = at.third(grad, u, w_grad, w, args[9])
        return _add(along, at.second(grad, u_tangents, args[9]))


class _AttnOutputTripleBackward(_OfAttnOutput):
    op = _ops._attn_output_triple_backward.default
    formula = composed.attn_output_triple_backward
    rows, keys = (0, 1, 4, 7, 8), (2, 3, 5, 6, 9, 10)

    @classmethod
    def paths(cls, saved: Tensors) -> Sequence[Sequence[int]]:
        return (range(11),) * 4

    @classmethod
    def backward(cls, ctx: Any, *grads: Tensor | None) -> Results:
        grad, *h = grads
        if _any(h):  # fourth derivatives
            return super().backward(ctx, *grads)
        # The gradients of D(w) D(u) L for this `grad`.
        args, needs = _args_of(ctx.saved_tensors, ctx.others), ctx.needs_input_grad
        at, u, w = _Gradients(*args[1:4], *args[11:13]), args[4:7], args[8:11]
        of_x = at.third(grad, u, None, w, (False, *needs[1:4]))[1:]
        of_u = at.second(grad, w, (False, *needs[4:7]))[1:]
        of_w = at.second(grad, u, (False, *needs[8:11]))[1:]
        return None, *of_x, *of_u, None, *of_w, None, None, None


# The library computes on a CPU alone. The following has the operators' results for tensors without
# values and on other devices, by Triton or composed, and what the library asks for where its
# kernels don't fit.


def _fake_attn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    composed.check("attn", q, k, v)
    return q.new_empty(composed.output_size(q, v)), q.new_empty((*q.shape[:-1], k.shape[-2]))


def _fake_attn_backward(*args: Any) -> Results:
    composed.check_backward(*args[:6])
    return _empty(composed.attn_backward, args, args[2:5])


def _fake_attn_output(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float = 1.0
) -> Tensor:
    composed.check("attn_output", q, k, v, grouped=True)
    return q.new_empty(composed.output_size(q, v))


def _fake_attn_output_backward(*args: Any) -> Results:
    composed.attn_output_backward.check(*args)
    return _empty(composed.attn_output_backward, args, args[1:4])


def _fake_attn_output_jvp(q: Tensor, k: Tensor, v: Tensor, *tangents: Any) -> Tensor:
    composed.attn_output_jvp.check(q, k, v, *tangents)
    return q.new_empty(composed.output_size(q, v))


def _fake_of_higher_order(formula: composed.Derivative) -> Op:
    def fake(*args: Any) -> Results:
        formula.check(*args)
        q, k, v = args[1:4]
        return _empty(formula, args, (q.new_empty(composed.output_size(q, v)), q, k, v))

    return fake


def _empty(formula: Op, args: Iterable[Any], likes: Iterable[Tensor]) -> Results:
    """New tensors like `likes`, or None where the formula has none whatever the numbers are."""
    one = torch.empty(1, 1, device="meta")
    results = formula(*(one if isinstance(x, Tensor) else x for x in args))
    pairs = zip(results, likes, strict=True)
    return tuple(y if y is None else x.new_empty(x.shape) for y, x in pairs)


def _wrong(function: Op) -> Callable[..., str]:
    """Says, instead of computing, what is wrong with the arguments."""

    def wrong(*args: Any, **options: Any) -> str:
        try:
            function(*args, **options)
        except RuntimeError as error:
            return str(error)
        return ""

    return wrong


def _plain(function: Op) -> Op:
    """Leaves autograd to the Functions, as the library's operators do."""

    # Below autograd's keys, a product of sparse matrices would be zero.
    def plain(*args: Any, **options: Any) -> Any:
        with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
            return function(*args, **options)

    return plain


def _triton_of(key: str) -> tuple[dict[str, tuple[Op, Op]], str]:
    """Returns the Triton kernels for a dispatch key's devices, and which version, or why not."""
    cuda = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    if not {"CUDA": cuda, "XPU": torch.xpu._is_compiled()}[key]:
        return {}, f"this torch is built without {key}"
    installed = [d.version for name in TRITON for d in distributions(name=name)]
    if not installed:
        return {}, "there is no Triton"
    found, *_ = installed
    if tuple(map(int, found.split(".")[:2])) < LEAST_TRITON:
        return {}, f"Triton is {found}, older than {'.'.join(map(str, LEAST_TRITON))}"
    # In a clone it is elsewhere.
    from torch_attn import triton_impl  # type: ignore[attr-defined, unused-ignore]

    return triton_impl.KERNELS, f"Triton {found}"


def _unless(taken: Op, impl: Op, otherwise: Op) -> Op:
    """Calls `impl` if the call is `taken`."""

    def kernel(*args: Any, **options: Any) -> Any:
        return (impl if taken(*args, **options) else otherwise)(*args, **options)

    return kernel


triton = {key: _triton_of(key) for key in ("CUDA", "XPU")}
_double, _triple = composed.attn_output_double_backward, composed.attn_output_triple_backward
for _name, _formula, _fake in (
    ("attn", composed.attn, _fake_attn),
    ("_attn_backward", composed.attn_backward, _fake_attn_backward),
    ("attn_output", composed.attn_output, _fake_attn_output),
    ("_attn_output_backward", composed.attn_output_backward, _fake_attn_output_backward),
    ("_attn_output_jvp", composed.attn_output_jvp, _fake_attn_output_jvp),
    ("_attn_output_double_backward", _double, _fake_of_higher_order(_double)),
    ("_attn_output_triple_backward", _triple, _fake_of_higher_order(_triple)),
):
    _composed = _plain(_formula)
    _arguments, _, _results = str(getattr(_ops, _name).default._schema).partition(" -> ")
    _arguments = _arguments.partition("(")[2]
    for _prefix, _kernel, _found in (
        ("_wrong_", _wrong(_fake), "str"),
        ("_composed_", _composed, _results),
    ):
        _called = _prefix + _name.removeprefix("_")
        _registrations.define(f"{_called}({_arguments} -> {_found}")
        _registrations.impl(_called, _kernel, "CompositeExplicitAutograd")
    _registrations.impl(_name, _composed, "CompositeExplicitAutograd")
    for _key, (_kernels, _) in triton.items():
        if _name in _kernels:
            _registrations.impl(_name, _unless(*_kernels[_name], _composed), _key)
    torch.library.register_fake(f"torch_attn::{_name}", _fake, lib=_registrations)
