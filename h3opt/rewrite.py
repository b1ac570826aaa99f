"""Find the sites of a rule in a semantic graph, rewrite them, and say why the nearest miss was one.

``torch.fx.subgraph_rewriter`` finds sites too, but a pass here must be able to say *why* a site was left alone, match
literals by name and try both orders of ``+`` and ``*``; hence a matcher of our own.
"""

from __future__ import annotations

import heapq
import inspect
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from h3opt.canonical import mutating_node, spell, value
from h3opt.errors import PassDefinitionError, PassFailedError
from h3opt.protocol import Rule

aten = torch.ops.aten
_COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}


@dataclass(frozen=True)
class NearMiss:
    """A site that matched in part.

    Attributes:
        site: where.
        matched: how many operators of the pattern were found.
        of: how many the pattern has.
        why: the first thing that differed.
    """

    site: str
    matched: int
    of: int
    why: str

    def __str__(self) -> str:
        return f"{self.site}: {self.matched} of {self.of} operators match, but {self.why}"


@dataclass(frozen=True)
class Match:
    """One site of a rule.

    Attributes:
        rule: what matched.
        bound: for each parameter of the pattern, the graph node or literal in its place.
        nodes: the graph node for each operator of the pattern.
        outputs: the graph nodes whose values the replacement must produce; ``None`` for one nobody reads.
    """

    rule: Rule
    bound: dict[str, Any]
    nodes: dict[Node, Node]
    outputs: tuple[Node | None, ...]

    def tensor(self, name: str) -> torch.Tensor | None:
        """The fake tensor bound to parameter ``name``, ``None`` if a literal is."""
        return value(self.bound[name])

    def literal(self, name: str) -> Any:
        """The literal bound to parameter ``name``; nodes come back as nodes."""
        return self.bound[name]

    def dtypes(self, *names: str) -> set[torch.dtype]:
        """The dtypes of the tensors bound to ``names``."""
        return {tensor.dtype for name in names if (tensor := self.tensor(name)) is not None}

    @property
    def site(self) -> str:
        """Where it is, in the words of the model if Dynamo recorded them."""
        return describe_site(self.anchor)

    @property
    def anchor(self) -> Node:
        """The node where matching started: the last output."""
        anchor = self.outputs[-1]
        assert anchor is not None  # matching starts there
        return anchor


@dataclass
class Outcome:
    """What applying rules to one graph did."""

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
        accept: a last check before a site is rewritten (the probe); returns a reason to leave it alone.

    Raises:
        PassFailedError: a replacement's outputs differ from the pattern's in shape, dtype or device.
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
            found, miss = match_at(rule, anchor)
            if found is None:
                if miss is not None and miss.matched > 1:
                    missed.append((anchor, miss))
                continue
            reason = accept(found) if accept is not None else None
            if reason is not None:
                outcome.refused.append(f"{found.site}: {reason}")
                continue
            outcome.matched += 1
            outcome.sites.append(found.site)
            _replace(module, found)
    left = set(module.graph.nodes)  # what another rule rewrote was no miss
    misses = sorted((miss for node, miss in missed if node in left), key=lambda miss: -miss.matched)
    outcome.near_misses += [miss for miss in misses if 2 * miss.matched >= miss.of] or misses[:1]
    if outcome.matched:
        _sort_stably(module.graph)
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
    return outcome


def match_at(rule: Rule, anchor: Node) -> tuple[Match | None, NearMiss | None]:
    """Match ``rule`` with its last output at ``anchor``; on failure, the nearest this node came to it."""
    pattern = traced(rule.pattern)
    operators = sum(node.op == "call_function" for node in pattern.nodes)
    attempt = _Attempt()
    root = pattern.outputs[-1]
    refusal: tuple[int, str] | None = None
    for state in attempt.unify(root, anchor, {}):
        state = _with_siblings(state, pattern.outputs)
        matched = {p: g for p, g in state.items() if p.op == "call_function"}
        reason = _escapes(matched, pattern.outputs) or _feeds_itself(state, matched)
        bound = {str(p.target): state[p] for p in pattern.placeholders if p in state}
        found = Match(rule, bound, matched, tuple(matched.get(output) for output in pattern.outputs))
        if reason is None and rule.guard is not None:
            reason = rule.guard(found)
        if reason is None:
            return found, None
        refusal = refusal or (len(matched), reason)
    count, why = refusal or (attempt.deepest, attempt.why)
    return None, NearMiss(describe_site(anchor), count, operators, why) if why else None


