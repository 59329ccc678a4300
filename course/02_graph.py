"""
2. Backpropagation: how the graph is built and executed
=======================================================

Autograd records, while your forward runs, what would have to be done to go back. The
recording is a graph of nodes; ``backward`` walks it once. We write such a machine
ourselves, in some sixty lines, hold it beside autograd's, and then look at autograd's
own graph, up to that of ``torch.attn``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from drawing import draw, plt, recorded
from exercise import report, returned, size

torch.manual_seed(0)

# %%
# A tape of our own
# -----------------
# A ``Var`` has a value (a plain tensor that autograd knows nothing of) and the
# ``Node`` that made it. A node knows one function per input, from the gradient of its
# result to the gradient of that input: its *vector-Jacobian products*, and the nodes
# that these gradients go to.


class Node:
    def __init__(self, name, pullbacks, following):
        self.name, self.pullbacks, self.following = name, pullbacks, following


class Var:
    def __init__(self, value, node=None):
        self.value, self.grad = value, None
        self.node = node or Node("AccumulateGrad", [self.accumulate], [None])

    def accumulate(self, grad):
        self.grad = grad if self.grad is None else self.grad + grad

    def __mul__(self, other):
        return make("Mul", self.value * other.value, (self, lambda g: g * other.value),
                    (other, lambda g: g * self.value))  # fmt: skip

    def __add__(self, other):
        return make(
            "Add", self.value + other.value, (self, lambda g: g), (other, lambda g: g)
        )

    def __matmul__(self, other):
        return make("Mm", self.value @ other.value, (self, lambda g: g @ other.value.T),
                    (other, lambda g: self.value.T @ g))  # fmt: skip

    def sin(self):
        return make("Sin", self.value.sin(), (self, lambda g: g * self.value.cos()))

    def sum(self):
        return make("Sum", self.value.sum(), (self, lambda g: g.expand_as(self.value)))


def make(name, value, *inputs):
    """The result of a function, with the node that leads back to its inputs."""
    following = [var.node for var, _ in inputs]
    return Var(value, Node(name, [pullback for _, pullback in inputs], following))


# %%
# Backward. A node may run only after **all** that use its result have: its gradient
# is their sum. So we first count, for each node, how many edges lead to it, and run
# it when the last has come.


def backward(root):
    waits, seen = {}, [root.node]
    for node in seen:  # grows while we go through it
        for following in filter(None, node.following):
            if following not in waits:
                seen.append(following)
            waits[following] = waits.get(following, 0) + 1
    grads, ready, order = {root.node: torch.ones_like(root.value)}, [root.node], []
    while ready:
        node = ready.pop()
        order.append(node.name)
        grad = grads.pop(node)
        for pullback, following in zip(node.pullbacks, node.following, strict=True):
            part = pullback(grad)
            if following is None:  # a leaf has kept it
                continue
            grads[following] = grads[following] + part if following in grads else part
            waits[following] -= 1
            if not waits[following]:
                ready.append(following)
    return order


# %%
# The same function, on our tape and on autograd's; ``a`` is used twice, so its
# gradient is a sum of two.


def function(a, b):
    return ((a @ b).sin() * (a + b)).sum()


values = [torch.randn(3, 3, dtype=torch.double) for _ in range(2)]
ours = [Var(value) for value in values]
order = backward(function(*ours))
theirs = [value.clone().requires_grad_() for value in values]
function(*theirs).backward()
for mine, autograd in zip(ours, theirs, strict=True):
    assert torch.allclose(mine.grad, autograd.grad)
print(" -> ".join(order))
assert order[0] == "Sum" and order.count("AccumulateGrad") == 2

# %%
# Autograd's nodes
# ----------------
# ``grad_fn`` is the node that made a tensor, ``next_functions`` where its gradients
# go: pairs of a node and the number of that node's result. A leaf has no ``grad_fn``;
# an ``AccumulateGrad`` node stands for it, and that is what adds to ``.grad``.

a = torch.randn(3, requires_grad=True)
b = torch.randn(3)
y = (a * b).sin()
product = y.grad_fn.next_functions[0][0]
print(
    y.grad_fn.name(),
    "->",
    product.name(),
    "->",
    [n and n.name() for n, _ in product.next_functions],
)
assert product.name() == "MulBackward0"
assert product.next_functions[0][0].variable is a
assert product.next_functions[1][0] is None  # b requires no grad: nothing goes there

# %%
# What a backward needs of the forward, its node has *saved*. Saved tensors are freed
# by ``backward``, unless it is told to ``retain_graph``; and each knows its
# *version*, so that a change in place is noticed.

assert (
    product._saved_other is b and product._saved_self is None
)  # only b's formula is needed
y.sum().backward()
try:
    y.sum().backward()
except RuntimeError as error:
    print(str(error).split(" (")[0])
else:
    raise AssertionError("a second backward through freed tensors")

x = torch.randn(3, requires_grad=True)
square = x.clone()
y = square * square
square.zero_()
try:
    y.sum().backward()
except RuntimeError as error:
    print(str(error).split(": [")[0])
else:
    raise AssertionError("a saved tensor that was changed")

# %%
# The order of execution, by hooks
# --------------------------------
# A hook on a node is called after it has run, with the gradients it gave and those it
# got. A hook on a tensor is called before the node that made it, and may replace the
# gradient.

called = []
x = torch.randn(3, requires_grad=True)
left, right = x.sin(), x.cos()
loss = (left * right).sum()
for name, tensor in (("sum", loss), ("sin", left), ("cos", right)):
    tensor.grad_fn.register_hook(lambda given, got, name=name: called.append(name))
x.register_post_accumulate_grad_hook(lambda x: called.append("x.grad is there"))
left.register_hook(lambda grad: called.append("before sin") or 2 * grad)
loss.backward()
print(called)
assert called[0] == "sum" and called[-1] == "x.grad is there"
assert called.index("before sin") < called.index("sin")
# The chain of sin was doubled: 2 cos(x) cos(x) - sin(x) sin(x).
assert torch.allclose(x.grad, 2 * x.cos() ** 2 - x.sin() ** 2)

# %%
# A Function's node *is* its ``ctx``
# ----------------------------------
# Of a Function ``Dummy``, autograd makes a class of nodes ``DummyBackward``. An
# object of it exists before ``forward`` runs, ``forward`` gets it as ``ctx``, it
# becomes the result's ``grad_fn``, and ``backward`` gets it again.


class Dummy(torch.autograd.Function):
    seen = []

    @staticmethod
    def forward(ctx, x):
        Dummy.seen.append(ctx)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        Dummy.seen.append(ctx)
        return 2 * grad


x = torch.randn(3, requires_grad=True)
y = Dummy.apply(x)
y.sum().backward()
print(type(y.grad_fn).__name__, "is ctx:", [ctx is y.grad_fn for ctx in Dummy.seen])
assert type(y.grad_fn).__name__ == "DummyBackward"
assert len(Dummy.seen) == 2 and all(ctx is y.grad_fn for ctx in Dummy.seen)

# %%
# With no input that requires grad, ``forward`` still gets a ``ctx``, and that is the
# last that is heard of it.

assert Dummy.apply(torch.randn(3)).grad_fn is None

# %%
# The graph of ``attn``, twice
# ----------------------------
# Composed of ``matmul`` and ``tanh``, autograd records a node for each of the calls.
# As a native operator with a formula of its own, it is one node, with both results.

q, k, v = (torch.randn(s, requires_grad=True) for s in ((2, 3), (4, 3), (4, 5)))
scores = torch.tanh(torch.mm(q, k.T))
output, attn = torch.attn(q, k, v)

figure, (above, below) = plt.subplots(
    2, 1, figsize=(5, 6), gridspec_kw={"height_ratios": [2, 1]}
)
composed = draw(above, "composed", torch.mm(scores, v).grad_fn, scores.grad_fn)
native = draw(below, "torch.attn", output.grad_fn, attn.grad_fn)
figure.tight_layout()

assert (
    output.grad_fn is attn.grad_fn and len(native) == 1 + 3
)  # the node and three leaves
assert len(composed) == 4 + 3  # mm, tanh, mm, and the transposition of k

# %%
# Exercise
# --------
# Write a function that lists the nodes behind ``grad_fn``, each **once**, and each
# **before** all nodes that its gradients go to: an order in which a backward could
# run them. A solution is in
# :download:`course/solutions/02_graph.py </../course/solutions/02_graph.py>`.


def execution_order(grad_fn):
    """The nodes behind `grad_fn`, itself first, as a list."""
    raise NotImplementedError  # your turn


def drawn_graph():
    """The result of some operations on leaves and on each other's results."""
    tensors = [torch.randn(3, requires_grad=True) for _ in range(size(1, 2))]
    for _ in range(size(2, 7)):
        one, other = (tensors[size(0, len(tensors) - 1)] for _ in range(2))
        tensors.append((one.sin(), one * other, one + other)[size(0, 2)])
    return tensors[-1]


def waits_twice():
    """Results that wait for a node by two edges from one place, and by one from another."""
    t = torch.randn(3, requires_grad=True).sin()
    twice, once = t * t, t.cos().exp()
    return twice + once, once + twice


def check(attempt):
    drawn = (drawn_graph() for _ in range(20))
    for tensor in (torch.attn(q, k, v)[0], *waits_twice(), *drawn):
        found = attempt(tensor.grad_fn)
        order = list(returned(found, Iterable, "execution_order"))
        for one in order:
            assert hasattr(one, "next_functions"), (
                f"{one!r} is something that is no node."
            )
        assert order and order[0] is tensor.grad_fn, "The first is not the node given."
        assert len(set(order)) == len(order), (
            "A node is there twice: its gradient would be too."
        )
        nodes = set(recorded(tensor.grad_fn))
        for node in nodes:
            assert node in order, f"{node.name()} is missing."
        assert set(order) == nodes, "There is something that is no node of the graph."
        for node in order:
            for following in filter(None, (next for next, _ in node.next_functions)):
                assert order.index(node) < order.index(following), (
                    f"{following.name()} comes before {node.name()}, which it waits for."
                )


report(check, execution_order)
