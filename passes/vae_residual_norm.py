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
from h3opt.pass_api.guards import check_layer_scale, check_wide_norm
from h3opt.pass_api.patterns import narrowed_norm, results, scaled_residual, widened_norm

aten = torch.ops.aten
QKV = frozenset({"attn.to_q", "attn.to_k", "attn.to_v"})


def chain(residual: Any, y: Any, scale: Any, shape: Any, weight: Any, eps: Any, own: Any) -> Any:
    hidden = scaled_residual(residual, y, scale)
    return hidden, narrowed_norm(hidden, shape, weight, eps, own)


def fold(residual: Any, y: Any, scale: Any, shape: Any, weight: Any, eps: Any, own: Any) -> Any:
    return results(ops.scaled_residual_norm(residual, y, scale, weight, eps, own), 2)


def chain_in_float32(residual: Any, y: Any, scale: Any, shape: Any, weight: Any, eps: Any) -> Any:
    hidden = scaled_residual(residual, y, scale)
    return hidden, aten.rms_norm(hidden, shape, weight, eps)


def fold_in_float32(residual: Any, y: Any, scale: Any, shape: Any, weight: Any, eps: Any) -> Any:
    return results(ops.scaled_residual_norm(residual, y, scale, weight, eps, torch.float32), 2)


def chain_to_quantized(residual: Any, y: Any, scale: Any, weight: Any, eps: Any, own: Any) -> Any:
    hidden = scaled_residual(residual, y, scale)
    return hidden, *results(ops.wide_norm_quantize(hidden, weight, eps, own), 2)


def fold_to_quantized(residual: Any, y: Any, scale: Any, weight: Any, eps: Any, own: Any) -> Any:
    return results(ops.scaled_residual_norm_quantize(residual, y, scale, weight, eps, own), 3)


def fused_widened(x: Any, shape: Any, weight: Any, eps: Any, wide: Any, own: Any) -> Any:
    return ops.wide_norm(x, weight, eps, own)


def fused_narrowed(x: Any, shape: Any, weight: Any, eps: Any, own: Any) -> Any:
    return ops.wide_norm(x, weight, eps, own)


def fused_sum(residual: Any, y: Any, scale: Any) -> Any:
    return ops.scaled_residual(residual, y, scale)


def check_fold(match: Match) -> str | None:
    return check_layer_scale(match) or check_wide_norm(match)


@register
@dataclass(frozen=True)
class VAEResidualNorm(GraphPass):
    """LayerScale, residual sum, norm and rounding in the video decoder take one kernel; eager launches four.

    The first norm and the last sum of a block have no neighbour to fuse with: each becomes one kernel instead of two.
    """

    name = "vae_residual_norm"
    after = ("quant_producer_fusion",)
    promise = Exact()

    def rules(self) -> Sequence[Rule]:
        return (
            Rule(chain, fold, check_fold),
            Rule(chain_in_float32, fold_in_float32, check_fold),
            Rule(chain_to_quantized, fold_to_quantized, check_layer_scale),
            Rule(widened_norm, fused_widened, check_wide_norm),
            Rule(narrowed_norm, fused_narrowed, check_wide_norm),
            Rule(scaled_residual, fused_sum, check_layer_scale),
        )

    def expect(self, facts: GraphFacts) -> int | None:
        """Count both sums of a block, and the first norm if it is cast and quant_producer_fusion leaves it."""
        quantized = facts.operators.get(ops.quantize_rows) and facts.quantized_layers("vae.block") >= QKV
        taken = quantized and facts.find("quant_producer_fusion") is not None
        return facts.per(vae_block=2 if taken or not facts.operators.get(aten.to.dtype) else 3)

    def example(self, draw: Draw) -> Example:
        def model(residual, y, scale, weight):
            hidden = residual + y * scale
            return hidden, rms_norm(hidden, (hidden.shape[-1],), weight, 1e-5).to(y.dtype)

        return Example(model, _arguments(draw))

    def declines(self) -> Sequence[Decline]:
        def unnormed(residual, y, scale, weight):
            return residual + y * scale

        def in_sixteen_bits(draw: Draw) -> Example:
            return Example(unnormed, tuple(tensor.bfloat16() for tensor in _arguments(draw)))

        def scale_per_token(draw: Draw) -> Example:
            residual, y, _, weight = _arguments(draw)
            return Example(unnormed, (residual, y, draw.tensor(draw.tokens, draw.channels).float(), weight))

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
            return results(ops.scaled_residual_norm(y, residual, scale, weight, eps, own), 2)

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
    return residual.float(), y, scale, weight  # the decoder keeps the others in float32
