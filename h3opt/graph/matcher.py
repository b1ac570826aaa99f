"""Match rules against a semantic graph: the site of a match, or the reason why a site does not match."""

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
class Rule:
    """A rewrite: put ``replacement`` wherever ``pattern`` occurs.

    Both are functions with the same parameter names, written with operators of ``torch.ops.aten`` or h3opt and with
    plain ``+`` and ``*``. They are traced, so parameters have no value: each matches a tensor *or* a literal (an
    ``eps``, a size). ``+`` and ``*`` match in either operand order. A pattern may return several values: matching
    starts at the last, and the others must be computed on the way to it.

    Both are also ordinary functions of real tensors: the probe calls them to compare results on the user's machine.

    Attributes:
        pattern: the function to match.
        replacement: the function to put in its place.
        guard: called with the match; returns why the site must be left unchanged, or ``None`` to rewrite it.
        index_into: for integer inputs, the name of the table from which they select rows, e.g.
            ``{"index": "scale_table"}``: the probe draws valid row numbers.
    """

    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    guard: Callable[[Match], str | None] | None = None
    index_into: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class NearMiss:
    """A site that matches a pattern in part.

    Attributes:
        site: the node, as :func:`~h3opt.graph.nodes.describe_site` writes it.
        matched: how many operators of the pattern match.
        of: how many operators the pattern has.
        why: the first difference.
    """

    site: str
    matched: int
    of: int
    why: str

    def __str__(self) -> str:
        return f"{self.site}: {self.matched} of {self.of} operators match, but {self.why}"


@dataclass(frozen=True)
class Match:
    """A site at which a rule matches.

    Attributes:
        rule: the rule.
        bound: the graph node or literal that each parameter of the pattern matches.
        nodes: the graph node for each operator of the pattern.
        outputs: the graph node for each output of the pattern; ``None`` for an output that no node reads.
    """

    rule: Rule
    bound: dict[str, Any]
    nodes: dict[Node, Node]
    outputs: tuple[Node | None, ...]

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return the fake tensor bound to parameter ``name``; ``None`` if it is bound to a literal."""
        return value(self.bound[name])

    def literal(self, name: str) -> Any:
        """Return what is bound to parameter ``name``: a literal, or a graph node for a tensor."""
        return self.bound[name]

    def dtypes(self, *names: str) -> set[torch.dtype]:
        """Return the dtypes of the tensors bound to ``names``."""
        return {tensor.dtype for name in names if (tensor := self.tensor(name)) is not None}

    @property
    def site(self) -> str:
        """The node where matching started, with the path of the module if Dynamo recorded it."""
        return describe_site(self.anchor)

    @property
    def anchor(self) -> Node:
        """The node where matching started: the last output."""
        anchor = self.outputs[-1]
        assert anchor is not None  # matching starts at this node
        return anchor


def match_at(rule: Rule, anchor: Node) -> tuple[Match | None, NearMiss | None]:
    """Match ``rule`` with the last output of the pattern at ``anchor``.

    Returns:
        The match, or else the near miss if any part of the pattern matches.
    """
    pattern = traced(rule.pattern)
    operators = sum(node.op == "call_function" for node in pattern.nodes)
    attempt = _Attempt()
    refusal: tuple[int, str] | None = None
    for state in attempt.unify(pattern.outputs[-1], anchor, {}):
        state = _with_siblings(state, pattern.outputs)
        matched = {p: g for p, g in state.items() if p.op == "call_function"}
        reason = _escapes(matched, pattern.outputs) or _feeds_itself(state, matched)
        bound = {str(p.target): state[p] for p in pattern.placeholders if p in state}
        match = Match(rule, bound, matched, tuple(matched.get(output) for output in pattern.outputs))
        if reason is None and rule.guard is not None:
            reason = rule.guard(match)
        if reason is None:
            return match, None
        refusal = refusal or (len(matched), reason)
    count, why = refusal or (attempt.deepest, attempt.why)
    return None, NearMiss(describe_site(anchor), count, operators, why) if why else None


@dataclass(frozen=True)
class Traced:
    """A pattern or replacement as a graph.

    Attributes:
        nodes: all nodes, in order.
        placeholders: the node of each parameter.
        outputs: the returned nodes.
    """

    nodes: tuple[Node, ...]
    placeholders: tuple[Node, ...]
    outputs: tuple[Node, ...]


@cache
def traced(function: Callable[..., Any]) -> Traced:
    """Trace a pattern or replacement with symbolic parameters.

    Raises:
        PassDefinitionError: the function depends on the value of a parameter, or returns something else than results
            of operators.
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


def parameters(rule: Rule) -> list[str]:
    """Return the parameter names of the pattern of a rule."""
    return list(inspect.signature(rule.pattern).parameters)


