"""The attention output leaves attention as FP8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.kernels import ops
from h3opt.kernels.ops import attention
from h3opt.pass_api import (
    Decline,
    Device,
    Draw,
    Example,
    GraphFacts,
    GraphPass,
    Match,
    Mutant,
    Perceptual,
    PipelineView,
    Rule,
    register,
    with_replacement,
)

aten = torch.ops.aten


def quantized_after(
    q: Any,
    k: Any,
    v: Any,
    q_scale: Any,
    k_scale: Any,
    v_scale: Any,
    v_mean: Any,
    chunk: Any,
    dtype: Any,
    backend: Any,
    first: Any,
    last: Any,
) -> Any:
    attended = attention.fp8_attention(q, k, v, q_scale, k_scale, v_scale, v_mean, chunk, dtype, backend)
    out = ops.quantize_rows(aten.flatten.using_ints(attended, first, last))
    return out[0], out[1]


def quantized_inside(
    q: Any,
    k: Any,
    v: Any,
    q_scale: Any,
    k_scale: Any,
    v_scale: Any,
    v_mean: Any,
    chunk: Any,
    dtype: Any,
    backend: Any,
    first: Any,
    last: Any,
) -> Any:
    out = attention.fp8_attention_quantized(q, k, v, q_scale, k_scale, v_scale, v_mean, chunk, backend)
    return out[0], out[1]


def heads_are_flattened(match: Match) -> str | None:
    """Why what follows attention is not one row per token."""
    return None if (match.literal("first"), match.literal("last")) == (2, 3) else "more than heads are flattened"


@register
@dataclass(frozen=True)
class OutputQuantize(GraphPass):
    """Attention writes FP8 for the out projection: its bf16 output never reaches memory.

    An output is an average of V's rows, so V's largest magnitude gives its scale; a scale per row, as the quantize
    alone has, would need all heads of a token in one program. Hence Perceptual. The merge of chunks of keys writes it.
    """

    name = "output_quantize"
    after = ("fp8_attention", "fp8_linear")
    builds_on = after
    promise = Perceptual(
        lpips=0.03, audio_snr_db=30.0, site_error=0.06, on_reference=Perceptual(lpips=0.00062, audio_snr_db=44.0)
    )

    def applies(self, device: Device, view: PipelineView) -> str | None:
        return None if device.has_fp8 else f"{device.name} has no FP8; SM89 or newer does"

    def rules(self) -> Sequence[Rule]:
        return (Rule(quantized_after, quantized_inside, heads_are_flattened),)

    def expect(self, facts: GraphFacts) -> int | None:
        """One per block whose attention writes FP8 and whose out projection reads it."""
        attend, linear = facts.find("fp8_attention"), facts.find("fp8_linear")
        if not facts.holds or attend is None or linear is None or not facts.operators.get(ops.quantize_rows):
            return 0 if facts.holds else None
        options = linear.options()
        if "attn.to_out.0" not in options["layers"]:
            return 0
        if "attn.to_out.0" in facts.adapted:  # the adapter reads the attention output unquantized
            return 0
        kept = options["keep_first"] + options["keep_last"] if facts.region == "transformer" else 0
        return max(facts.holds.get("transformer.block", 0) - kept, 0)

    def example(self, draw: Draw) -> Example:
        return Example(_model(), _arguments(draw))

    def declines(self) -> Sequence[Decline]:
        def tokens_flattened_too(draw: Draw) -> Example:
            return Example(_model(first=1), _arguments(draw))

        def read_unquantized(draw: Draw) -> Example:
            def model(*operands):
                attended = attention.fp8_attention(*operands, _CHUNK, torch.float32, "triton").flatten(2, 3)
                return (*_dequantized(*ops.quantize_rows(attended)), attended)

            return Example(model, _arguments(draw))

        return (
            Decline("tokens are flattened with the heads", tokens_flattened_too),
            Decline("something else reads the output unquantized", read_unquantized),
        )

    def mutants(self) -> Sequence[Mutant]:
        def scale_of_k(q, k, v, q_scale, k_scale, v_scale, v_mean, chunk, dtype, backend, first, last):
            out = attention.fp8_attention_quantized(q, k, v, q_scale, k_scale, v_scale, v_mean, chunk, backend)
            return out[0], out[1] * 2.0

        return (Mutant("the scale is twice what the output was written with", with_replacement(self, scale_of_k)),)


_CHUNK = 4  # keys: examples have more than one chunk


def _model(first: int = 2) -> Any:
    def model(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        attended = attention.fp8_attention(*operands, _CHUNK, torch.float32, "triton").flatten(first, 3)
        return _dequantized(*ops.quantize_rows(attended))

    return model


def _dequantized(quantized: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (quantized.float() * scale,)  # what the projection makes of the two: they need not be equal one by one


def _arguments(draw: Draw) -> tuple[torch.Tensor, ...]:
    q, k, v = (draw.tensor(draw.batch, draw.tokens, draw.heads, draw.head_dim) for _ in range(3))
    scales = [attention.dynamic_head_scale(one, True) for one in (q, k)]
    codes, v_scale, v_mean = attention.quantize_values(v, _CHUNK)
    return *map(attention.quantize_heads, (q, k), scales), codes, *scales, v_scale, v_mean
