"""Rewrite the sites of rules in a semantic graph, and report near misses.

``torch.fx.subgraph_rewriter`` rewrites sites too, but it cannot report *why* a site does not match, bind literals by
name or try both operand orders of ``+`` and ``*``; hence the matcher in :mod:`h3opt.graph.matcher`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from h3opt.errors import PassDefinitionError, PassFailedError
from h3opt.graph.matcher import Match, NearMiss, Rule, match_at, traced
from h3opt.graph.nodes import attention_backends, describe_site, mutating_node, value


@dataclass
class Outcome:
    """The result of applying rules to a graph.

    Attributes:
        matched: how many sites were rewritten.
        sites: these sites.
        refused: sites that ``accept`` refused, or where the model chooses how attention runs, with the reason.
        near_misses: sites that match in part, the nearest first.
    """

    matched: int = 0
    sites: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)


def apply_rules(
    rules: tuple[Rule, ...], module: GraphModule, accept: Callable[[Match], str | None] | None = None
) -> Outcome:
    """Rewrite every site of ``rules`` in ``module``, in place.

    Args:
        rules: tried in order at each site.
        module: a canonical semantic graph with fake values in ``node.meta["val"]``.
        accept: the last check before a site is rewritten (the probe); returns a reason to leave the site unchanged.

    Raises:
        PassFailedError: the outputs of a replacement differ from those of the pattern in shape, dtype or device.
    """
    outcome = Outcome()
    writer = mutating_node(module)
    if writer is not None:
        outcome.near_misses.append(
            NearMiss(describe_site(writer), 0, 0, f"the graph writes to a tensor there ({writer.target})")
        )
        return outcome
    missed: list[tuple[Node, NearMiss]] = []
    for rule in rules:
        for anchor in list(module.graph.nodes):
            if anchor.op != "call_function" or (not anchor.users):
                continue
            match, miss = match_at(rule, anchor)
            if match is None:
                if miss is not None and miss.matched > 1:
                    missed.append((anchor, miss))
                continue
            reason = _chosen_attention(match)
            if reason is None and accept is not None:
                reason = accept(match)
            if reason is not None:
                outcome.refused.append(f"{match.site}: {reason}")
                continue
            outcome.matched += 1
            outcome.sites.append(match.site)
            _replace(module, match)
    remaining = set(module.graph.nodes)  # a site that another rule has rewritten is no miss
    misses = sorted((miss for node, miss in missed if node in remaining), key=lambda miss: -miss.matched)
    outcome.near_misses += [miss for miss in misses if 2 * miss.matched >= miss.of] or misses[:1]
    if outcome.matched:
        _sort_stably(module.graph)
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
    return outcome


def _chosen_attention(match: Match) -> str | None:
    """Why attention of a site must stay: the user has chosen the implementation."""
    for node in match.nodes.values():
        if (chosen := attention_backends(node)) is not None:
            return (
                f"attention is restricted to {', '.join(chosen[0])} there, by set_attention_backend(), "
                "attention_backend() or sdpa_kernel()"
            )
    return None


def _replace(module: GraphModule, match: Match) -> None:
    """Insert the replacement before the anchor and erase the nodes of the pattern."""
    replacement = traced(match.rule.replacement)
    unknown = [node.target for node in replacement.placeholders if node.target not in match.bound]
    if unknown:
        raise PassDefinitionError(
            f"{match.rule.replacement.__qualname__} takes {unknown[0]!r}, which the pattern does not bind. "
            "Give pattern and replacement the same parameters."
        )
    anchor = match.anchor
    inserted: dict[Node, Any] = {node: match.bound[str(node.target)] for node in replacement.placeholders}
    with module.graph.inserting_before(anchor):
        for node in replacement.nodes:
            if node.op == "call_function":
                inserted[node] = module.graph.node_copy(node, lambda argument: inserted[argument])
                inserted[node].meta = {"nn_module_stack": anchor.meta.get("nn_module_stack")}
                inserted[node].meta["val"] = _fake_value(inserted[node], module)
    for old, new in zip(match.outputs, replacement.outputs, strict=True):
        if old is None:
            continue
        new_node = inserted[new]
        _require_same_meta(old, new_node, match)
        old.replace_all_uses_with(new_node)
    replaced = set(match.nodes.values())
    for node in reversed(list(module.graph.nodes)):
        if node in replaced and not node.users:
            module.graph.erase_node(node)


def _sort_stably(graph: Graph) -> None:
    """Sort nodes topologically and otherwise keep the order, on which random operators and mode switches depend."""
    position = {node: number for number, node in enumerate(graph.nodes)}
    missing = {node: len(node.all_input_nodes) for node in position}
    ready = [number for node, number in position.items() if not missing[node]]
    nodes = list(position)
    heapq.heapify(ready)
    last: Node | None = None
    while ready:
        node = nodes[heapq.heappop(ready)]
        if last is not None:
            last.append(node)
        last = node
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, position[user])


def _fake_value(node: Node, module: GraphModule) -> Any:
    """Run the operator of a new node on the fake tensors of the inputs."""
    tensors = (value(other) for other in module.graph.nodes)
    fake_mode = next(tensor.fake_mode for tensor in tensors if tensor is not None)  # type: ignore[attr-defined]
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    with fake_mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _require_same_meta(old: Node, new: Any, match: Match) -> None:
    before, after = value(old), value(new)
    if before is None or after is None:
        return
    same_shape = len(before.shape) == len(after.shape) and all(
        str(left) == str(right) for left, right in zip(before.shape, after.shape, strict=True)
    )
    if not same_shape or before.dtype != after.dtype or before.device != after.device:
        raise PassFailedError(
            f"{match.rule.replacement.__qualname__} gives {after.dtype} {list(after.shape)} at {match.site}, where the "
            f"pattern gives {before.dtype} {list(before.shape)}. Add a guard to the rule, or mend the replacement."
        )
