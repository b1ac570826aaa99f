"""Per-head RMSNorm and rotary embedding of Q and K as one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import rms_norm

from h3opt.kernels import ops
from h3opt.kernels.ops import attention
from h3opt.pass_api import (
    Decline,
    Draw,
    Exact,
    Example,
    GraphFacts,
    GraphPass,
    Mutant,
    Rule,
    norm_and_rotate,
    register,
    with_replacement,
)
from h3opt.pass_api.guards import check_head_norm_rope
from h3opt.pass_api.patterns import norm_rope, per_token

aten = torch.ops.aten


def fused(
    x: Any, shape: Any, weight: Any, eps: Any, cos: Any, sin: Any, dim: Any, half: Any, rotary: Any, end: Any
) -> Any:
    return ops.head_norm_rope(x, weight, per_token(cos), per_token(sin), eps)


def norm_rope_cast(
    x: Any,
    shape: Any,
    weight: Any,
    eps: Any,
    cos: Any,
    sin: Any,
    dim: Any,
    half: Any,
    rotary: Any,
    end: Any,
    scale: Any,
) -> Any:
    return attention.quantize_heads(norm_rope(x, shape, weight, eps, cos, sin, dim, half, rotary, end), scale)


def fused_cast(
    x: Any,
    shape: Any,
    weight: Any,
    eps: Any,
    cos: Any,
    sin: Any,
    dim: Any,
    half: Any,
    rotary: Any,
    end: Any,
    scale: Any,
) -> Any:
    return ops.head_norm_rope_quantize(x, weight, per_token(cos), per_token(sin), scale, eps, False)


def norm_rope_rotate_cast(
    x: Any,
    shape: Any,
    weight: Any,
    eps: Any,
    cos: Any,
    sin: Any,
    dim: Any,
    half: Any,
    rotary: Any,
    end: Any,
    scale: Any,
) -> Any:
    turned = attention.hadamard(norm_rope(x, shape, weight, eps, cos, sin, dim, half, rotary, end))
    return attention.quantize_heads(turned, scale)


def fused_rotate_cast(
    x: Any,
    shape: Any,
    weight: Any,
    eps: Any,
    cos: Any,
    sin: Any,
    dim: Any,
    half: Any,
    rotary: Any,
    end: Any,
    scale: Any,
) -> Any:
    return ops.head_norm_rope_quantize(x, weight, per_token(cos), per_token(sin), scale, eps, True)


@register
@dataclass(frozen=True)
class FusedQKCast(GraphPass):
    """Q and K are normed, rotated and written as attention reads them (FP8 too) in one pass; eager makes eleven."""

    name = "fused_qk_cast"
    after = ("fp8_attention",)
    promise = Exact()

    def rules(self) -> Sequence[Rule]:
        return (
            Rule(norm_rope_cast, fused_cast, guard=check_head_norm_rope),
            Rule(norm_rope_rotate_cast, fused_rotate_cast, guard=check_head_norm_rope),
            Rule(norm_rope, fused, guard=check_head_norm_rope),
        )

    def expect(self, facts: GraphFacts) -> int | None:
        return facts.per(transformer_block=2)

    def example(self, draw: Draw) -> Example:
        return Example(norm_and_rotate, draw.rotary())

    def declines(self) -> Sequence[Decline]:
        def turned_backwards(draw: Draw) -> Example:
            def model(x, weight, cos, sin):
                rotary = cos.shape[-1]
                normed = rms_norm(x, (x.shape[-1],), weight, 1e-5)
                turned, passed = normed[..., :rotary], normed[..., rotary:]
                first, second = turned.chunk(2, dim=-1)
                quarter_turn = torch.cat((second, -first), dim=-1)
                return torch.cat((turned * cos[None, :, None] + quarter_turn * sin[None, :, None], passed), dim=-1)

            return Example(model, draw.rotary())

        def promoted(draw: Draw) -> Example:
            x, weight, cos, sin = draw.rotary()
            return Example(norm_and_rotate, (x, weight, cos.double(), sin.double()))

        def no_weight(draw: Draw) -> Example:
            x, _, cos, sin = draw.rotary()
            return Example(lambda x, cos, sin: norm_and_rotate(x, None, cos, sin), (x, cos, sin))

        return (
            Decline("the norm has no weight, as in the video decoder", no_weight),
            Decline("the rotation goes the other way", turned_backwards),
            Decline("the angles have another dtype, so the product is promoted", promoted),
        )

    def mutants(self) -> Sequence[Mutant]:
        def turned_backwards(x, shape, weight, eps, cos, sin, dim, half, rotary, end):
            return ops.head_norm_rope(x, weight, per_token(cos), aten.neg(per_token(sin)), eps)

        def norm_after_rope(x, shape, weight, eps, cos, sin, dim, half, rotary, end):
            unscaled = ops.head_norm_rope(x, aten.ones_like(weight), per_token(cos), per_token(sin), eps)
            return unscaled * weight

        return (
            Mutant("rotated backwards", with_replacement(self, turned_backwards, rule=2)),
            Mutant("the norm's weight applied after the rotation", with_replacement(self, norm_after_rope, rule=2)),
        )
