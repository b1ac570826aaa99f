"""The video decoder's LayerScale, residual sum and RMSNorm as one kernel."""

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
    register,
    with_replacement,
)
from h3opt.pass_api.guards import check_contiguous, check_wide_norm
from h3opt.pass_api.patterns import narrowed_norm, widened_norm

aten = torch.ops.aten
_SIXTEEN_OR_32_BITS = {torch.float32, torch.bfloat16, torch.float16}


def chain(residual: Any, y: Any, scale: Any, shape: Any, weight: Any, eps: Any, own: Any):
    hidden = residual + y * scale
    return hidden, narrowed_norm(hidden, shape, weight, eps, own)


def fold(residual: Any, y: Any, scale: Any, shape: Any, weight: Any, eps: Any, own: Any):
    out = ops.scaled_residual_norm(residual, y, scale, weight, eps, own)
    return out[0], out[1]


def chain_in_float32(residual: Any, y: Any, scale: Any, shape: Any, weight: Any, eps: Any):
    hidden = residual + y * scale
    return hidden, aten.rms_norm(hidden, shape, weight, eps)


def fold_in_float32(residual: Any, y: Any, scale: Any, shape: Any, weight: Any, eps: Any):
    out = ops.scaled_residual_norm(residual, y, scale, weight, eps, torch.float32)
    return out[0], out[1]


def chain_to_quantized(residual: Any, y: Any, scale: Any, weight: Any, eps: Any, own: Any):
    hidden = residual + y * scale
    out = ops.wide_norm_quantize(hidden, weight, eps, own)
    return hidden, out[0], out[1]


def fold_to_quantized(residual: Any, y: Any, scale: Any, weight: Any, eps: Any, own: Any):
    out = ops.scaled_residual_norm_quantize(residual, y, scale, weight, eps, own)
    return out[0], out[1], out[2]


def fused_widened(x: Any, shape: Any, weight: Any, eps: Any, wide: Any, own: Any) -> Any:
    return ops.wide_norm(x, weight, eps, own)


def fused_narrowed(x: Any, shape: Any, weight: Any, eps: Any, own: Any) -> Any:
    return ops.wide_norm(x, weight, eps, own)


def scaled_sum(residual: Any, y: Any, scale: Any) -> Any:
    return residual + y * scale


def fused_sum(residual: Any, y: Any, scale: Any) -> Any:
    return ops.scaled_residual(residual, y, scale)


def layer_scaled(match: Match) -> str | None:
    """Why a sum is not one in float32 with an addend that has one scale per channel."""
    residual, y, scale = (match.tensor(name) for name in ("residual", "y", "scale"))
    if residual is None or y is None or scale is None or str(residual.shape) != str(y.shape):
        return "residual and addend are not two tensors of one shape"
    if scale.ndim != 1 or y.ndim < 2 or str(scale.shape[0]) != str(y.shape[-1]):
        return f"the addend is scaled by {list(scale.shape)}, not by one number per channel"
    if scale.dtype != torch.float32 or not match.dtypes("residual", "y") <= _SIXTEEN_OR_32_BITS:
        return f"{residual.dtype} + {y.dtype} · {scale.dtype} is not a sum in float32"
    return check_contiguous(match)


def foldable(match: Match) -> str | None:
    return layer_scaled(match) or check_wide_norm(match)


@register
@dataclass(frozen=True)
class VAEResidualNorm(GraphPass):
    """The video decoder's float32 residual is scaled, summed, normed and rounded in one go; eager takes four kernels.

    A block's first norm and its last sum stand alone, as one kernel each in place of two.
    """

    name = "vae_residual_norm"
    after = ("quant_producer_fusion",)
    promise = Exact()

    def rules(self) -> Sequence[Rule]:
        return (
            Rule(chain, fold, foldable),
            Rule(chain_in_float32, fold_in_float32, foldable),
            Rule(chain_to_quantized, fold_to_quantized, layer_scaled),
            Rule(widened_norm, fused_widened, check_wide_norm),
            Rule(narrowed_norm, fused_narrowed, check_wide_norm),
            Rule(scaled_sum, fused_sum, layer_scaled),
        )

    def expect(self, facts: GraphFacts) -> int | None:
        """Both sums of a block, and its first norm where that is cast and quant_producer_fusion does not take it."""
        decoder = facts.find("vae_fp8_linear") if facts.find("quant_producer_fusion") is not None else None
        layers = decoder.options()["layers"] if decoder is not None and facts.operators.get(ops.quantize_rows) else ()
        taken = {"attn.to_q", "attn.to_k", "attn.to_v"} <= set(layers)
        return facts.per(vae_block=2 if taken or not facts.operators.get(aten.to.dtype) else 3)

    def example(self, draw: Draw) -> Example:
        def model(residual, y, scale, weight):
            hidden = residual + y * scale
            return hidden, rms_norm(hidden, (hidden.shape[-1],), weight, 1e-5).to(y.dtype)

        return Example(model, _arguments(draw))

    def declines(self) -> Sequence[Decline]:
        def summed(residual, y, scale, weight):
            return residual + y * scale

        def in_sixteen_bits(draw: Draw) -> Example:
            return Example(summed, tuple(one.bfloat16() for one in _arguments(draw)))

        def scale_per_token(draw: Draw) -> Example:
            residual, y, _, weight = _arguments(draw)
            return Example(summed, (residual, y, draw.tensor(draw.tokens, draw.channels).float(), weight))

        def addend_read_twice(draw: Draw) -> Example:
            def model(residual, y, scale, weight):
                addend = y * scale
                return residual + addend, addend

            return Example(model, _arguments(draw))

        def normed_in_sixteen_bits(draw: Draw) -> Example:
            def model(residual, y, scale, weight):
                return rms_norm(y.bfloat16(), (y.shape[-1],), weight.bfloat16(), 1e-5).float()

            return Example(model, _arguments(draw))

        return (
            Decline("the sum is in 16 bits", in_sixteen_bits),
            Decline("the scale differs between tokens", scale_per_token),
            Decline("something else reads the scaled addend", addend_read_twice),
            Decline("the norm is in 16 bits", normed_in_sixteen_bits),
        )

    def mutants(self) -> Sequence[Mutant]:
        def scale_on_residual(residual, y, scale, shape, weight, eps, own):
            out = ops.scaled_residual_norm(y, residual, scale, weight, eps, own)
            return out[0], out[1]

        def sum_not_handed_on(residual, y, scale, shape, weight, eps):
            return residual + 0.0, fold_in_float32(residual, y, scale, shape, weight, eps)[1]

        def rounded_before_the_norm(residual, y, scale, shape, weight, eps, own):
            hidden = ops.scaled_residual(residual, y, scale)
            return hidden, ops.wide_norm(aten.to.dtype(hidden, own), weight, eps, own)

        return (
            Mutant("the scale is on the residual", with_replacement(self, scale_on_residual)),
            Mutant("the next residual starts from the old sum", with_replacement(self, sum_not_handed_on, rule=1)),
            Mutant("the norm reads the sum in 16 bits", with_replacement(self, rounded_before_the_norm)),
        )


def _arguments(draw: Draw) -> tuple[torch.Tensor, ...]:
    residual, y = (draw.tensor(draw.batch, draw.tokens, draw.channels) for _ in range(2))
    scale, weight = (draw.tensor(draw.channels).float() for _ in range(2))
    return residual.float(), y, scale, weight  # only y has the decoder's own dtype
