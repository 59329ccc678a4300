r"""
3. Deriving the formulas
========================

A backward is a vector-Jacobian product: from the gradient of the result it makes the
gradient of each input. Here we derive four, each a little harder than the one before,
and hold each against what PyTorch itself says in ``derivatives.yaml``.

Throughout, :math:`L` is the number at the end, :math:`G = \partial L / \partial Y` is
what comes in, and
:math:`\langle A, B \rangle = \operatorname{tr}(A^\top B) = \sum_{ij} A_{ij} B_{ij}`
is the inner product of two matrices. The method is always the same: write the
differential :math:`dL = \langle G, dY \rangle`, put in :math:`dY`, and move things
until it reads :math:`\langle\,\cdot\,, dX \rangle`. What stands in the place of the
dot is the gradient of :math:`X`.
"""

import re
from pathlib import Path

import torch
import torchgen
from torch.autograd import gradcheck

from drawing import plt
from exercise import about, compare, normal, parts, report, size, unchanged

torch.manual_seed(0)
PACKAGED = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
ENTRIES = {
    entry.split("(")[0]: dict(re.findall(r'^  (\w[\w, ]*): "?(.*?)"?$', entry, re.M))
    for entry in re.split(
        r"^- name: ", PACKAGED.read_text(encoding="utf-8"), flags=re.M
    )
}


# %%
# sin
# ---
# Elementwise, :math:`dy = \cos(x)\,dx`, so :math:`dL = \sum_i g_i \cos(x_i)\,dx_i`
# and the gradient is :math:`g \cos(x)`. That is PyTorch's formula, but for one word:
# ``conj``. For a complex :math:`x`, PyTorch's gradient is the *conjugate* of what the
# rule for real numbers gives, since it is to point to where the real number :math:`L`
# grows fastest. An entry's formula for an elementwise function can even be run by
# Python as it is.

print("sin:", ENTRIES["sin"]["self"])
for dtype in (torch.double, torch.cdouble):
    x = normal(5, dtype=dtype)
    grad = torch.randn(5, dtype=dtype)
    (found,) = torch.autograd.grad(torch.sin(x), x, grad)
    assert torch.allclose(found, grad * torch.cos(x).conj())
    assert torch.equal(found, eval(ENTRIES["sin"]["self"], {"grad": grad, "self": x}))
assert not torch.allclose(
    found, grad * torch.cos(x)
)  # without conj it is another number

# %%
# ``acos`` is the same with a longer derivative, :math:`-1 / \sqrt{1 - x^2}`. This is
# all of its entry; from it come ``AcosBackward0`` and, by ``auto_element_wise``,
# forward mode too.

for key, value in ENTRIES["acos"].items():
    print(f"{key}: {value}")
x = (2 * torch.rand(5, dtype=torch.double) - 1).requires_grad_()
grad = torch.randn(5, dtype=torch.double)
(found,) = torch.autograd.grad(torch.acos(x), x, grad)
assert torch.allclose(found, -grad / torch.sqrt(1 - x**2))
assert torch.equal(found, eval(ENTRIES["acos"]["self"], {"grad": grad, "self": x}))
assert torch.acos(x).grad_fn.name() == "AcosBackward0"

# %%
# mm
# --
# :math:`Y = AB`, so :math:`dY = dA\,B + A\,dB`. Two rules of the trace do it
# all: it is linear, and a product may be turned around in it,
# :math:`\operatorname{tr}(PQ) = \operatorname{tr}(QP)`.
#
# .. math::
#
#    \langle G, dA\,B \rangle &= \operatorname{tr}(G^\top dA\,B)
#        = \operatorname{tr}(B\,G^\top dA) = \langle G B^\top, dA \rangle \\
#    \langle G, A\,dB \rangle &= \operatorname{tr}(G^\top A\,dB) = \langle A^\top G, dB \rangle
#
# So :math:`G_A = G B^\top` and :math:`G_B = A^\top G`. The shapes leave no other way
# to write it, which is worth a look every time.

print("mm:", ENTRIES["mm"]["self"], "|", ENTRIES["mm"]["mat2"])
a, b = normal(2, 3), normal(3, 4)
grad = torch.randn(2, 4, dtype=torch.double)
found = torch.autograd.grad(a @ b, (a, b), grad)
assert torch.allclose(found[0], grad @ b.T) and torch.allclose(found[1], a.T @ grad)

# %%
# The linear layer
# ----------------
# :math:`X` is (N, i), :math:`W` (o, i), :math:`b` (o);
# :math:`Y = X W^\top + 1\,b^\top`, with a one for each of the N rows. By the rules
# above,
#
# .. math::
#
#    G_X = G\,W, \qquad G_W = G^\top X, \qquad G_b = G^\top 1 = \text{the sum of } G \text{'s rows}.
#
# A *broadcast* in the forward is a *sum* in the backward: that holds for every
# function.


