"""The activation quantize moves into the kernel that produces the activation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import rms_norm

from h3opt.kernels import ops
from h3opt.pass_api import (
    Decline,
    Device,
    Draw,
    Exact,
    Example,
    GraphFacts,
    GraphPass,
    Match,
    Mutant,
    PipelineView,
    Rule,
    register,
    with_replacement,
)
from h3opt.pass_api.guards import check_modulation, check_swiglu_halves, check_wide_norm
from h3opt.pass_api.patterns import modulated_norm, narrowed_norm, swiglu, widened_norm

aten = torch.ops.aten


def norm_chain(x: Any, shape: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any) -> Any:
    out = ops.quantize_rows(modulated_norm(x, shape, weight, eps, scale, shift, index))
    return out[0], out[1]


def norm_quantize(x: Any, shape: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any) -> Any:
    out = ops.norm_modulate_quantize(x, weight, scale, shift, index, eps)
    return out[0], out[1]


def fused_norm_chain(x: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any) -> Any:
    out = ops.quantize_rows(ops.norm_modulate(x, weight, scale, shift, index, eps))
    return out[0], out[1]


def fused_norm_quantize(x: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any) -> Any:
    out = ops.norm_modulate_quantize(x, weight, scale, shift, index, eps)
    return out[0], out[1]


def widened_chain(x: Any, shape: Any, weight: Any, eps: Any, wide: Any, own: Any) -> Any:
    out = ops.quantize_rows(widened_norm(x, shape, weight, eps, wide, own))
    return out[0], out[1]


def widened_quantize(x: Any, shape: Any, weight: Any, eps: Any, wide: Any, own: Any) -> Any:
    out = ops.wide_norm_quantize(x, weight, eps, own)
    return out[0], out[1]


def narrowed_chain(x: Any, shape: Any, weight: Any, eps: Any, own: Any) -> Any:
    out = ops.quantize_rows(narrowed_norm(x, shape, weight, eps, own))
    return out[0], out[1]


def narrowed_quantize(x: Any, shape: Any, weight: Any, eps: Any, own: Any) -> Any:
    out = ops.wide_norm_quantize(x, weight, eps, own)
    return out[0], out[1]


def float32_chain(x: Any, shape: Any, weight: Any, eps: Any) -> Any:
    out = ops.quantize_rows(aten.rms_norm(x, shape, weight, eps))
    return out[0], out[1]


def float32_quantize(x: Any, shape: Any, weight: Any, eps: Any) -> Any:
    out = ops.wide_norm_quantize(x, weight, eps, torch.float32)
    return out[0], out[1]


def swiglu_chain(x: Any, dim: Any, middle: Any, end: Any) -> Any:
    out = ops.quantize_rows(swiglu(x, dim, middle, end))
    return out[0], out[1]


def swiglu_quantize(x: Any, dim: Any, middle: Any, end: Any) -> Any:
    out = ops.swiglu_quantize(x)
    return out[0], out[1]


def fused_swiglu_chain(x: Any) -> Any:
    out = ops.quantize_rows(ops.swiglu(x))
    return out[0], out[1]


def fused_swiglu_quantize(x: Any) -> Any:
    out = ops.swiglu_quantize(x)
    return out[0], out[1]


def lines_up(match: Match) -> str | None:
    return check_modulation(match, "x", "weight", "scale", "shift")


@register
@dataclass(frozen=True)
class QuantProducerFusion(GraphPass):
    """Activations leave their producer as FP8, quantized once for all that read them; bf16 never reaches memory."""

    name = "quant_producer_fusion"
    after = ("fp8_linear", "vae_fp8_linear", "norm_modulate", "fused_swiglu")
    builds_on = ("fp8_linear", "vae_fp8_linear")
    promise = Exact()

    def applies(self, device: Device, view: PipelineView) -> str | None:
        return None if device.has_fp8 else f"{device.name} has no FP8; SM89 or newer does"

    def rules(self) -> Sequence[Rule]:
        into = {"index": "scale"}
        return (
            Rule(norm_chain, norm_quantize, lines_up, into),
            Rule(fused_norm_chain, fused_norm_quantize, lines_up, into),
            Rule(widened_chain, widened_quantize, check_wide_norm),
            Rule(narrowed_chain, narrowed_quantize, check_wide_norm),
            Rule(float32_chain, float32_quantize, check_wide_norm),
            Rule(swiglu_chain, swiglu_quantize, check_swiglu_halves),
            Rule(fused_swiglu_chain, fused_swiglu_quantize),
        )

    def expect(self, facts: GraphFacts) -> int | None:
        """Every quantize but that of the attention output, and that of a norm which a projection reads unquantized."""
        if not facts.holds:
            return None
        quantizes = facts.operators.get(ops.quantize_rows, 0)
        if facts.region == "vae.block":
            decoder = one.options() if (one := facts.find("vae_fp8_linear")) is not None else {}
            layers = set(decoder.get("layers", ())) if quantizes else set()
            first_norm = {"attn.to_q", "attn.to_k", "attn.to_v"} <= layers
            return first_norm + ("ff.net.0.proj" in layers) + ("ff.net.2" in layers)
        format_options = one.options() if (one := facts.find("fp8_linear")) is not None else {}
        blocks = facts.holds.get("transformer.block", 0)
        if facts.region == "transformer":
            blocks -= format_options.get("keep_first", 0) + format_options.get("keep_last", 0)
        layers = set(format_options.get("layers", ()))
        from_attention = "attn.to_out.0" in layers
        read_unquantized = 0 < len(layers & {"attn.to_q", "attn.to_k", "attn.to_v"}) < 3
        return max(quantizes - blocks * (from_attention + read_unquantized), 0)

    def example(self, draw: Draw) -> Example:
        def model(x, weight, scale, shift, index):
            normed = rms_norm(x, (x.shape[-1],), weight, 1e-5)
            modulated = normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)
            return ops.quantize_rows(modulated)

        return Example(model, draw.modulation())

    def declines(self) -> Sequence[Decline]:
        def read_unquantized(draw: Draw) -> Example:
            def model(x, weight, scale, shift, index):
                normed = rms_norm(x, (x.shape[-1],), weight, 1e-5)
                modulated = normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)
                return (*ops.quantize_rows(modulated), modulated)

            return Example(model, draw.modulation())

        def cast_between(draw: Draw) -> Example:
            def model(x, weight, scale, shift, index):
                normed = rms_norm(x, (x.shape[-1],), weight, 1e-5)
                modulated = normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)
                return ops.quantize_rows(modulated.to(torch.float16).to(torch.float32))

            return Example(model, draw.modulation())

        return (
            Decline("something else reads the activation unquantized", read_unquantized),
            Decline("a rounding stands between producer and quantize", cast_between),
        )

    def mutants(self) -> Sequence[Mutant]:
        def scale_of_input(x, shape, weight, eps, scale, shift, index):
            out = ops.norm_modulate_quantize(x, weight, scale, shift, index, eps)
            return out[0], ops.quantize_rows(x)[1]

        def norm_skipped(x, shape, weight, eps, scale, shift, index):
            out = ops.quantize_rows(x)
            return out[0], out[1]

        return (
            Mutant("the scale is that of the input", with_replacement(self, scale_of_input)),
            Mutant("the norm is left out", with_replacement(self, norm_skipped)),
        )
