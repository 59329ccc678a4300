"""Each lesson ends with an exercise: the reader's attempt is put before the lesson's checker.

A checker draws its inputs and looks at what an attempt does with them, not at how it is written.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]  # where aten/, test/, fork/ are


def report(check: Callable[..., None], attempt: Callable) -> None:
    """Prints what `check` says of `attempt`: still to do, right, or what is wrong with it.

    Args:
        check: called with `attempt`; raises an AssertionError that says what is wrong.
        attempt: a function or a class of the reader's; while it raises a NotImplementedError
            without a message, nothing is wrong.
    """
    seed = int(os.environ.get("SEED") or time.time_ns() % 1_000_000)
    torch.manual_seed(seed)
    again = f"(With SEED={seed} in the environment, the inputs are drawn again.)"
    try:
        check(attempt)
    except AssertionError as error:
        if (
            error.__cause__
        ):  # an error in the attempt: the reader wants to know the line
            traceback.print_exception(error.__cause__)
        print(f"Exercise: not yet. {error} {again}")
    except Exception as error:
        if to_do(error):
            print(
                f"Exercise: to do. Fill in `{attempt.__name__}` and run this file again."
            )
        else:
            traceback.print_exc()
            print(f"Exercise: not yet. {type(error).__name__}: {error} {again}")
    else:
        print("Exercise: solved.")


def to_do(error: Exception) -> bool:
    """Returns True for the exercise's own error; torch's NotImplementedErrors have a message."""
    return isinstance(error, NotImplementedError) and not error.args


def size(low: int, high: int) -> int:
    """Draws a whole number from `low` to `high`, both included."""
    return torch.randint(low, high + 1, ()).item()


def normal(*shape: int, dtype: torch.dtype = torch.double) -> torch.Tensor:
    """Draws a tensor that requires grad."""
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@contextmanager
def about(what: str):
    """Adds `what` to the front of an error inside: the input or the method that it is about."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error.__cause__
    except Exception as error:
        if to_do(error):
            raise
        said = f"{type(error).__name__}: {first_line(error)}"
        raise AssertionError(f"{what}: {said}") from error


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def returned(value, kind: type | tuple, what: str):
    """Returns `value`, which `what` returned, if it is of that kind; None is a forgotten return."""
    assert value is not None, f"{what} returns None: is its `return` forgotten?"
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names = " or ".join(k.__name__ for k in kinds)
    assert isinstance(value, kinds), (
        f"{what} returns {type(value).__name__}, where {names} is expected."
    )
    return value


def parts(value, names: list[str], what: str) -> dict:
    """Returns the values that `what` returned by name, one for each of `names`."""
    if not isinstance(value, (tuple, list)):
        value = (value if len(names) == 1 else returned(value, object, what),)
    given, more = value[: len(names)], value[len(names) :]
    whole = len(given) == len(names) and all(one is None for one in more)
    assert whole, f"{what} returns {len(value)} for {len(names)}: {', '.join(names)}."
    return dict(zip(names, given, strict=True))


