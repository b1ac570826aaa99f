"""Per-head RMSNorm and rotary embedding of Q and K as one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import rms_norm

from h3opt.kernels import ops
from h3opt.promises import Exact
from h3opt.protocol import Decline, Example, GraphFacts, GraphPass, Mutant, Rule
from h3opt.registry import register
from h3opt.rewrite import Match
from h3opt.testing import Draw, rewired

aten = torch.ops.aten
ROTARY_PART = 0.75  # of a head's channels, in the examples as in the model


def norm_rope(
    x: Any, shape: Any, weight: Any, eps: Any, cos: Any, sin: Any, dim: Any, half: Any, rotary: Any, end: Any
) -> Any:
    normed = aten.rms_norm(x, shape, weight, eps)
    turned, passed = aten.slice.Tensor(normed, dim, 0, rotary), aten.slice.Tensor(normed, dim, rotary, end)
    first, second = aten.slice.Tensor(turned, dim, 0, half), aten.slice.Tensor(turned, dim, half, rotary)
    quarter_turn = aten.cat([aten.neg(second), first], dim)
    return aten.cat([turned * cos + quarter_turn * sin, passed], dim)


def fused_norm_rope(
    x: Any, shape: Any, weight: Any, eps: Any, cos: Any, sin: Any, dim: Any, half: Any, rotary: Any, end: Any
) -> Any:
    return ops.head_norm_rope(x, weight, per_token(cos), per_token(sin), eps)


def per_token(angles: Any) -> Any:
    """``[1, tokens, 1, rotary]``, as Q and K share it, → ``[tokens, rotary]``; a view."""
    return aten.squeeze.dims(angles, [0, 2])


def heads_line_up(match: Match) -> str | None:
    """Why a site is not a per-head norm and rope: other dimensions, other halves, mixed dtypes."""
    x, cos, sin = (match.tensor(name) for name in ("x", "cos", "sin"))
    if match.tensor("weight") is None:
        return "the norm has no weight"
    if x is None or cos is None or sin is None or x.ndim != 4 or cos.ndim != 4:
        return "it is not [batch, tokens, heads, head_dim] with one angle per token and channel"
    half, rotary, end = (match.literal(name) for name in ("half", "rotary", "end"))
    head_dim = x.shape[-1]
    if match.literal("dim") != 3 or end != head_dim or 2 * half != rotary or list(match.literal("shape")) != [head_dim]:
        return f"norm, halves or rotary part do not fit a head of {head_dim} channels"
    expected = [1, x.shape[1], 1, rotary]
    if any(str(list(angles.shape)) != str(expected) for angles in (cos, sin)):
        return f"there are angles {list(cos.shape)}, not {expected}"
    if len(match.dtypes("x", "weight", "cos", "sin")) != 1:
        return "heads, weight and angles have different dtypes"
    return None


@register
@dataclass(frozen=True)
class FusedQKCast(GraphPass):
    """Q and K are normed, rotated and written in the layout attention reads in one pass; eager makes eleven."""

    name = "fused_qk_cast"
    promise = Exact()

    def rules(self) -> Sequence[Rule]:
        return (Rule(norm_rope, fused_norm_rope, guard=heads_line_up),)

    def expect(self, facts: GraphFacts) -> int | None:
        return facts.per(transformer_block=2)

    def example(self, draw: Draw) -> Example:
        return Example(_model, _arguments(draw))

    def declines(self) -> Sequence[Decline]:
        def turned_backwards(draw: Draw) -> Example:
            def model(x, weight, cos, sin):
                rotary = cos.shape[-1]
                normed = rms_norm(x, (x.shape[-1],), weight, 1e-5)
                turned, passed = normed[..., :rotary], normed[..., rotary:]
                first, second = turned.chunk(2, dim=-1)
                quarter_turn = torch.cat((second, -first), dim=-1)
                return torch.cat((turned * cos[None, :, None] + quarter_turn * sin[None, :, None], passed), dim=-1)

            return Example(model, _arguments(draw))

        def promoted(draw: Draw) -> Example:
            x, weight, cos, sin = _arguments(draw)
            return Example(_model, (x, weight, cos.double(), sin.double()))

        def no_weight(draw: Draw) -> Example:
            x, _, cos, sin = _arguments(draw)
            return Example(lambda x, cos, sin: _model(x, None, cos, sin), (x, cos, sin))

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
            Mutant("rotated backwards", rewired(self, turned_backwards)),
            Mutant("the norm's weight applied after the rotation", rewired(self, norm_after_rope)),
        )


def _model(x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary = cos.shape[-1]
    normed = rms_norm(x, (x.shape[-1],), weight, 1e-5)
    turned, passed = normed[..., :rotary], normed[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    quarter_turn = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos[None, :, None] + quarter_turn * sin[None, :, None], passed), dim=-1)


def _arguments(draw: Draw) -> tuple[torch.Tensor, ...]:
    rotary = int(draw.head_dim * ROTARY_PART)
    return (
        draw.tensor(draw.batch, draw.tokens, draw.heads, draw.head_dim),
        draw.tensor(draw.head_dim),
        draw.tensor(draw.tokens, rotary),
        draw.tensor(draw.tokens, rotary),
    )
