"""Per-head RMSNorm and rotary embedding of the video decoder as one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
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
    norm_and_rotate,
    register,
    with_replacement,
)
from h3opt.pass_api.guards import check_rope
from h3opt.pass_api.patterns import rotate_half

aten = torch.ops.aten


def widened(
    x: Any, shape: Any, eps: Any, cos: Any, sin: Any, dim: Any, half: Any, rotary: Any, end: Any, wide: Any, own: Any
) -> Any:
    """Match a decoder in 16 bits: it norms in float32 and rounds to 16 bits before the rotation."""
    normed = aten.to.dtype(aten.rms_norm(aten.to.dtype(x, wide), shape, None, eps), own)
    return rotate_half(normed, cos, sin, dim, half, rotary, end)


def fused_widened(
    x: Any, shape: Any, eps: Any, cos: Any, sin: Any, dim: Any, half: Any, rotary: Any, end: Any, wide: Any, own: Any
) -> Any:
    return ops.unweighted_norm_rope(x, aten.squeeze.dim(cos, 2), aten.squeeze.dim(sin, 2), eps)


def single(x: Any, shape: Any, eps: Any, cos: Any, sin: Any, dim: Any, half: Any, rotary: Any, end: Any) -> Any:
    """Match a decoder in float32: there are no casts."""
    return rotate_half(aten.rms_norm(x, shape, None, eps), cos, sin, dim, half, rotary, end)


def fused_single(x: Any, shape: Any, eps: Any, cos: Any, sin: Any, dim: Any, half: Any, rotary: Any, end: Any) -> Any:
    return ops.unweighted_norm_rope(x, aten.squeeze.dim(cos, 2), aten.squeeze.dim(sin, 2), eps)


def check_heads(match: Match) -> str | None:
    """Reject shapes that are not those of heads and angles, and casts that are not those around a float32 norm."""
    if (reason := check_rope(match, per_sample=True)) is not None:
        return reason
    dtypes = match.dtypes("x", "cos", "sin")
    if len(dtypes) != 1:
        return "heads and angles have different dtypes"
    wide, own = (match.bound.get(name, torch.float32) for name in ("wide", "own"))
    if wide != torch.float32 or own not in dtypes:
        return f"heads in {next(iter(dtypes))} are normed in {wide} and rounded to {own}"
    return None


@register
@dataclass(frozen=True)
class VAEFusedQKV(GraphPass):
    """Q and K of the video decoder each take one kernel for norm, rotation and layout; eager launches nine.

    V needs no kernel: attention reads it where the projection wrote it.
    """

    name = "vae_fused_qkv"
    promise = Exact()

    def rules(self) -> Sequence[Rule]:
        return (Rule(widened, fused_widened, guard=check_heads), Rule(single, fused_single, guard=check_heads))

    def expect(self, facts: GraphFacts) -> int | None:
        return facts.per(vae_block=2)

    def example(self, draw: Draw) -> Example:
        return Example(_norm_and_rotate, _arguments(draw))

    def declines(self) -> Sequence[Decline]:
        def weighted(draw: Draw) -> Example:
            return Example(norm_and_rotate, draw.rotary())

        def normed_in_sixteen_bits(draw: Draw) -> Example:
            def model(x, cos, sin):
                return _rotate(rms_norm(x, (x.shape[-1],), None, 1e-5), cos, sin)

            return Example(model, tuple(tensor.bfloat16() for tensor in _arguments(draw)))

        def rotated_in_float32(draw: Draw) -> Example:
            def model(x, cos, sin):
                return _rotate(rms_norm(x.float(), (x.shape[-1],), None, 1e-5), cos, sin).to(x.dtype)

            return Example(model, tuple(tensor.bfloat16() for tensor in _arguments(draw)))

        def promoted(draw: Draw) -> Example:
            x, cos, sin = _arguments(draw)
            return Example(
                lambda x, cos, sin: _rotate(rms_norm(x, (x.shape[-1],), None, 1e-5), cos, sin),
                (x, cos.double(), sin.double()),
            )

        return (
            Decline("the norm has a weight, as in the transformer", weighted),
            Decline("the norm's result is rounded but not its input widened", normed_in_sixteen_bits),
            Decline("nothing is rounded between norm and rotation", rotated_in_float32),
            Decline("the angles have another dtype, so the product is promoted", promoted),
        )

    def mutants(self) -> Sequence[Mutant]:
        def backwards(x, shape, eps, cos, sin, dim, half, rotary, end):
            return ops.unweighted_norm_rope(x, aten.squeeze.dim(cos, 2), aten.neg(aten.squeeze.dim(sin, 2)), eps)

        def not_rounded_between(x, shape, eps, cos, sin, dim, half, rotary, end, wide, own):
            rotated = rotate_half(
                aten.rms_norm(aten.to.dtype(x, wide), shape, None, eps), cos, sin, dim, half, rotary, end
            )
            return aten.to.dtype(rotated, own)

        return (
            Mutant("rotated backwards", with_replacement(self, backwards, rule=1)),
            Mutant("the rotation reads what the norm has not rounded", with_replacement(self, not_rounded_between)),
        )


def _arguments(draw: Draw) -> tuple[torch.Tensor, ...]:
    rotary = draw.head_dim * 3 // 4
    x = draw.tensor(draw.batch, draw.tokens, draw.heads, draw.head_dim)
    return (x, *(draw.tensor(draw.batch, draw.tokens, 1, rotary) for _ in range(2)))


def _norm_and_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    normed = rms_norm(x.float(), (x.shape[-1],), None, 1e-5).to(x.dtype)
    return _rotate(normed, cos.to(x.dtype), sin.to(x.dtype))


def _rotate(normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary = cos.shape[-1]
    rotated, passed = normed[..., :rotary], normed[..., rotary:]
    first, second = rotated.chunk(2, dim=-1)
    return torch.cat((rotated * cos + torch.cat((-second, first), dim=-1) * sin, passed), dim=-1)
