"""RMSNorm and AdaLN modulation as one kernel."""

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
    Mutant,
    Rule,
    norm_and_modulate,
    register,
    with_replacement,
    without_guards,
)
from h3opt.pass_api.guards import check_modulation
from h3opt.pass_api.patterns import modulated_norm


def fused_norm(x: Any, shape: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any) -> Any:
    return ops.norm_modulate(x, weight, scale, shift, index, eps)


@register
@dataclass(frozen=True)
class NormModulate(GraphPass):
    """RMSNorm and modulation read and write each token once; eager makes six passes over memory."""

    name = "norm_modulate"
    promise = Exact()

    def rules(self) -> Sequence[Rule]:
        return (
            Rule(
                modulated_norm,
                fused_norm,
                guard=lambda match: check_modulation(match, "x", "weight", "scale", "shift"),
                index_into={"index": "scale"},
            ),
        )

    def expect(self, facts: GraphFacts) -> int | None:
        return facts.per(transformer_block=2, transformer_head=1)

    def example(self, draw: Draw) -> Example:
        return Example(norm_and_modulate, draw.modulation())

    def declines(self) -> Sequence[Decline]:
        def scaled_twice(draw: Draw) -> Example:
            def model(x, weight, scale, shift, index):
                normed = rms_norm(x, (x.shape[-1],), weight, 1e-5)
                return normed * (2.0 + scale.index_select(0, index)) + shift.index_select(0, index)

            return Example(model, draw.modulation())

        def norm_read_twice(draw: Draw) -> Example:
            def model(x, weight, scale, shift, index):
                normed = rms_norm(x, (x.shape[-1],), weight, 1e-5)
                return normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index), normed

            return Example(model, draw.modulation())

        def other_dtype(draw: Draw) -> Example:
            x, weight, scale, shift, index = draw.modulation()
            return Example(norm_and_modulate, (x.double(), weight.double(), scale, shift, index))

        return (
            Decline("1 + scale is 2 + scale", scaled_twice),
            Decline("something else reads the norm", norm_read_twice),
            Decline("the tables have another dtype, so the sum is promoted", other_dtype),
        )

    def mutants(self) -> Sequence[Mutant]:
        def tables_exchanged(x, shape, weight, eps, scale, shift, index):
            return ops.norm_modulate(x, weight, shift, scale, index, eps)

        def other_eps(x, shape, weight, eps, scale, shift, index):
            return ops.norm_modulate(x, weight, scale, shift, index, 1e-3)

        return (
            Mutant("scale and shift exchanged", with_replacement(self, tables_exchanged)),
            Mutant("eps ignored", with_replacement(self, other_eps)),
            Mutant("no dtype is rejected", without_guards(self)),
        )
