"""What runs a rewritten graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from h3opt._torch_private import compile_with_inductor
from h3opt.graph.nodes import copy_graph

Executor = Callable[[GraphModule, list[Any]], Callable[..., Any]]


def direct(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """The graph's own generated Python: library GEMMs and attention, h3opt's kernels, ATen for the rest.

    Nothing changes bits that no pass changed, and there is nothing to compile.
    """
    return graph.forward


def inductor(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """``compile_fx`` on the rewritten graph. Inductor moves bits by itself, also where no pass fires."""
    return compile_with_inductor(copy_graph(graph), example_inputs)  # it rewrites what it is given


EXECUTORS: dict[str, Executor] = {"direct": direct, "inductor": inductor}
