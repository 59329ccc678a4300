"""The operators by the fused kernels, with what the stable ABI has no place for: all derivatives.

An operator of the library computes. A Function outside of it differentiates: its own gradient is
fused too, and all other derivatives are those of the same function in composed.py.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function, forward_ad
from torch.func import vjp

from torch_attn import composed

# A library for each set of instructions, of which ATEN_CPU_CAPABILITY may name a lower one.
_libraries = {file.stem: file for file in Path(__file__).parent.glob("*.so")}
capability = torch.backends.cpu.get_cpu_capability()
if capability not in _libraries:
    capability = "DEFAULT"
torch.ops.load_library(_libraries[capability])
_ops = torch.ops.torch_attn
_registrations = torch.library.Library("torch_attn", "FRAGMENT")


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

    Where `attn` is fused, the m x n matrix exists only as tiles, also in the backward, which
    computes them again. Forward AD and second derivatives take the whole matrix.

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


def _checked_scale(is_causal, scale):
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


def _attn(q, k, v):
    q, k, v = _autocast(q, k, v)
    return _call(_Attn, _needs_grad("attn", q, k, v), q, k, v)


def _attn_output(q, k, v, is_causal, scale):
    q, k, v = _autocast(q, k, v)
    return _call(_AttnOutput, _needs_grad("attn_output", q, k, v), q, k, v, is_causal, scale)


# A compiled graph calls the following two. Under jvp they are composed, for not every release
# traces the jvp of a Function.


def _traced_attn(q, k, v):
    return (composed.attn if _in_jvp() else _attn)(q, k, v)


def _traced_attn_output(q, k, v, is_causal, scale):
    return (composed.attn_output if _in_jvp() else _attn_output)(q, k, v, is_causal, scale)


def _in_jvp():
    layers = torch._C._functorch.get_interpreter_stack() or ()
    return any(x.key() == torch._C._functorch.TransformType.Jvp for x in layers)


def _allow_in_graph():
    """Leaves them to AOTAutograd: Dynamo can't trace a Function that has a gradient and a jvp."""
    if forward_ad._current_level >= 0 and not torch._C._are_functorch_transforms_active():
        # A compiled graph is given tensors without their tangents.
        raise RuntimeError("torch_attn: in torch.compile, forward AD must be torch.func's")
    torch.compiler.allow_in_graph([_traced_attn, _traced_attn_output])


# Dynamo calls such a function while it traces. To call it now, or torch.compiler's own decorator,
# would import Dynamo, which takes longer than torch itself.
_allow_in_graph._dynamo_marked_constant = True


def _autocast(*inputs):
    if not torch._C._is_any_autocast_enabled():
        return inputs
    device = inputs[0].device.type
    if not torch.is_autocast_enabled(device):
        return inputs
    to = torch.get_autocast_dtype(device)
    stay = torch.double, torch.cfloat, torch.cdouble
    return [x if x.dtype in stay or not x.is_floating_point() else x.to(to) for x in inputs]


def _needs_grad(op, q, k, v):
    try:
        return True in (q.requires_grad, k.requires_grad, v.requires_grad)
    except AttributeError:
        pass
    at, x = next((i, x) for i, x in enumerate((q, k, v)) if not isinstance(x, Tensor))
    where = f"{op}(): argument '{'qkv'[at]}' (position {at + 1})"
    raise TypeError(f"{where} must be Tensor, not {type(x).__name__}")


def _call(function, needs_grad, *args):
    """Calls the Function, or its operator alone where nothing is to be differentiated."""
    transformed = torch._C._are_functorch_transforms_active()
    if transformed or needs_grad and torch.is_grad_enabled() or forward_ad._current_level >= 0:
        args = unwrap_dead_wrappers(args)  # what a transform that is over has saved
        if transformed:
            return function.apply(*args)
        # Function.apply would do the same, but it looks up a signature, which takes longer.
        return super(Function, function).apply(*args)
    return function.op(*args)


