"""Helpers for nodes and graphs: the tensor of a node, the module that a node came from, copies of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node


def mutating_node(module: GraphModule) -> Node | None:
    """Return the first node that writes to a tensor, if any: matching across a write is not safe."""
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            return node
    return None


def value(node: Any) -> torch.Tensor | None:
    """Return the fake tensor of a node; ``None`` for literals and for nodes without a tensor."""
    fake = node.meta.get("val") if isinstance(node, Node) else None
    return fake if isinstance(fake, torch.Tensor) else None


_BACKENDS = "h3opt_attention_backends"


def note_attention_backends(node: Node, backends: Sequence[str], in_order: bool) -> None:
    """Note that attention at ``node`` may use these backends alone; nodes that are traced from it inherit the note.

    Args:
        node: a node of a Dynamo graph.
        backends: names of ``torch.nn.attention.SDPBackend``.
        in_order: whether earlier backends are preferred.
    """
    node.meta["custom"] = {**node.meta.get("custom", {}), _BACKENDS: (tuple(backends), in_order)}


def attention_backends(node: Node) -> tuple[tuple[str, ...], bool] | None:
    """Return the backends that attention at ``node`` may use, and whether they are in order of preference.

    ``None`` for nodes that are no attention, and where the model chooses no backend.
    """
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
        return None
    noted: tuple[tuple[str, ...], bool] | None = node.meta.get("custom", {}).get(_BACKENDS)
    return noted


def copy_graph(module: GraphModule) -> GraphModule:
    """Copy a graph so that it can be rewritten without changing ``module``; metadata and constants are shared."""
    graph = Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    return torch.fx.GraphModule(module, graph)


def describe_site(node: Node) -> str:
    """Return the name of a node and the path of the module that it came from, e.g. ``add_2 in norm2``."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return node.name
    path = str(list(stack.values())[-1][0])
    path = path.replace("L['module'].", "").replace("L['module']", "").replace("_modules['", "").replace("']", "")
    return f"{node.name} in {path}" if path else node.name
