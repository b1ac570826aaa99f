"""The gate and the product of SwiGLU as one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

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
    register,
    with_replacement,
    without_guards,
)
from h3opt.pass_api.guards import check_swiglu_halves
from h3opt.pass_api.patterns import swiglu


def fused_product(x: Any, dim: Any, middle: Any, end: Any) -> Any:
    return ops.swiglu(x)


@register
@dataclass(frozen=True)
class FusedSwiglu(GraphPass):
    """Gate and product read each half and write the result once; eager also writes and reads the gate."""

    name = "fused_swiglu"
    promise = Exact()

    def rules(self) -> Sequence[Rule]:
        return (Rule(swiglu, fused_product, guard=check_swiglu_halves),)

    def expect(self, facts: GraphFacts) -> int | None:
        return facts.per(transformer_block=1, transformer_refiner=1, vae_block=1)

    def example(self, draw: Draw) -> Example:
        def model(x):
            first, second = x.chunk(2, dim=-1)
            return first * silu(second)

        return Example(model, (draw.tensor(draw.batch, draw.tokens, 2 * draw.channels),))

    def declines(self) -> Sequence[Decline]:
        def unequal(draw: Draw) -> Example:
            half = draw.channels

            def model(x):
                return x[..., :half] * silu(x[..., half : 2 * half])

            return Example(model, (draw.tensor(draw.tokens, 2 * half + 4),))

        def along_tokens(draw: Draw) -> Example:
            def model(x):
                first, second = x.chunk(2, dim=0)
                return first * silu(second)

            return Example(model, (draw.tensor(2 * draw.tokens, draw.channels),))

        def gate_read_twice(draw: Draw) -> Example:
            def model(x):
                first, second = x.chunk(2, dim=-1)
                gate = silu(second)
                return first * gate, gate

            return Example(model, (draw.tensor(draw.tokens, 2 * draw.channels),))

        return (
            Decline("the slices leave channels out", unequal),
            Decline("the halves are of the tokens", along_tokens),
            Decline("something else reads the gate", gate_read_twice),
        )

    def mutants(self) -> Sequence[Mutant]:
        def halves_exchanged(x, dim, middle, end):
            return ops.swiglu(torch.ops.aten.roll(x, [middle], [dim]))

        return (
            Mutant("silu of the first half", with_replacement(self, halves_exchanged)),
            Mutant("no slices are rejected", without_guards(self)),
        )
