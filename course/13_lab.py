"""
13. The lab, I to IV
====================

PyTorch's autograd onboarding lab is four exercises on one operator,
``attn = tanh(q @ k.T)``, ``output = attn @ v``: derive it, write it as a Function,
make it a native composite, make it explicit with a formula of its own. Here they are
commits 1 to 4 of the stack. The lab ends there; commit 5 begins to give back what the
fourth exercise lost. Do each yourself, then read the commit.

.. list-table::
   :header-rows: 1

   * - do
     - then read
     - and run
   * - I. Derive the gradients of both results, by lesson 3. Then the gradient of that.
     - :doc:`1. the note </generated/stack/01-derive-gradients>`
     -
   * - II. Write it as a Function: both results, undefined gradients, double backward.
     - :doc:`2. the Function </generated/stack/02-custom-function>`
     - ``python test/attn_function.py``
   * - III. A native function that is composed: schema, kernel of three lines, OpInfo, override.
     - :doc:`3. the composite </generated/stack/03-composite-op>`
     - ``make attn COMMIT=3``
   * - IV. The same with a formula in ``derivatives.yaml``; mark what it lost.
     - :doc:`4. the explicit operator </generated/stack/04-explicit-op>`
     - ``make attn COMMIT=4``
   * - After the lab: forward mode, which the composite had and the explicit operator lost.
     - :doc:`5. forward mode </generated/stack/05-forward-ad>`
     - ``make attn COMMIT=5``

``make attn COMMIT=3`` puts PyTorch with the commits 1 to 3 into ``.venv``, in a
minute or two; ``make attn`` puts the tip back. After each, PyTorch's own suites say
what they think of it. These are the lab's six files, with ``-k attn``. They run on
PyTorch 2.6.0 in an environment of its own below ``build/``: the first command downloads
5 GB, takes 9.6 GB of disk and twelve minutes, most of it for the CUDA packages that the
wheel asks for. Each further one takes a minute or two:

.. code-block:: sh

   .venv/bin/python -m fork test-upstream --commit 3 --suite test_ops.py
   .venv/bin/python -m fork test-upstream --commit 3 --suite test_overrides.py
   .venv/bin/python -m fork test-upstream --commit 4 --suite functorch/test_aotdispatch.py
   .venv/bin/python -m fork test-upstream --commit 4 --suite functorch/test_ops.py
   .venv/bin/python -m fork test-upstream --commit 4 --suite functorch/test_vmap.py
   .venv/bin/python -m fork test-upstream --commit 4 --suite test_proxy_tensor.py

Look at the difference that commit 4 makes to the graph (lesson 2), and to what the
OpInfo has to mark as failing (lesson 8 has the suites' messages, and the mark for each).

The rest of this lesson is the question that you should ask of any test:
*would it notice?*
"""

import sys

import torch
from torch.autograd import gradcheck, gradgradcheck

from drawing import plt
from exercise import ROOT, about, gradients, parts, report

sys.path.insert(0, str(ROOT / "test"))
from attn_function import Attn, attn_reference  # noqa: E402

torch.manual_seed(0)

# %%
# Eight ways to break it
# ----------------------
# ``Attn`` is commit 2's Function. Each class below changes one thing in it, a mistake
# that somebody has made.


class Right(Attn):
    pass


class NoSlope(Attn):
    """Forgets the derivative of tanh."""

    @staticmethod
    def backward(ctx, grad_output, grad_attn):
        q, k, v, attn = ctx.saved_tensors
        grad = 0 if grad_output is None else grad_output @ v.T
        grad = grad if grad_attn is None else grad + grad_attn
        grad_v = None if grad_output is None else attn.T @ grad_output
        return grad @ k, grad.T @ q, grad_v


class ForgetsAttn(Attn):
    """Takes the gradient of the first result only."""

    @staticmethod
    def backward(ctx, grad_output, grad_attn):
        if grad_output is None:
            return None, None, None
        return Attn.backward(ctx, grad_output, None)