@dataclass(frozen=True)
class Traced:
    """A pattern or replacement as a graph.

    Attributes:
        nodes: all nodes, in order.
        placeholders: one per parameter.
        outputs: the returned nodes.
    """

    nodes: tuple[Node, ...]
    placeholders: tuple[Node, ...]
    outputs: tuple[Node, ...]


@cache
def traced(function: Callable[..., Any]) -> Traced:
    """Trace a pattern or replacement with every parameter unknown.

    Raises:
        PassDefinitionError: the function does something that depends on a value, or returns none of its operators.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        graph: Graph = torch.fx.symbolic_trace(function).graph
    except (torch.fx.proxy.TraceError, TypeError, RuntimeError) as error:
        raise PassDefinitionError(
            f"{name} cannot be traced: {error}. Write it with torch.ops operators, + and *, with no branch on a value."
        ) from error
    for node in graph.nodes:
        if node.op == "call_function":
            _resolve_overload(node, name)
            spell(node)
        elif node.op not in ("placeholder", "output"):
            raise PassDefinitionError(
                f"{name} uses {node.target!r} as a {node.op.replace('_', ' ')}. Write "
                f"torch.ops.aten.{node.target}(...): graphs hold operators, and a pattern is compared with them."
            )
    returned = next(node for node in graph.nodes if node.op == "output").args[0]
    outputs = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    if not outputs or any(not isinstance(node, Node) for node in outputs):
        raise PassDefinitionError(f"{name} returns something that is not a tensor. Return the values it computes.")
    placeholders = tuple(node for node in graph.nodes if node.op == "placeholder")
    return Traced(tuple(graph.nodes), placeholders, outputs)


def describe_site(node: Node) -> str:
    """A node and the module it came from, e.g. ``add_2 (norm2)``."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return node.name
    path = str(list(stack.values())[-1][0])
    path = path.replace("L['module'].", "").replace("L['module']", "").replace("_modules['", "").replace("']", "")
    return f"{node.name} in {path}" if path else node.name


class _Attempt:
    """One try at a site; remembers how far the best branch came and what stopped it."""

    def __init__(self) -> None:
        self._reached = (0, False)
        self.why = ""

    @property
    def deepest(self) -> int:
        return self._reached[0]

    def unify(self, pattern: Any, found: Any, state: dict[Node, Any]) -> Iterator[dict[Node, Any]]:
        if not isinstance(pattern, Node):
            yield from self._literal(pattern, found, state)
        elif pattern in state:
            if _same(state[pattern], found):
                yield state
            else:
                self._stop(state, f"{pattern.name} would stand for both {state[pattern]} and {found}")
        elif pattern.op == "placeholder":
            yield {**state, pattern: found}
        elif not isinstance(found, Node) or found.op != "call_function" or found.target is not pattern.target:
            self._stop(state, f"{_name(found)} stands where {_name(pattern)} is expected")
        elif len(found.args) != len(pattern.args) or set(found.kwargs) != set(pattern.kwargs):
            same_operator = {**state, pattern: found}
            self._stop(same_operator, f"{_name(found)} has other arguments than the pattern's {_name(pattern)}")
        else:
            state = {**state, pattern: found}
            kwargs = [(pattern.kwargs[name], found.kwargs[name]) for name in pattern.kwargs]
            orders = [found.args]
            if pattern.target in _COMMUTATIVE and len(found.args) == 2:
                orders.append(found.args[::-1])
            for args in orders:
                yield from self._all([*zip(pattern.args, args, strict=True), *kwargs], state)

    def _all(self, pairs: list[tuple[Any, Any]], state: dict[Node, Any]) -> Iterator[dict[Node, Any]]:
        if not pairs:
            yield state
            return
        (pattern, found), rest = pairs[0], pairs[1:]
        for extended in self.unify(pattern, found, state):
            yield from self._all(rest, extended)

    def _literal(self, pattern: Any, found: Any, state: dict[Node, Any]) -> Iterator[dict[Node, Any]]:
        if isinstance(pattern, (list, tuple)):
            if isinstance(found, (list, tuple)) and len(found) == len(pattern):
                yield from self._all(list(zip(pattern, found, strict=True)), state)
            else:
                self._stop(state, f"{found} stands where {list(pattern)} is expected")
        elif not isinstance(found, Node) and _same_number(pattern, found):
            yield state
        else:
            self._stop(state, f"{_name(found)} stands where {pattern!r} is expected", not isinstance(found, Node))

    def _stop(self, state: dict[Node, Any], why: str, telling: bool = False) -> None:
        # of the two operand orders of + and *, the one that got to compare literals says more
        reached = (sum(node.op == "call_function" for node in state), telling)
        if reached > self._reached or not self.why:
            self._reached, self.why = reached, why


