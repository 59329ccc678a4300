"""Lesson 14: log(exp(a) + exp(b)), whose gradients are the shares of a and b in the sum."""

SCHEMA = "log_add(Tensor a, Tensor b) -> Tensor"


def entry():
    return {
        "name": SCHEMA,
        "a": "grad * (a - b).sigmoid()",
        "b": "grad * (b - a).sigmoid()",
    }


def turned_around():
    """Each gets the other's share."""
    return {
        "name": SCHEMA,
        "a": "grad * (b - a).sigmoid()",
        "b": "grad * (a - b).sigmoid()",
    }


def overflows():
    """The quotient as the chain rule gives it."""
    sum_ = "(a.exp() + b.exp())"
    return {
        "name": SCHEMA,
        "a": f"grad * a.exp() / {sum_}",
        "b": f"grad * b.exp() / {sum_}",
    }


def no_types():
    return {**entry(), "name": "log_add(a, b) -> Tensor"}


def only_one():
    return {"name": SCHEMA, "a": "grad * (a - b).sigmoid()"}


solution = entry
MISTAKES = {
    turned_around: "The gradient of a is wrong",
    overflows: "The gradient of a is not finite",
    no_types: "PyTorch's parser does not take the schema",
    only_one: "There is no formula for b",
}