def linear_backward(grad, x, weight):
    return grad @ weight, grad.T @ x, grad.sum(0)


x, weight, bias = normal(5, 3), normal(2, 3), normal(2)
grad = torch.randn(5, 2, dtype=torch.double)
found = torch.autograd.grad(
    torch.nn.functional.linear(x, weight, bias), (x, weight, bias), grad
)
for wanted, theirs in zip(linear_backward(grad, x, weight), found, strict=True):
    assert torch.allclose(wanted, theirs)
print("linear:", ENTRIES["linear"]["input, weight, bias"])

# %%
# attn
# ----
# :math:`S = Q K^\top`, :math:`A = \tanh(S)`, :math:`O = A V`; two results, so two
# gradients come in, :math:`G_O` and :math:`G_A`.
#
# .. math::
#
#    dO &= dA\,V + A\,dV, \qquad dA = (1 - A \circ A) \circ dS,
#        \qquad dS = dQ\,K^\top + Q\,dK^\top \\
#    dL &= \langle G_O, dO \rangle + \langle G_A, dA \rangle
#        = \langle G_O V^\top + G_A,\; dA \rangle + \langle A^\top G_O, dV \rangle
#
# A product of elements moves from one side of an inner product to the other,
# :math:`\langle P, D \circ R \rangle = \langle P \circ D, R \rangle`. With
# :math:`Z = (G_O V^\top + G_A) \circ (1 - A \circ A)`, the gradient of the scores:
#
# .. math::
#
#    G_Q = Z K, \qquad G_K = Z^\top Q, \qquad G_V = A^\top G_O
#
# Of the scores nothing is needed, only of their tanh, which is a result anyway. This
# is why ``attn`` saves that.


def attn_backward(grad_output, grad_attn, q, k, v, attn):
    grad_scores = (grad_output @ v.T + grad_attn) * (1 - attn * attn)
    return grad_scores @ k, grad_scores.T @ q, attn.T @ grad_output


q, k, v = normal(2, 3), normal(4, 3), normal(4, 5)
outputs = torch.attn(q, k, v)
grads = [torch.randn_like(output) for output in outputs]
found = torch.autograd.grad(outputs, (q, k, v), grads)
for wanted, theirs in zip(
    attn_backward(*grads, q, k, v, outputs.attn), found, strict=True
):
    assert torch.allclose(wanted, theirs)
assert gradcheck(torch.attn, (q, k, v))

# %%
# Ours stands among them, in the same form: a graft adds it to the file.
# :doc:`the note </notes/attn>` goes on to the second derivative and to forward mode.

print("attn:", ENTRIES["attn"]["q, k, v"])

# %%
# What the formula says, as a picture
# -----------------------------------
# The gradient of :math:`\sum O` for one entry of :math:`S`: where tanh is saturated,
# nothing comes back.

s = torch.linspace(-4, 4, 200, dtype=torch.double)
figure, axes = plt.subplots(figsize=(5, 2.8))
axes.plot(s, torch.tanh(s), label="a = tanh(s)")
axes.plot(s, 1 - torch.tanh(s) ** 2, label="1 - a²")
axes.set_xlabel("s")
axes.legend()
figure.tight_layout()
assert (1 - torch.tanh(s) ** 2).max() <= 1 and (1 - torch.tanh(s) ** 2)[0] < 2e-3

# %%
# Exercise
# --------
# The bilinear form :math:`y = u^\top A\,v`, with :math:`u` (m), :math:`A` (m, n),
# :math:`v` (n), is a single number. Derive its three gradients from :math:`dy`, and
# write the backward, for complex numbers too: there is no conjugation in the forward,
# so each factor of a gradient but the incoming one is conjugated. A solution is in
# :download:`course/solutions/03_deriving.py </../course/solutions/03_deriving.py>`.


def bilinear_backward(grad, u, a, v):
    """The gradients of u (m), a (m, n), v (n), for y = u.T @ a @ v and the gradient `grad` ()."""
    raise NotImplementedError  # your turn


def check(attempt):
    for turn in range(10):
        dtype, m = (torch.double, torch.cdouble)[turn % 2], size(1, 4)
        n = m + size(1, 2)
        u, a, v = (
            normal(m, dtype=dtype),
            normal(m, n, dtype=dtype),
            normal(n, dtype=dtype),
        )
        grad = torch.randn((), dtype=dtype)
        given = grad, u.detach(), a.detach(), v.detach()
        names = "The gradient that came in", "The input u", "The input a", "The input v"
        with unchanged(dict(zip(names, given, strict=True))):
            found = attempt(*given)
        found = parts(found, ["u", "a", "v"], "bilinear_backward")
        wanted = torch.autograd.grad(u @ a @ v, (u, a, v), grad)
        with about("complex" if dtype.is_complex else "real"):
            for name, truth in zip("uav", wanted, strict=True):
                compare(f"The gradient of {name}", found[name], truth)


report(check, bilinear_backward)