class WantsTensors(Attn):
    """Does not expect that a gradient is undefined."""

    @staticmethod
    def backward(ctx, grad_output, grad_attn):
        q, k, v, attn = ctx.saved_tensors
        grad = (grad_output @ v.T + grad_attn) * (1 - attn * attn)
        return grad @ k, grad.T @ q, attn.T @ grad_output


class HalfOfBoth(Attn):
    """Where both results are used, takes half of the second gradient."""

    @staticmethod
    def backward(ctx, grad_output, grad_attn):
        if grad_output is not None and grad_attn is not None:
            grad_attn = grad_attn / 2
        return Attn.backward(ctx, grad_output, grad_attn)


class SavesNumbers(Attn):
    """Keeps what it needs as numbers: without a graph."""

    @staticmethod
    def backward(ctx, grad_output, grad_attn):
        q, k, v, attn = (t.detach() for t in ctx.saved_tensors)
        grad = torch.zeros_like(attn) if grad_attn is None else grad_attn
        grad = grad if grad_output is None else grad + grad_output @ v.T
        grad = grad * (1 - attn * attn)
        grad_v = None if grad_output is None else attn.T @ grad_output
        return grad @ k, grad.T @ q, grad_v


class HalfTangent(Attn):
    """In forward mode, k's tangent is left out."""

    @staticmethod
    def jvp(ctx, q_t, k_t, v_t):
        return Attn.jvp(
            ctx,
            torch.zeros_like(ctx.saved_tensors[0]) if q_t is None else q_t,
            None,
            v_t,
        )


