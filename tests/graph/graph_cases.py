"""Rules and graphs that the tests of matcher, rewriter and canonical form share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from h3opt.graph.canonicalize import canonicalize
from h3opt.graph.matcher import Match, Rule
from h3opt.graph.rewriter import Outcome, apply_rules
from h3opt.graph.tracing import trace

aten = torch.ops.aten
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def product_plus(x: Any, y: Any, z: Any) -> Any:
    return x * y + z


def addcmul(x: Any, y: Any, z: Any) -> Any:
    return aten.addcmul(z, x, y)


ADDCMUL = Rule(product_plus, addcmul)


def listing(graph: GraphModule) -> list[str]:
    """Return a line for each operator, e.g. ``mul.Tensor(x_1, 2.0)``."""
    lines = []
    for node in graph.graph.nodes:
        if node.op == "call_function":
            arguments = [str(item) for item in node.args] + [f"{key}={item}" for key, item in node.kwargs.items()]
            lines.append(f"{node.target.__name__}({', '.join(arguments)})")
    return lines


def rewritten(
    rules: Rule | tuple[Rule, ...],
    function: Callable[..., Any],
    *args: torch.Tensor,
    accept: Callable[[Match], str | None] | None = None,
) -> tuple[list[str], list[str], Outcome]:
    """Return listings before and after, and the outcome; check that the graph is valid and runs."""
    graph = canonicalize(trace(function, args))
    before = listing(graph)
    outcome = apply_rules(rules if isinstance(rules, tuple) else (rules,), graph, accept)
    graph.graph.lint()
    if outcome.matched:
        graph(*args)
    return before, listing(graph), outcome
