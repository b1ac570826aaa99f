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
WRITES_FP8 = ("cudnn", "triton")


def quantized_after(
    q: Any, k: Any, v: Any, q_scale: Any, k_scale: Any, v_scale: Any, dtype: Any, backend: Any, first: Any, last: Any
) -> Any:
    attended = attention.fp8_attention(q, k, v, q_scale, k_scale, v_scale, dtype, backend)
    out = ops.quantize_rows(aten.flatten.using_ints(attended, first, last))
    return out[0], out[1]


def quantized_inside(
    q: Any, k: Any, v: Any, q_scale: Any, k_scale: Any, v_scale: Any, dtype: Any, backend: Any, first: Any, last: Any
) -> Any:
    out = attention.fp8_attention_quantized(q, k, v, q_scale, k_scale, v_scale, backend)
    return out[0], out[1]


def backend_writes_fp8(match: Match) -> str | None:
    """Why a site's attention cannot write FP8."""
    if match.literal("backend") not in WRITES_FP8:
        return f"{match.literal('backend')} attention writes no FP8"
    return None if (match.literal("first"), match.literal("last")) == (2, 3) else "more than heads are flattened"


@register
@dataclass(frozen=True)
class OutputQuantize(GraphPass):
    """Attention writes FP8 for the out projection: its bf16 output never reaches memory.

    An output is an average of V's rows, so V's scale serves it; a scale per row, as the quantize alone has, would need
    all heads of a token in one program. Hence Perceptual. cuDNN's FP8 attention on Hopper knows no other output.
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
        return (Rule(quantized_after, quantized_inside, backend_writes_fp8),)

    def expect(self, facts: GraphFacts) -> int | None:
        """One per block whose attention writes FP8 and whose out projection reads it."""
        attend, linear = facts.find("fp8_attention"), facts.find("fp8_linear")
        if not facts.holds or attend is None or linear is None or not facts.operators.get(ops.quantize_rows):
            return 0 if facts.holds else None
        options = linear.options()
        if attend.options()["backend"] not in WRITES_FP8 or "attn.to_out.0" not in options["layers"]:
            return 0
        if "attn.to_out.0" in facts.adapted:  # the adapter reads the attention output unquantized
            return 0
        kept = options["keep_first"] + options["keep_last"] if facts.region == "transformer" else 0
        return max(facts.holds.get("transformer.block", 0) - kept, 0)

    def example(self, draw: Draw) -> Example:
        return Example(_model("triton"), _arguments(draw))

    def declines(self) -> Sequence[Decline]:
        def cannot_write(draw: Draw) -> Example:
            return Example(_model("fa3"), _arguments(draw))

        def read_unquantized(draw: Draw) -> Example:
            def model(*operands):
                attended = attention.fp8_attention(*operands, torch.float32, "triton").flatten(2, 3)
                return (*_dequantized(*ops.quantize_rows(attended)), attended)

            return Example(model, _arguments(draw))

        return (
            Decline("the library cannot write FP8", cannot_write),
            Decline("something else reads the output unquantized", read_unquantized),
        )

    def mutants(self) -> Sequence[Mutant]:
        def scale_of_k(q, k, v, q_scale, k_scale, v_scale, dtype, backend, first, last):
            out = attention.fp8_attention_quantized(q, k, v, q_scale, k_scale, v_scale, backend)
            return out[0], out[1] * 2.0

        return (Mutant("the scale is twice what the output was written with", with_replacement(self, scale_of_k)),)


def _model(backend: str) -> Any:
    def model(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        attended = attention.fp8_attention(*operands, torch.float32, backend).flatten(2, 3)
        return _dequantized(*ops.quantize_rows(attended))

    return model


def _dequantized(quantized: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (quantized.float() * scale,)  # what the projection makes of the two: they need not be equal one by one


def _arguments(draw: Draw) -> tuple[torch.Tensor, ...]:
    tensors = [draw.tensor(draw.batch, draw.tokens, draw.heads, draw.head_dim) for _ in range(3)]
    scales = [attention.dynamic_head_scale(one, True) for one in tensors]
    return *(attention.quantize_heads(one, scale) for one, scale in zip(tensors, scales, strict=True)), *scales
