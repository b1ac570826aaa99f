"""Hold the operators of libraries to their definitions on this machine, before a rewrite uses them.

The probe proves Exact rewrites. A rewrite that changes a number format cannot be proven so: its result must differ.
But the operator that a library runs must differ from exact arithmetic by what the format costs, and by no more:
Hopper's FP8 tensor cores, for example, keep about 14 bits of a sum, and lose long sums on data that is not zero-mean.
So each operator that registers a check (:class:`h3opt.kernels.ops.registry.DefinitionCheck`) is run at the site's
length on all kinds of data, and compared with its definition on sampled rows. Results are kept per operator and shape
for the whole process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from h3opt._torch_private import size_hint
from h3opt.graph.matcher import Match, traced
from h3opt.graph.nodes import value
from h3opt.kernels import CHECKS, DEFINITIONS, OPERATORS
from h3opt.kernels.ops.registry import TensorSpec

_FLOOR = 1e-4
"""The smallest error that counts as the limit: where the definition is exact, float32 sums still are not."""


@dataclass(frozen=True)
class Measurement:
    """How far an operator is from exact arithmetic, next to its definition.

    Attributes:
        operator: the name of the operator.
        kind: of the data on which the ratio is largest.
        error: relative error of the operator on it, against float64 with unquantized operands.
        limit: the same of the definition.
        factor: the largest ``error / limit`` allowed.
        skipped: why nothing was measured; the figures are 0 then.
    """

    operator: str
    kind: str = ""
    error: float = 0.0
    limit: float = 0.0
    factor: float = 0.0
    skipped: str | None = None

    @property
    def ratio(self) -> float:
        """``error / limit``; 0 where nothing was measured, infinity where the operator gave NaN."""
        if self.skipped is not None:
            return 0.0
        return self.error / max(self.limit, _FLOOR) if math.isfinite(self.error) else math.inf

    @property
    def holds(self) -> bool:
        return self.skipped is not None or self.ratio <= self.factor

    def __str__(self) -> str:
        if self.skipped is not None:
            return f"definition: not checked, {self.skipped}"
        return f"definition: error {self.ratio:.2f} of the limit, worst kind {self.kind}"

    def refusal(self) -> str:
        """Why a site is left alone."""
        return (
            f"{self.operator} is off its definition on this device: on data of kind {self.kind} the relative error is "
            f"{self.error:.4f}, {self.ratio:.1f} times the limit of {self.limit:.4f} (allowed is {self.factor:g} times)"
        )


def check_site(match: Match) -> Measurement | None:
    """Hold every operator of a rewrite that registered a check to its definition, at the site's shapes.

    Returns:
        the measurement with the largest ratio; ``None`` if no operator of the replacement registered a check.
    """
    measured = [measure(name, arguments) for name, arguments in _checked_operators(match)]
    return max(measured, key=lambda one: one.ratio / one.factor if one.factor else 0.0, default=None)


def has_check(match: Match) -> bool:
    """Whether an operator of the replacement of ``match`` registered a check."""
    return any(_name(node.target) in CHECKS for node in traced(match.rule.replacement).nodes)


def check_graph(module: GraphModule) -> list[Measurement]:
    """Hold the operators that format passes put into a captured graph to their definitions, where they have a check.

    Returns:
        a measurement for each operator and shape.
    """
    found: dict[Measurement, None] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and (name := _name(node.target)) in CHECKS:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
            found[measure(name, _in_order(node.target, args, kwargs))] = None
    return list(found)


def measure(name: str, arguments: Sequence[Any]) -> Measurement:
    """Hold one operator to its definition, once per process for each shape.

    Args:
        name: of the operator.
        arguments: as a site has them; tensors, which may be fake, give shape, dtype and device.
    """
    arguments = [_concrete(one) for one in arguments]
    key = tuple(one if isinstance(one, TensorSpec) else repr(one) for one in arguments)
    if (name, key) not in _measured:
        _measured[name, key] = _measure(name, arguments)
    return _measured[name, key]


def unchecked(device: torch.device) -> str | None:
    """Why operators need no check on ``device``; ``None`` if they do."""
    return "on a CPU the operator is its definition" if device.type == "cpu" else None


_measured: dict[tuple[str, Any], Measurement] = {}


def _measure(name: str, arguments: list[Any]) -> Measurement:
    device = next(one.device for one in arguments if isinstance(one, TensorSpec))
    if (reason := unchecked(device)) is not None:
        return Measurement(name, skipped=reason)
    check, operator = CHECKS[name], OPERATORS[name]
    names = [argument.name for argument in operator._schema.arguments]
    worst = Measurement(name, check.kinds[0], 0.0, math.inf, check.factor)
    with torch.no_grad():
        for kind in check.kinds:
            trial = check.draw(names, arguments, kind, torch.Generator(device).manual_seed(0))
            found = trial.read(operator(*trial.arguments), True)
            defined = trial.read(DEFINITIONS[name](*trial.sampled), False)
            size = float(trial.exact.norm())
            error, limit = (float((one - trial.exact).norm()) / size for one in (found, defined))
            measurement = Measurement(name, kind, error, limit, check.factor)
            worst = max(worst, measurement, key=lambda one: one.ratio)
    return worst


def _checked_operators(match: Match) -> Iterator[tuple[str, list[Any]]]:
    """The operators of a replacement that registered a check, with the (fake) arguments that they have at the site."""
    if not has_check(match):
        return
    replacement = traced(match.rule.replacement)
    made: dict[Node, Any] = {node: _bound(match.bound[str(node.target)]) for node in replacement.placeholders}
    mode = value(match.anchor).fake_mode  # type: ignore[union-attr]
    for node in replacement.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
        with mode:
            made[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        if (name := _name(node.target)) in CHECKS:
            yield name, _in_order(node.target, args, kwargs)


def _in_order(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of a call by position."""
    return [*args, *(kwargs[argument.name] for argument in operator._schema.arguments[len(args) :])]


def _bound(bound: Any) -> Any:
    return torch.fx.node.map_arg(bound, lambda node: node.meta["val"])


def _concrete(argument: Any) -> Any:
    """An argument whose sizes are numbers; of a tensor, what can be known without data."""
    if isinstance(argument, torch.Tensor):
        return TensorSpec(tuple(size_hint(size) for size in argument.shape), argument.dtype, argument.device)
    return size_hint(argument) if isinstance(argument, torch.SymInt) else argument


def _name(target: Any) -> str:
    """The registered name of an h3opt operator, ``""`` for any other target."""
    return target._opname.rpartition("_v")[0] if getattr(target, "namespace", None) == "h3opt" else ""
