"""Executors: how a rewritten graph runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from h3opt._torch_private import compile_with_inductor
from h3opt.graph.nodes import attention_backends, copy_graph

Executor = Callable[[GraphModule, list[Any]], Callable[..., Any]]
"""``executor(graph, example_inputs)`` returns a callable that runs the graph."""


def direct(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Run the Python code that torch.fx generates: library GEMMs and attention, h3opt's kernels, ATen for the rest.

    There is nothing to compile, and only passes change bits.
    """
    return _with_attention_backends(graph).forward


def inductor(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Compile the rewritten graph with Inductor, which changes bits also where no pass matched."""
    return compile_with_inductor(
        copy_graph(_with_attention_backends(graph)), example_inputs
    )  # Inductor changes the graph in place


EXECUTORS: dict[str, Executor] = {"direct": direct, "inductor": inductor}
"""The executors by name."""


def attention_under(backends: tuple[str, ...], in_order: bool, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call ``aten.scaled_dot_product_attention`` with only these backends of ``SDPBackend`` allowed."""
    with sdpa_kernel([getattr(SDPBackend, name) for name in backends], set_priority=in_order):
        return torch.ops.aten.scaled_dot_product_attention.default(*args, **kwargs)


def _with_attention_backends(graph: GraphModule) -> GraphModule:
    """Run attention with the backends that the model chose; a graph without such a choice is returned as it is."""
    if all(attention_backends(node) is None for node in graph.graph.nodes):
        return graph
    graph = copy_graph(graph)
    for node in graph.graph.nodes:
        if (chosen := attention_backends(node)) is not None:
            node.target, node.args = attention_under, (*chosen, *node.args)
    graph.recompile()
    return graph