def compare(
    what: str, found, wanted: torch.Tensor, rtol: float = 1e-9, atol: float = 1e-12
) -> None:
    """Refuses a result or a gradient that is no tensor, of another form, or wrong."""
    assert found is not None, f"{what} is None: is a `return` forgotten?"
    assert isinstance(found, torch.Tensor), f"{what} is {found!r}: that is no tensor."
    for form in ("shape", "dtype"):
        ours, theirs = (getattr(t, form) for t in (found, wanted))
        if form == "shape":
            ours, theirs = tuple(ours), tuple(theirs)
        assert ours == theirs, f"{what} has the {form} {ours}, not {theirs}."
    close = torch.allclose(found, wanted, rtol, atol, equal_nan=True)
    assert close, f"{what} is wrong."


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Returns True if all entries are the same, where a NaN is the same as a NaN."""
    return torch.allclose(found, wanted, rtol=0, atol=0, equal_nan=True)


@contextmanager
def unchanged(given: dict):
    """Refuses what writes into a tensor among `given`, each of which is named by its key."""
    tensors = {k: t.detach() for k, t in given.items() if isinstance(t, torch.Tensor)}
    before = {name: t.clone() for name, t in tensors.items()}
    yield
    for name, tensor in tensors.items():
        assert same(tensor, before[name]), (
            f"{name} was changed: the tensor is not yours, others use it too. Write into "
            "a new one."
        )


def apply(attempt, *inputs, within=None):
    """Returns the result of `attempt`, a Function: a tensor, or a tuple of more than one.

    `within` is a context that is entered for the attempt alone.
    """
    tensors = {i: t for i, t in enumerate(inputs, 1) if isinstance(t, torch.Tensor)}
    alone = len(tensors) == 1
    named = {"The input" if alone else f"Input {i}": tensors[i] for i in tensors}
    with unchanged(named), about("forward"), within or nullcontext():
        result = attempt.apply(*inputs)
    return returned(result, (torch.Tensor, tuple), "forward")


def by_a_function(result: torch.Tensor) -> bool:
    """Returns True if a Function in Python made it."""
    return isinstance(result.grad_fn, BackwardCFunction)


def gradients(result, inputs: dict, *grads) -> dict:
    """Returns the gradients of the tensors among `inputs` that require grad, by name.

    A Function's backward is called itself, so that we see what autograd would put right.

    Args:
        result: what the Function returned; the first, if there are more.
        inputs: all that it was given, by name.
        grads: the gradient of each result.
    """
    assert result.requires_grad, (
        "The result does not require grad: is forward a Function's?"
    )
    wants = {
        name: given
        for name, given in inputs.items()
        if isinstance(given, torch.Tensor) and given.requires_grad
    }
    if by_a_function(result):
        backward = type(result.grad_fn)._forward_cls.backward
        names = ["The gradient that came in"]
        if len(grads) > 1:
            names = [f"Gradient {i} that came in" for i in range(1, len(grads) + 1)]
        came = dict(zip(names, grads, strict=True))
        came |= {f"In backward {name}": given for name, given in inputs.items()}
        with unchanged(came), about("backward"), torch.no_grad():
            found = backward(result.grad_fn, *grads)
        assert not isinstance(found, list), "backward returns a list: return a tuple."
        found = parts(found, list(inputs), "backward")
        for name in inputs:
            assert isinstance(inputs[name], torch.Tensor) or found[name] is None, (
                f"The gradient of {name}, which is no tensor, has to be None."
            )
    else:
        found = torch.autograd.grad(result, list(wants.values()), *grads)
        found = dict(zip(wants, found, strict=True))
    for name, given in wants.items():
        grad = found[name]
        what = f"The gradient of {name}"
        assert isinstance(grad, torch.Tensor), (
            f"{what} is {grad!r}: is it forgotten in backward's `return`?"
        )
        shapes = f"{tuple(grad.shape)}, not {tuple(given.shape)}"
        assert grad.shape == given.shape, f"{what} has the shape {shapes}."
    return {name: found[name] for name in wants}


def keeps_well(attempt, inputs: dict) -> None:
    """Refuses a tensor that is kept where autograd does not know of it: as an attribute of ctx.

    An input that is kept there, and changed later, makes wrong gradients. A result that is
    kept there is never freed: it keeps its node, which is ctx.
    """
    tensors = {k: t for k, t in inputs.items() if isinstance(t, torch.Tensor)}

    def run(changed=None):
        fresh = {k: t.detach().clone().requires_grad_() for k, t in tensors.items()}
        made = apply(attempt, *(inputs | fresh).values())
        made = made if isinstance(made, tuple) else (made,)
        if changed:
            fresh[changed].detach().mul_(-3)
        grads = [torch.ones_like(one) for one in made]
        return torch.autograd.grad(
            made, [*fresh.values()], grads, allow_unused=True, materialize_grads=True
        )

    wanted = run()
    for name in tensors:
        try:
            found = run(name)
        except RuntimeError:  # a saved tensor has changed: autograd says so
            continue
        assert all(torch.allclose(*pair) for pair in zip(found, wanted, strict=True)), (
            f"{name} is changed after the call, and the gradients are wrong without a "
            "word: is it kept beside save_for_backward?"
        )
    made = apply(attempt, *inputs.values())
    alive = [weakref.ref(t) for t in (made if isinstance(made, tuple) else (made,))]
    collects = gc.isenabled()
    gc.disable()  # it would free the cycle, some day
    del made
    kept = any(result() is not None for result in alive)
    if collects:
        gc.enable()
    assert not kept, (
        "A result is kept by its own node, and keeps it: the memory of both is not freed. "
        "Keep a result by save_for_backward, which breaks the cycle."
    )


def passes(test: Callable, function: Callable, inputs) -> None:
    """Refuses what `test`, gradcheck or gradgradcheck, refuses, with the first line of it."""
    try:
        test(function, inputs)
    except Exception as error:
        if to_do(error):
            raise
        raise AssertionError(f"{test.__name__} fails: {first_line(error)}") from error


class Calls(TorchDispatchMode):
    """Records the operators that are called inside, as `names`, without what copies or views."""

    LEFT_OUT = (
        *("alias", "as_strided", "clone", "_to_copy", "detach", "empty", "empty_like"),
        *("expand", "lift_fresh", "permute", "select", "slice", "squeeze", "t"),
        *("transpose", "unsqueeze", "_unsafe_view", "view"),
    )

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.LEFT_OUT:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