class OneForAll(Attn):
    """Its batched form takes the first sample for all."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, q, k, v):
        first = [
            t if d is None else t.select(d, 0)
            for t, d in zip((q, k, v), in_dims, strict=True)
        ]
        return tuple(
            y.expand(info.batch_size, *y.shape) for y in attn_reference(*first)
        ), (0, 0)


class Shifted(Attn):
    """Adds a constant: no derivative sees it."""

    @staticmethod
    def forward(q, k, v):
        output, attn = attn_reference(q, k, v)
        return output + 1e-3, attn


BROKEN = [
    Right,
    NoSlope,
    ForgetsAttn,
    WantsTensors,
    HalfOfBoth,
    SavesNumbers,
    HalfTangent,
    OneForAll,
    Shifted,
]

# %%
# Seven suites
# ------------
# Six are what PyTorch's suites do for every operator, in a line each. The seventh,
# ``at_once``, is our own: of several results, ``gradcheck`` gives one at a time a
# gradient, so it is shown one result made of both.


def inputs():
    torch.manual_seed(0)
    shapes = ((2, 3), (4, 3), (4, 5))
    return [torch.randn(s, dtype=torch.double, requires_grad=True) for s in shapes]


def values(op):
    torch.testing.assert_close(
        tuple(op(*inputs())), tuple(attn_reference(*inputs())), rtol=1e-12, atol=1e-12
    )


def first_only(op):
    """gradcheck of the first result, as the lab has it."""
    gradcheck(lambda *x: op(*x)[0], inputs(), check_undefined_grad=False)


def both(op):
    gradcheck(op, inputs())


def at_once(op):
    """gradcheck of one result that has both in it: both get a gradient in one backward."""
    gradcheck(lambda *x: torch.cat(op(*x), dim=1), inputs(), check_undefined_grad=False)


def second(op):
    gradgradcheck(lambda *x: op(*x)[0], inputs())


def forward_mode(op):
    options = {"check_backward_ad": False, "check_undefined_grad": False}
    gradcheck(lambda *x: op(*x)[0], inputs(), check_forward_ad=True, **options)


def batched(op):
    many = [torch.stack([t, -2 * t]).detach() for t in inputs()]
    found, wanted = torch.vmap(op)(*many), torch.vmap(attn_reference)(*many)
    torch.testing.assert_close(tuple(found), tuple(wanted), rtol=1e-12, atol=1e-12)


SUITES = [values, first_only, both, at_once, second, forward_mode, batched]


def notices(suite, broken):
    try:
        suite(broken.apply)
    except Exception:
        return True
    return False


table = {
    broken.__name__: [notices(suite, broken) for suite in SUITES] for broken in BROKEN
}
for name, row in table.items():
    print(
        f"{name:15}",
        ", ".join(s.__name__ for s, seen in zip(SUITES, row, strict=True) if seen)
        or "-",
    )

figure, axes = plt.subplots(figsize=(5, 4.4))
axes.imshow(
    [[float(seen) for seen in row] for row in table.values()],
    cmap="Blues",
    vmax=1.6,
    aspect="auto",
)
axes.set_xticks(
    range(len(SUITES)), [s.__name__ for s in SUITES], rotation=40, ha="right"
)
axes.set_yticks(range(len(table)), list(table))
for i, row in enumerate(table.values()):
    for j, seen in enumerate(row):
        axes.text(j, i, "found" if seen else "", ha="center", va="center", fontsize=8)
figure.tight_layout()

# %%
# Every mistake is found by something, none by everything; and the right one by
# nothing.

assert not any(table["Right"])
for name, row in table.items():
    assert name == "Right" or (any(row) and not all(row)), name


def found_by(name):
    return {s.__name__ for s, seen in zip(SUITES, table[name], strict=True) if seen}


assert found_by("SavesNumbers") == {"second"}  # its first gradient is perfectly right
assert found_by("HalfOfBoth") == {"at_once"}  # each alone is right, and both are not
assert found_by("HalfTangent") == {"forward_mode"}
assert found_by("OneForAll") == {"batched"}
assert "first_only" not in found_by(
    "ForgetsAttn"
)  # gradcheck of the first result alone
assert found_by("Shifted") == {
    "values",
    "batched",
}  # both compare values; no gradcheck sees it

# %%
# That is why the stack has every one of these suites on every commit, and why an
# expected failure (lesson 8) names the one suite that it is about. ``at_once`` is in the
# operator's own tests, ``test_gradcheck`` of ``test/test_attn.py``.
#
# Exercise
# --------
# Break it yourself: a Function for ``attn`` whose values and first gradients pass
# gradcheck, also where both results are used, and whose *second* ones, of one result or
# of both, do not pass gradgradcheck. Another way than ``SavesNumbers``: its second
# gradients must be other than those. A solution is in
# :download:`course/solutions/13_lab.py </../course/solutions/13_lab.py>`.


class Subtle(Attn):
    @staticmethod
    def backward(ctx, grad_output, grad_attn):
        raise NotImplementedError  # your turn


def second_gradients(op):
    """The gradients of <first gradients, drawn> for all that these are made of, None for none."""
    torch.manual_seed(1)
    given, results = inputs(), op(*inputs())
    grads = [torch.randn_like(y).requires_grad_() for y in results]
    first = torch.autograd.grad(op(*given), given, grads, create_graph=True)
    drawn = [torch.randn_like(t) for t in given]
    if not any(t.requires_grad for t in first):
        return [None] * 5
    return torch.autograd.grad(first, (*grads, *given), drawn, allow_unused=True)


def second_of_both(op):
    gradgradcheck(op, inputs())


def check(attempt):
    with about("forward"):
        result = attempt.apply(*inputs())
    parts(result, ["output", "attn"], "forward")
    with about("Its values are wrong, which everybody would notice"):
        values(attempt.apply)
    grads = [torch.randn_like(y) for y in result]
    gradients(result[0], dict(zip("qkv", inputs(), strict=True)), *grads)
    for suite, what in (
        (first_only, "the first result"),
        (both, "both results"),
        (at_once, "both results at once"),
    ):
        with about(f"gradcheck of {what} fails, which is too easy to find"):
            suite(attempt.apply)
    assert notices(second, attempt) or notices(second_of_both, attempt), (
        "gradgradcheck is content: it finds nothing wrong."
    )
    with about("backward, under create_graph"):
        ours = second_gradients(attempt.apply)
    pairs = zip(ours, second_gradients(SavesNumbers.apply), strict=True)
    alike = all(
        one is other if one is None or other is None else torch.allclose(one, other)
        for one, other in pairs
    )
    assert not alike, (
        "Its second gradients are those of SavesNumbers: find another way."
    )


report(check, Subtle)
