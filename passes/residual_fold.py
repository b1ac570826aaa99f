"""The gated residual sum, fused with the norm that follows."""

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
    norm_and_modulate,
    register,
    with_replacement,
)
from h3opt.pass_api.guards import check_modulation
from h3opt.pass_api.patterns import gated_residual, modulated_norm, results


def chain(
    residual: Any, y: Any, gate: Any, shape: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any
) -> Any:
    hidden = gated_residual(residual, y, gate, index)
    return hidden, modulated_norm(hidden, shape, weight, eps, scale, shift, index)


def fold(
    residual: Any, y: Any, gate: Any, shape: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any
) -> Any:
    return results(ops.residual_norm_modulate(residual, y, gate, weight, scale, shift, index, eps), 2)


def chain_to_fused(residual: Any, y: Any, gate: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any):
    hidden = gated_residual(residual, y, gate, index)
    return hidden, ops.norm_modulate(hidden, weight, scale, shift, index, eps)


def fold_to_fused(residual: Any, y: Any, gate: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any):
    return results(ops.residual_norm_modulate(residual, y, gate, weight, scale, shift, index, eps), 2)


def chain_to_quantized(
    residual: Any, y: Any, gate: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any
) -> Any:
    hidden = gated_residual(residual, y, gate, index)
    return hidden, *results(ops.norm_modulate_quantize(hidden, weight, scale, shift, index, eps), 2)


def fold_to_quantized(
    residual: Any, y: Any, gate: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any
) -> Any:
    return results(ops.residual_norm_modulate_quantize(residual, y, gate, weight, scale, shift, index, eps), 3)


def check_fold(match: Match) -> str | None:
    return check_modulation(match, "residual", "y", "gate", "weight", "scale", "shift")


@register
@dataclass(frozen=True)
class ResidualFold(GraphPass):
    """The norm reads the residual sum from registers, where eager writes it to memory and reads it back.

    With ``scope: model`` this includes the sum at the end of a block and the norm at the start of the next block.
    """

    name = "residual_fold"
    after = ("norm_modulate", "quant_producer_fusion")
    promise = Exact()

    def rules(self) -> Sequence[Rule]:
        into = {"index": "gate"}  # the probe draws row numbers of the gate table for the index
        return (
            Rule(chain, fold, check_fold, into),
            Rule(chain_to_fused, fold_to_fused, check_fold, into),
            Rule(chain_to_quantized, fold_to_quantized, check_fold, into),
        )

    def expect(self, facts: GraphFacts) -> int | None:
        if facts.region == "transformer":  # the last block's residual meets a norm with another index
            return 2 * facts.holds["transformer.block"] - 1
        return facts.per(transformer_block=1)

    def example(self, draw: Draw) -> Example:
        def model(residual, y, gate, weight, scale, shift, index):
            hidden = residual + gate.index_select(0, index) * y
            return hidden, norm_and_modulate(hidden, weight, scale, shift, index)

        return Example(model, self._arguments(draw))

    def declines(self) -> Sequence[Decline]:
        def gate_per_channel(draw: Draw) -> Example:
            def model(residual, y, gate, weight, scale, shift, index):
                hidden = residual + gate[0] * y
                return hidden, norm_and_modulate(hidden, weight, scale, shift, index)

            return Example(model, self._arguments(draw))

        def other_index(draw: Draw) -> Example:
            def model(residual, y, gate, weight, scale, shift, index, other):
                hidden = residual + gate.index_select(0, other) * y
                return hidden, norm_and_modulate(hidden, weight, scale, shift, index)

            return Example(model, (*self._arguments(draw), draw.index(draw.rows, draw.tokens)))

        def table_depends_on_sum(draw: Draw) -> Example:
            def model(residual, y, gate, weight, scale, shift, index):
                hidden = residual + gate.index_select(0, index) * y
                return hidden, norm_and_modulate(hidden, weight, scale, shift + hidden.mean(), index)

            return Example(model, self._arguments(draw))

        return (
            Decline("the gate is one row, not one per token", gate_per_channel),
            Decline("gate and scale go by different indices", other_index),
            Decline("the shift table is computed from the residual sum", table_depends_on_sum),
        )

    def mutants(self) -> Sequence[Mutant]:
        def gate_on_residual(residual, y, gate, shape, weight, eps, scale, shift, index):
            return results(ops.residual_norm_modulate(y, residual, gate, weight, scale, shift, index, eps), 2)

        def sum_not_handed_on(residual, y, gate, shape, weight, eps, scale, shift, index):
            out = ops.residual_norm_modulate(residual, y, gate, weight, scale, shift, index, eps)
            return residual + 0.0, out[1]

        return (
            Mutant("the gate is on the residual", with_replacement(self, gate_on_residual)),
            Mutant("the next residual starts from the old sum", with_replacement(self, sum_not_handed_on)),
        )

    @staticmethod
    def _arguments(draw: Draw) -> tuple[Any, ...]:
        residual, weight, scale, shift, index = draw.modulation()
        y = draw.tensor(draw.batch, draw.tokens, draw.channels)
        return residual, y, draw.tensor(draw.rows, draw.channels), weight, scale, shift, index