class _Attempt:
    """A search for a match at a site by unification, with backtracking over operand orders.

    Attributes:
        why: what stopped the branch of the search that matched most operators.
    """

    def __init__(self) -> None:
        self._reached = (0, False)
        self.why = ""

    @property
    def deepest(self) -> int:
        """The number of operators that the branch matched."""
        return self._reached[0]

    def unify(self, pattern: Any, target: Any, state: dict[Node, Any]) -> Iterator[dict[Node, Any]]:
        """Yield every extension of ``state`` (pattern node → graph node or literal) in which both are equal."""
        if not isinstance(pattern, Node):
            yield from self._literal(pattern, target, state)
        elif pattern in state:
            if _same(state[pattern], target):
                yield state
            else:
                self._stop(state, f"{pattern.name} would stand for both {state[pattern]} and {target}")
        elif pattern.op == "placeholder":
            yield {**state, pattern: target}
        elif not isinstance(target, Node) or target.op != "call_function" or target.target is not pattern.target:
            self._stop(state, f"{_name(target)} stands where {_name(pattern)} is expected")
        elif len(target.args) != len(pattern.args) or set(target.kwargs) != set(pattern.kwargs):
            same_operator = {**state, pattern: target}
            self._stop(same_operator, f"{_name(target)} has other arguments than the pattern's {_name(pattern)}")
        else:
            state = {**state, pattern: target}
            kwargs = [(pattern.kwargs[name], target.kwargs[name]) for name in pattern.kwargs]
            orders = [target.args]
            if pattern.target in _COMMUTATIVE and len(target.args) == 2:
                orders.append(target.args[::-1])
            for args in orders:
                yield from self._all([*zip(pattern.args, args, strict=True), *kwargs], state)

    def _all(self, pairs: list[tuple[Any, Any]], state: dict[Node, Any]) -> Iterator[dict[Node, Any]]:
        if not pairs:
            yield state
            return
        (pattern, target), rest = pairs[0], pairs[1:]
        for extended in self.unify(pattern, target, state):
            yield from self._all(rest, extended)

    def _literal(self, pattern: Any, target: Any, state: dict[Node, Any]) -> Iterator[dict[Node, Any]]:
        if isinstance(pattern, (list, tuple)):
            if isinstance(target, (list, tuple)) and len(target) == len(pattern):
                yield from self._all(list(zip(pattern, target, strict=True)), state)
            else:
                self._stop(state, f"{target} stands where {list(pattern)} is expected")
        elif not isinstance(target, Node) and _same_number(pattern, target):
            yield state
        else:
            self._stop(state, f"{_name(target)} stands where {pattern!r} is expected", not isinstance(target, Node))

    def _stop(self, state: dict[Node, Any], why: str, compared_literals: bool = False) -> None:
        # Of the two operand orders of + and *, the order that came to compare literals gives the better reason.
        reached = (sum(node.op == "call_function" for node in state), compared_literals)
        if reached > self._reached or not self.why:
            self._reached, self.why = reached, why


def _with_siblings(state: dict[Node, Any], outputs: tuple[Node, ...]) -> dict[Node, Any]:
    """Bind outputs that are further results of an operator that is already bound: ``op(x)[0]`` beside ``op(x)[1]``."""
    state = dict(state)
    for output in outputs:
        if output in state or output.target is not operator.getitem or output.args[0] not in state:
            continue
        for user in state[output.args[0]].users:  # type: ignore[index]
            if user.target is operator.getitem and user.args[1] == output.args[1]:
                state[output] = user
    return state


def _escapes(matched: dict[Node, Node], outputs: tuple[Node, ...]) -> str | None:
    """Reject a match with an intermediate that other nodes read: it would have to be computed twice."""
    inside = set(matched.values())
    for pattern, target in matched.items():
        if pattern in outputs:
            continue
        for user in target.users:
            if user not in inside:
                return f"the intermediate {_name(target)} is also read by {_name(user)}"
    return None


def _feeds_itself(state: dict[Node, Any], matched: dict[Node, Node]) -> str | None:
    """Reject a match with an input that depends on a node inside it: the input cannot be computed first."""
    inside = set(matched.values())
    for pattern, target in state.items():
        if pattern.op != "placeholder" or not isinstance(target, Node):
            continue
        pending, seen = [target], set()
        while pending:
            node = pending.pop()
            if node in inside:
                return f"the input {_name(target)} depends on {_name(node)}, which lies inside the pattern"
            if node not in seen:
                seen.add(node)
                pending.extend(node.all_input_nodes)
    return None


def _resolve_overload(node: Node, name: str) -> None:
    """Replace an operator without overload by the only overload that fits the arguments.

    E.g. ``torch.ops.aten.rms_norm`` by ``torch.ops.aten.rms_norm.default``.
    """
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
    """Return whether an operator treats two literals alike: 1 and 1.0, but not 1 and True, nor 0.0 and -0.0."""
    if isinstance(left, bool) != isinstance(right, bool) or left != right:
        return False
    numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
    return not numbers or math.copysign(1.0, left) == math.copysign(1.0, right)


def _name(item: Any) -> str:
    if not isinstance(item, Node):
        return repr(item)
    return f"{item.target}" if item.op == "call_function" else item.name
