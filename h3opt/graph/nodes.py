"""Nodes and graphs: the tensor of a node, where a node came from, copies."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node


def mutating_node(module: GraphModule) -> Node | None:
    """The first node that writes to a tensor; a graph that has one cannot be matched across it safely."""
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            return node
    return None


def value(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node, or ``None`` for literals and nodes that hold no tensor."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def copy_graph(module: GraphModule) -> GraphModule:
    """A graph that can be rewritten without touching ``module``; metadata and constants are shared."""
    graph = Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    return torch.fx.GraphModule(module, graph)


def describe_site(node: Node) -> str:
    """A node and the module it came from, e.g. ``add_2 (norm2)``."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return node.name
    path = str(list(stack.values())[-1][0])
    path = path.replace("L['module'].", "").replace("L['module']", "").replace("_modules['", "").replace("']", "")
    return f"{node.name} in {path}" if path else node.name