class _Fused(Function):
    """Computes `op`. Its derivatives are those of `formula`, unless a subclass has faster ones."""

    op = formula = None  # of the subclasses, with the same arguments

    @classmethod
    def paths(cls, saved):
        """Returns which arguments each result of the formula depends on."""

    @classmethod
    def forward(cls, *args):
        return cls.op(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @classmethod
    def backward(cls, ctx, *grads):
        given = zip(cls.paths(ctx.saved_tensors), grads, strict=True)
        reached = {i for path, grad in given if grad is not None for i in path}
        at = [i for i, needed in enumerate(ctx.needs_input_grad) if needed and i in reached]
        results, pull = cls._linearize(ctx.saved_tensors, ctx.others, at)
        pairs = [(y, u) for y, u in zip(results, grads, strict=True) if y is not None]
        found = pull(tuple(torch.zeros_like(y) if u is None else u for y, u in pairs))
        found = dict(zip(at, found, strict=True))
        return tuple(map(found.get, range(len(ctx.others))))

    @classmethod
    def jvp(cls, ctx, *tangents):
        at = [i for i, tangent in enumerate(tangents) if tangent is not None]
        saved = ctx.saved_tensors
        # Autograd has switched forward AD off, of outer transforms too.
        with forward_ad._set_fwd_grad_enabled(True):
            # The pullback u -> J^H u is linear. Its own pullback takes the tangents to J tangents.
            primal = [x if x is None else forward_ad.unpack_dual(x, level=0).primal for x in saved]
            results, pull = cls._linearize(primal, ctx.others, at)
            _, push = vjp(pull, tuple(y for y in results if y is not None))
            (found,) = push(tuple(tangents[i] for i in at))
        found = iter(found)
        found = tuple(None if y is None else next(found) for y in results)
        return found if len(found) > 1 else found[0]

    @classmethod
    def _linearize(cls, saved, others, at):
        """Returns `formula`'s results, and the pullback from them to the arguments `at`."""
        saved = unwrap_dead_wrappers(tuple(saved[: len(others)]))
        args = [other if x is None else x for x, other in zip(saved, others, strict=True)]
        results = ()

        def of(*some):
            nonlocal results
            given = args.copy()
            for i, x in zip(at, some, strict=True):
                given[i] = x
            results = cls.formula(*given)
            results = results if isinstance(results, tuple) else (results,)
            return tuple(y for y in results if y is not None)

        values, pull = vjp(of, *(args[i] for i in at))
        values = iter(values)
        return [None if y is None else next(values) for y in results], pull

    @classmethod
    def vmap(cls, info, in_dims, *args):
        """Makes the samples one more batch dimension, in front."""
        size = info.batch_size
        args = [
            x if not isinstance(x, Tensor) else _in_front(x, dim, size)
            for x, dim in zip(args, in_dims, strict=True)
        ]
        results = _call(cls, True, *args)
        if isinstance(results, tuple):
            return results, tuple(None if y is None else 0 for y in results)
        return results, 0


def _in_front(x, dim, size):
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _sizes(args, in_dims):
    """The sizes that one sample has of q, k and v."""
    kept = [list(x.shape) for x in args[:3]]
    for size, dim in zip(kept, in_dims, strict=False):
        if dim is not None:
            del size[dim]
    return kept


class _Attn(_Fused):
    op, formula = _ops.attn.default, composed.attn

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.others = (None, None, None)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad_output, grad_attn):
        given = grad_output, grad_attn, *ctx.saved_tensors, ctx.needs_input_grad
        return _call(_AttnBackward, True, *given)

    @classmethod
    def vmap(cls, info, in_dims, *args):
        composed.check("attn", *args, sizes=_sizes(args, in_dims))
        return super().vmap(info, in_dims, *args)


class _AttnBackward(_Fused):
    op, formula = _ops._attn_backward.default, composed.attn_backward

    @classmethod
    def paths(cls, saved):
        v = () if saved[0] is None else (4,)  # which is beside grad_output only
        return (0, 1, 3, *v, 5), (0, 1, 2, *v, 5), (0, 5)


