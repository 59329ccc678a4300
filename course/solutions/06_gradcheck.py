"""Lesson 6: a gradcheck for functions of two inputs, by central differences."""

import torch


def difference(function, inputs, which, j, eps):
    """A column of the numerical Jacobian."""
    results = []
    for sign in (1, -1):
        moved = [t.detach().clone() for t in inputs]
        moved[which].view(-1)[j] += sign * eps
        results.append(function(*moved).detach().flatten())
    return (results[0] - results[1]) / (2 * eps)


def compare(function, inputs, wanted, column=difference):
    """Whether each column belongs to what backward says, for the inputs `wanted`."""
    result = function(*inputs).flatten()
    rows = [
        torch.autograd.grad(result, inputs, one, retain_graph=True)
        for one in torch.eye(result.numel(), dtype=result.dtype)
    ]
    for which in wanted:
        jacobian = torch.stack([row[which].flatten() for row in rows])
        for j in range(inputs[which].numel()):
            numerical = column(function, inputs, which, j, 1e-6)
            if not torch.allclose(numerical, jacobian[:, j], rtol=1e-4, atol=1e-6):
                return False
    return True


def two_inputs_gradcheck(function, x, y):
    return compare(function, (x, y), (0, 1))


def first_only(function, x, y):
    return compare(function, (x, y), (0,))


def one_sided(function, x, y):
    """A forward difference with a step that is far too large for it."""

    def column(function, inputs, which, j, eps):
        moved = [t.detach().clone() for t in inputs]
        moved[which].view(-1)[j] += 1e-2
        return (function(*moved) - function(*inputs)).detach().flatten() / 1e-2

    return compare(function, (x, y), (0, 1), column)


def sums(function, x, y):
    """Only the gradient of the sum: entries that are mixed up are not seen."""
    total = function(x, y).sum()
    found = torch.autograd.grad(total, (x, y))
    for which in (0, 1):
        numerical = [
            difference(function, (x, y), which, j, 1e-6).sum().item()
            for j in range(x.numel())
        ]
        wanted = torch.tensor(numerical, dtype=x.dtype)
        if not torch.allclose(wanted, found[which].flatten(), rtol=1e-4, atol=1e-6):
            return False
    return True


solution = two_inputs_gradcheck
MISTAKES = {
    first_only: "It does not see that the gradient of y is wrong.",
    one_sided: "a right backward of a function that is curved: It refuses it.",
    sums: "It does not see that entries are mixed up.",
}
