"""The gated residual sum as one kernel, where no norm follows that it can be fused with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from h3opt.kernels import ops
from h3opt.pass_api import (
    Decline,
    Draw,
    Exact,
    Example,
    GraphFacts,
    GraphPass,
    Match,
    Mutant,
    Rule,
    register,
    with_replacement,
)
from h3opt.pass_api.guards import check_modulation
from h3opt.pass_api.patterns import gated_residual


def fused_sum(residual: Any, y: Any, gate: Any, index: Any) -> Any:
    return ops.gated_residual(residual, y, gate, index)


def check_sum(match: Match) -> str | None:
    residual, y = match.tensor("residual"), match.tensor("y")
    if residual is None or y is None or str(residual.shape) != str(y.shape):
        return "residual and addend have different shapes"
    return check_modulation(match, "residual", "y", "gate")


@register
@dataclass(frozen=True)
class GatedResidual(GraphPass):
    """residual + gate · y reads each operand once; eager makes three passes over memory, one to gather the gate."""

    name = "gated_residual"
    after = ("residual_fold",)
    promise = Exact()

    def rules(self) -> Sequence[Rule]:
        return (Rule(gated_residual, fused_sum, check_sum, {"index": "gate"}),)

    def expect(self, facts: GraphFacts) -> int | None:
        """Count two sums per block, less those that residual_fold takes."""
        fold = facts.find("residual_fold")
        total = facts.per(transformer_block=2)
        folded = fold.expect(facts) if isinstance(fold, GraphPass) else 0
        return None if total is None or folded is None else total - folded

    def example(self, draw: Draw) -> Example:
        def model(residual, y, gate, index):
            return residual + gate.index_select(0, index) * y

        return Example(model, self._arguments(draw))

    def declines(self) -> Sequence[Decline]:
        def product_read_twice(draw: Draw) -> Example:
            def model(residual, y, gate, index):
                gated = gate.index_select(0, index) * y
                return residual + gated, gated

            return Example(model, self._arguments(draw))

        def broadcast_residual(draw: Draw) -> Example:
            residual, y, gate, index = self._arguments(draw)
            return Example(self.example(draw).function, (residual[:, :, :1], y, gate, index))

        return (
            Decline("something else reads the gated addend", product_read_twice),
            Decline("the residual is broadcast over channels", broadcast_residual),
        )

    def mutants(self) -> Sequence[Mutant]:
        def gate_on_residual(residual, y, gate, index):
            return ops.gated_residual(y, residual, gate, index)

        return (Mutant("the gate is on the residual", with_replacement(self, gate_on_residual)),)

    @staticmethod
    def _arguments(draw: Draw) -> tuple[Any, ...]:
        residual, _, gate, _, index = draw.modulation()
        return residual, draw.tensor(draw.batch, draw.tokens, draw.channels), gate, index