class _AttnOutput(_Fused):
    formula = composed.attn_output

    @staticmethod
    def op(q, k, v, is_causal, scale):
        return _ops.attn_output.default(q, k, v, is_causal=is_causal, scale=scale)

    @staticmethod
    def backward(ctx, grad_output):
        if grad_output is None:
            return (None,) * 5
        q, k, v = ctx.saved_tensors[:3]
        given = grad_output, q, k, v, *ctx.others[3:], ctx.needs_input_grad[:3]
        return *_call(_AttnOutputBackward, True, *given), None, None

    @classmethod
    def vmap(cls, info, in_dims, q, k, v, *options):
        composed.check("attn_output", q, k, v, grouped=True, sizes=_sizes((q, k, v), in_dims))
        if in_dims[1] is in_dims[2] is None:  # shared by the samples
            in_dims = (in_dims[0], 0, 0, None, None)
            k, v = k.unsqueeze(0), v.unsqueeze(0)
        return super().vmap(info, in_dims, q, k, v, *options)


class _AttnOutputBackward(_Fused):
    op, formula = _ops._attn_output_backward.default, composed.attn_output_backward

    @classmethod
    def paths(cls, saved):
        return (range(4),) * 3


# The library computes on a CPU alone. The following has the operators' results for tensors without
# values and on other devices, and what the library asks for where its kernels don't fit.


def _fake_attn(q, k, v):
    composed.check("attn", q, k, v)
    sizes = q.shape[:-1]
    return q.new_empty((*sizes, v.shape[-1])), q.new_empty((*sizes, k.shape[-2]))


def _fake_attn_backward(grad_output, grad_attn, q, k, v, attn, output_mask):
    composed.check_backward(grad_output, grad_attn, q, k, v, attn)
    of_scores = grad_output is not None or grad_attn is not None
    there = of_scores, of_scores, grad_output is not None
    return _new_like((q, k, v), [a and b for a, b in zip(there, output_mask, strict=True)])


def _fake_attn_output(q, k, v, *, is_causal=False, scale=1.0):
    composed.check("attn_output", q, k, v, grouped=True)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _fake_attn_output_backward(grad_output, q, k, v, is_causal, scale, output_mask):
    composed.check_output_backward(grad_output, q, k, v)
    return _new_like((q, k, v), output_mask)


def _new_like(tensors, wanted):
    return tuple(x.new_empty(x.shape) if y else None for x, y in zip(tensors, wanted, strict=True))


def _wrong(function):
    """Says, instead of computing, what is wrong with the arguments."""

    def wrong(*args, **options):
        try:
            function(*args, **options)
        except RuntimeError as error:
            return str(error)
        return ""

    return wrong


def _plain(function):
    """Leaves autograd to the Functions, as the library's operators do."""

    # Below autograd's keys, a product of sparse matrices would be zero.
    def plain(*args, **options):
        with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
            return function(*args, **options)

    return plain


def _three(function):
    """`function` with three results, of which some may be None."""

    def three(*args, **options):
        results = function(*args, **options)
        results = results if isinstance(results, tuple) else (results,)
        return *results, *[None] * (3 - len(results))

    return three


for _name, _function, _fake in (
    ("attn", _Attn, _fake_attn),
    ("_attn_backward", _AttnBackward, _fake_attn_backward),
    ("attn_output", _AttnOutput, _fake_attn_output),
    ("_attn_output_backward", _AttnOutputBackward, _fake_attn_output_backward),
):
    _composed = _plain(_function.formula)
    _arguments = str(getattr(_ops, _name).default._schema).partition("(")[2].rpartition(" -> ")[0]
    for _prefix, _kernel, _results in (
        ("_wrong_", _wrong(_fake), "str"),
        ("_composed_", _three(_composed), "(Tensor, Tensor, Tensor)"),
    ):
        _called = _prefix + _name.removeprefix("_")
        _registrations.define(f"{_called}({_arguments} -> {_results}")
        _registrations.impl(_called, _kernel, "CompositeExplicitAutograd")
    _registrations.impl(_name, _composed, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torch_attn::{_name}", _fake, lib=_registrations)
