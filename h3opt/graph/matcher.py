"""Find the places where a pattern occurs in a semantic graph."""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node

from h3opt.errors import PassDefinitionError
from h3opt.graph.canonicalize import normalize
from h3opt.graph.nodes import describe_site, value

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
            normalize(node)
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


@dataclass(frozen=True)
class Rule:
    """One rewrite: wherever ``pattern`` occurs, put ``replacement``.

    Both are functions with the same parameter names, written with ``torch.ops.aten`` (or h3opt's own) operators and
    plain ``+`` and ``*``. They are traced, so no parameter has a value: each matches a tensor *or* a literal (an
    ``eps``, a size) and ``+`` and ``*`` match either operand order. A pattern may return several values; the last
    one is where matching starts, and the others must lie on the way to it.

    Both are also ordinary functions of real tensors, which is how the probe compares them on the user's machine.

    Attributes:
        guard: called with the match; returns why this site must be left alone, or ``None`` to go ahead.
        index_into: for integer inputs, the name of the table they select rows of, e.g.
            ``{"index": "scale_table"}``: what the probe needs to draw valid ones.
    """

    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    guard: Callable[[Match], str | None] | None = None
    index_into: dict[str, str] = dataclasses.field(default_factory=dict)
