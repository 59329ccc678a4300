"""Lesson 2: a topological order of a graph's nodes."""


def nexts(node):
    return [following for following, _ in node.next_functions if following is not None]


def execution_order(grad_fn):
    done = []

    def visit(node):  # all that it leads to stands behind it, so it goes in front
        if node not in done:
            for following in nexts(node):
                visit(following)
            done.insert(0, node)

    visit(grad_fn)
    return done


def depth_first(grad_fn):
    """In the order in which they are met: a shared node comes too early."""
    order, waiting = [], [grad_fn]
    while waiting:
        node = waiting.pop(0)
        if node not in order:
            order.append(node)
            waiting = nexts(node) + waiting
    return order


def every_path(grad_fn):
    """Shared nodes once per path that leads to them."""
    order = [grad_fn]
    for node in order:
        order += nexts(node)
    return order


def without_leaves(grad_fn):
    """Only what has a following node."""
    return [node for node in execution_order(grad_fn) if nexts(node)]


solution = execution_order
MISTAKES = {
    depth_first: "which it waits for",
    every_path: "A node is there twice",
    without_leaves: "is missing",
}