def _with_siblings(state: dict[Node, Any], outputs: tuple[Node, ...]) -> dict[Node, Any]:
    """Bind outputs that are other results of an operator already bound: ``op(x)[0]`` beside ``op(x)[1]``."""
    state = dict(state)
    for output in outputs:
        if output in state or output.target is not operator.getitem or output.args[0] not in state:
            continue
        for user in state[output.args[0]].users:  # type: ignore[index]
            if user.target is operator.getitem and user.args[1] == output.args[1]:
                state[output] = user
    return state


def _escapes(matched: dict[Node, Node], outputs: tuple[Node, ...]) -> str | None:
    """An intermediate that something else reads would have to be computed twice."""
    inside = set(matched.values())
    for pattern, found in matched.items():
        if pattern in outputs:
            continue
        for user in found.users:
            if user not in inside:
                return f"the intermediate {_name(found)} is also read by {_name(user)}"
    return None


def _feeds_itself(state: dict[Node, Any], matched: dict[Node, Node]) -> str | None:
    """An input that depends on an output cannot be computed before it."""
    inside = set(matched.values())
    for pattern, found in state.items():
        if pattern.op != "placeholder" or not isinstance(found, Node):
            continue
        todo, seen = [found], set()
        while todo:
            node = todo.pop()
            if node in inside:
                return f"the input {_name(found)} depends on {_name(node)}, which lies inside the pattern"
            if node not in seen:
                seen.add(node)
                todo.extend(node.all_input_nodes)
    return None


def _replace(module: GraphModule, match: Match) -> None:
    replacement = traced(match.rule.replacement)
    unknown = [node.target for node in replacement.placeholders if node.target not in match.bound]
    if unknown:
        raise PassDefinitionError(
            f"{match.rule.replacement.__qualname__} takes {unknown[0]!r}, which the pattern does not bind. "
            "Give pattern and replacement the same parameters."
        )
    anchor = match.anchor
    made: dict[Node, Any] = {node: match.bound[str(node.target)] for node in replacement.placeholders}
    with module.graph.inserting_before(anchor):
        for node in replacement.nodes:
            if node.op == "call_function":
                made[node] = module.graph.node_copy(node, lambda argument: made[argument])
                made[node].meta = {"nn_module_stack": anchor.meta.get("nn_module_stack")}
                made[node].meta["val"] = _fake_value(made[node], module)
    for old, new in zip(match.outputs, replacement.outputs, strict=True):
        if old is None:
            continue
        new_node = made[new]
        _require_same_meta(old, new_node, match)
        old.replace_all_uses_with(new_node)
    replaced = set(match.nodes.values())
    for node in reversed(list(module.graph.nodes)):
        if node in replaced and not node.users:
            module.graph.erase_node(node)


def _sort_stably(graph: Graph) -> None:
    """Inputs before their readers, and otherwise the order as it was: random operators and mode switches have one."""
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


def _resolve_overload(node: Node, name: str) -> None:
    """``torch.ops.aten.rms_norm`` → ``torch.ops.aten.rms_norm.default``, where only one overload can be meant."""
    packet = node.target
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return
    given = len(node.args) + len(node.kwargs)
    fitting = []
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        arguments = candidate._schema.arguments
        required = sum(not argument.has_default_value() for argument in arguments)
        known = set(node.kwargs) <= {argument.name for argument in arguments}
        if known and required <= given <= len(arguments) and not any(argument.is_out for argument in arguments):
            fitting.append(candidate)
    if "default" in packet.overloads() and packet.default in fitting:
        fitting = [packet.default]
    if len(fitting) != 1:
        raise PassDefinitionError(
            f"{name} calls {packet}, which has several overloads. Name the one the model uses, e.g. {packet}.Tensor."
        )
    node.target = fitting[0]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Node) or isinstance(right, Node):
        return left is right
    return type(left) is type(right) and _same_number(left, right)


def _same_number(left: Any, right: Any) -> bool:
    """Equal to an operator: 1 and 1.0 are, 1 and True are not, and neither are 0.0 and -0.0."""
    if isinstance(left, bool) != isinstance(right, bool) or left != right:
        return False
    numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
    return not numbers or math.copysign(1.0, left) == math.copysign(1.0, right)


def _name(found: Any) -> str:
    if not isinstance(found, Node):
        return repr(found)
    return f"{found.target}" if found.op == "call_function" else found.name


def parameters(rule: Rule) -> list[str]:
    """The parameter names of a rule's pattern."""
    return list(inspect.signature(rule.pattern).parameters)
