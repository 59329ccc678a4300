"""Replaces attn by attn_output where nobody reads its second result."""

import operator

import torch
from torch import fx
from torch._inductor import config


aten = torch.ops.aten
MAX_WIDTH = 1024  # ATTN_MAX_WIDTH of the CPU kernel: wider inputs are composed


def leave_out_attn(graph: fx.Graph) -> int:
    """
    Replaces each attn whose second result, an m x n matrix, is read by its own
    backward alone or not at all. Returns how many were replaced.

    attn_output gives the same output without that matrix, in memory of m + n.
    Its backward computes the matrix again, tile by tile.
    """
    found = graph.find_nodes(op="call_function", target=aten.attn.default)
    return sum(_replace(node) for node in found)


def _replace(attn: fx.Node) -> bool:
    output, scores = attn.meta["val"]
    q, k, v = attn.args
    if scores.device.type != "cpu" or scores.is_complex():
        return False  # attn_output has no kernel of its own
    results = [(x, x.args[1]) for x in attn.users if x.target is operator.getitem]
    if len(results) != len(attn.users):
        return False
    backward = [(y, x) for x, index in results if index == 1 for y in x.users]
    if not all(_is_backward(node, attn, x) for node, x in backward):
        return False
    if backward and not _is_worth_it(output, q.meta["val"], scores):
        return False

    graph = attn.graph
    with graph.inserting_before(attn):
        replacement = graph.call_function(aten.attn_output.default, (q, k, v))
    replacement.meta = attn.meta | {"val": output}
    replacement.meta.pop("tensor_meta", None)
    for node, _ in backward:
        grad_output, mask = node.args[0], node.args[6]
        arguments = (grad_output, q, k, v, False, 1.0, mask)
        with graph.inserting_before(node):
            grads = graph.call_function(aten._attn_output_backward.default, arguments)
        grads.meta = dict(node.meta)
        node.replace_all_uses_with(grads)
        graph.erase_node(node)
    for node, index in results:
        if index == 0:
            node.replace_all_uses_with(replacement)
        graph.erase_node(node)
    graph.erase_node(attn)
    return True


def _is_backward(node: fx.Node, attn: fx.Node, scores: fx.Node) -> bool:
    """Whether it is the backward of `attn` that reads `scores` as attn's result alone.

    Not if `scores` has a gradient, or is itself the gradient of the output.
    """
    if node.target is not aten._attn_backward.default:
        return False
    grad_output, grad_attn, *inputs, own, _ = node.args
    if own is not scores or grad_output in (None, scores) or grad_attn is not None:
        return False
    return inputs == [*attn.args]


def _is_worth_it(output, q, scores) -> bool:
    """Whether so much memory is saved that the backward may take longer for it."""
    size = scores.numel() * scores.element_size()
    if isinstance(size, torch.SymInt):
        if not size.node.has_hint():
            return False
        size = size.node.hint
    widths = (q.shape[-1], output.shape[-1])
    return size >= config.attn_output_min_bytes and max(widths) <= MAX_WIDTH
