"""Executors: how a rewritten graph runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from h3opt._torch_private import compile_with_inductor
from h3opt.graph.nodes import copy_graph

Executor = Callable[[GraphModule, list[Any]], Callable[..., Any]]
"""``executor(graph, example_inputs)`` returns a callable that runs the graph."""


def direct(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Run the Python code that torch.fx generates: library GEMMs and attention, h3opt's kernels, ATen for the rest.

    There is nothing to compile, and only passes change bits.
    """
    return graph.forward


def inductor(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Compile the rewritten graph with Inductor, which changes bits also where no pass matched."""
    return compile_with_inductor(copy_graph(graph), example_inputs)  # Inductor changes the graph in place


EXECUTORS: dict[str, Executor] = {"direct": direct, "inductor": inductor}
"""The executors by name."""
