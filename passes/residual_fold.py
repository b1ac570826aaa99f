"""The gated residual folded into the norm that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn.functional import rms_norm

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
from h3opt.pass_api.patterns import gated_residual, modulated_norm


def chain(residual: Any, y: Any, gate: Any, shape: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any):
    hidden = gated_residual(residual, y, gate, index)
    return hidden, modulated_norm(hidden, shape, weight, eps, scale, shift, index)


def fold(residual: Any, y: Any, gate: Any, shape: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any):
    out = ops.residual_norm_modulate(residual, y, gate, weight, scale, shift, index, eps)
    return out[0], out[1]


def chain_to_fused(residual: Any, y: Any, gate: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any):
    hidden = gated_residual(residual, y, gate, index)
    return hidden, ops.norm_modulate(hidden, weight, scale, shift, index, eps)


def fold_to_fused(residual: Any, y: Any, gate: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any):
    out = ops.residual_norm_modulate(residual, y, gate, weight, scale, shift, index, eps)
    return out[0], out[1]


def chain_to_quantized(residual: Any, y: Any, gate: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any):
    hidden = gated_residual(residual, y, gate, index)
    out = ops.norm_modulate_quantize(hidden, weight, scale, shift, index, eps)
    return hidden, out[0], out[1]


def fold_to_quantized(residual: Any, y: Any, gate: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any):
    out = ops.residual_norm_modulate_quantize(residual, y, gate, weight, scale, shift, index, eps)
    return out[0], out[1], out[2]


def foldable(match: Match) -> str | None:
    return check_modulation(match, "residual", "y", "gate", "weight", "scale", "shift")


@register
@dataclass(frozen=True)
class ResidualFold(GraphPass):
    """The residual sum stays on chip for the norm that reads it next, instead of going out to memory and back.

    With ``scope: model`` it also crosses the border between two blocks.
    """

    name = "residual_fold"
    after = ("norm_modulate", "quant_producer_fusion")
    promise = Exact()

    def rules(self) -> Sequence[Rule]:
        into = {"index": "gate"}  # index holds row numbers of gate: what the probe has to draw
        return (
            Rule(chain, fold, foldable, into),
            Rule(chain_to_fused, fold_to_fused, foldable, into),
            Rule(chain_to_quantized, fold_to_quantized, foldable, into),
        )

    def expect(self, facts: GraphFacts) -> int | None:
        if facts.region == "transformer":  # the last block's residual meets a norm with another index
            return 2 * facts.holds["transformer.block"] - 1
        return facts.per(transformer_block=1)

    def example(self, draw: Draw) -> Example:
        def model(residual, y, gate, weight, scale, shift, index):
            hidden = residual + gate.index_select(0, index) * y
            normed = rms_norm(hidden, (hidden.shape[-1],), weight, 1e-5)
            return hidden, normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)

        return Example(model, self._arguments(draw))

    def declines(self) -> Sequence[Decline]:
        def gate_per_channel(draw: Draw) -> Example:
            def model(residual, y, gate, weight, scale, shift, index):
                hidden = residual + gate[0] * y
                normed = rms_norm(hidden, (hidden.shape[-1],), weight, 1e-5)
                return hidden, normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)

            return Example(model, self._arguments(draw))

        def other_index(draw: Draw) -> Example:
            def model(residual, y, gate, weight, scale, shift, index, other):
                hidden = residual + gate.index_select(0, other) * y
                normed = rms_norm(hidden, (hidden.shape[-1],), weight, 1e-5)
                return hidden, normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)

            return Example(model, (*self._arguments(draw), draw.index(draw.rows, draw.tokens)))

        def table_depends_on_sum(draw: Draw) -> Example:
            def model(residual, y, gate, weight, scale, shift, index):
                hidden = residual + gate.index_select(0, index) * y
                shift = shift + hidden.mean()
                normed = rms_norm(hidden, (hidden.shape[-1],), weight, 1e-5)
                return hidden, normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)

            return Example(model, self._arguments(draw))

        return (
            Decline("the gate is one row, not one per token", gate_per_channel),
            Decline("gate and scale go by different indices", other_index),
            Decline("the shift table is computed from the residual sum", table_depends_on_sum),
        )

    def mutants(self) -> Sequence[Mutant]:
        def gate_on_residual(residual, y, gate, shape, weight, eps, scale, shift, index):
            out = ops.residual_norm_modulate(y, residual, gate, weight, scale, shift, index, eps)
            return out[0], out[1]

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
