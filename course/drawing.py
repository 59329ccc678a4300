"""Pictures of a graph that autograd recorded, and matplotlib, if it is there."""

from __future__ import annotations

import networkx


class NoPictures:
    """Takes all calls of matplotlib where there is none: a lesson runs without its pictures."""

    def __getattr__(self, name: str) -> NoPictures:
        return self

    def __call__(self, *args, **kwargs) -> NoPictures:
        return self

    def __getitem__(self, key) -> NoPictures:
        return self

    def __iter__(self):
        return iter((self, self))  # as in: figure, axes = plt.subplots()


try:
    import matplotlib.pyplot as plt
except ModuleNotFoundError:
    plt = NoPictures()
    print("matplotlib is not installed: there are no pictures.")

LEAF, NODE = "#d9ead3", "#dbe6f6"


def recorded(*roots) -> networkx.DiGraph:
    """The nodes behind `roots`, each a tensor's `grad_fn`, with an edge to each next function."""
    graph, waiting = networkx.DiGraph(), list(roots)
    while waiting:
        node = waiting.pop()
        if node is None or node in graph and graph.nodes[node]:
            continue
        graph.add_node(node, name=node.name().removeprefix("torch::autograd::"))
        for following, _ in node.next_functions:
            if following is not None:
                graph.add_edge(node, following)
                waiting.append(following)
    return graph


def draw(axes, title: str, *roots) -> networkx.DiGraph:
    """Draws what `recorded` finds on matplotlib's `axes`: results at the top, leaves below."""
    graph = recorded(*roots)
    if isinstance(plt, NoPictures):
        return graph
    for depth, layer in enumerate(networkx.topological_generations(graph)):
        for node in layer:
            graph.nodes[node]["depth"] = -depth
    places = networkx.multipartite_layout(graph, subset_key="depth", align="horizontal")
    names = networkx.get_node_attributes(graph, "name")
    networkx.draw_networkx_edges(
        graph, places, ax=axes, node_size=1400, edge_color="#888888"
    )
    for leaf, color in ((True, LEAF), (False, NODE)):
        some = {
            n: name for n, name in names.items() if (name == "AccumulateGrad") == leaf
        }
        box = {"boxstyle": "round,pad=0.4", "facecolor": color, "edgecolor": "#888888"}
        networkx.draw_networkx_labels(
            graph, places, some, ax=axes, font_size=7, bbox=box, font_color="black"
        )
    if not graph:
        middle = {"ha": "center", "transform": axes.transAxes}
        axes.text(0.5, 0.5, "no graph", color="#c0504d", **middle)
    axes.set_title(title, fontsize=10)
    axes.margins(0.25)
    axes.set_axis_off()
    return graph
