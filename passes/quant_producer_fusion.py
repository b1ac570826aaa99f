"""Quantization of activations to FP8, fused into the kernel that computes the activation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
    norm_and_modulate,
    register,
    with_replacement,
)
from h3opt.pass_api.guards import check_modulation, check_swiglu_halves, check_wide_norm
from h3opt.pass_api.patterns import modulated_norm, narrowed_norm, quantized, results, swiglu, widened_norm

aten = torch.ops.aten
QKV = frozenset({"attn.to_q", "attn.to_k", "attn.to_v"})


def norm_chain(x: Any, shape: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any) -> Any:
    return quantized(modulated_norm(x, shape, weight, eps, scale, shift, index))


def norm_quantize(x: Any, shape: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any) -> Any:
    return results(ops.norm_modulate_quantize(x, weight, scale, shift, index, eps), 2)


def fused_norm_chain(x: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any) -> Any:
    return quantized(ops.norm_modulate(x, weight, scale, shift, index, eps))


def fused_norm_quantize(x: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any) -> Any:
    return results(ops.norm_modulate_quantize(x, weight, scale, shift, index, eps), 2)


def widened_chain(x: Any, shape: Any, weight: Any, eps: Any, wide: Any, own: Any) -> Any:
    return quantized(widened_norm(x, shape, weight, eps, wide, own))


def widened_quantize(x: Any, shape: Any, weight: Any, eps: Any, wide: Any, own: Any) -> Any:
    return results(ops.wide_norm_quantize(x, weight, eps, own), 2)


def narrowed_chain(x: Any, shape: Any, weight: Any, eps: Any, own: Any) -> Any:
    return quantized(narrowed_norm(x, shape, weight, eps, own))


def narrowed_quantize(x: Any, shape: Any, weight: Any, eps: Any, own: Any) -> Any:
    return results(ops.wide_norm_quantize(x, weight, eps, own), 2)


def float32_chain(x: Any, shape: Any, weight: Any, eps: Any) -> Any:
    return quantized(aten.rms_norm(x, shape, weight, eps))


def float32_quantize(x: Any, shape: Any, weight: Any, eps: Any) -> Any:
    return results(ops.wide_norm_quantize(x, weight, eps, torch.float32), 2)


def swiglu_chain(x: Any, dim: Any, middle: Any, end: Any) -> Any:
    return quantized(swiglu(x, dim, middle, end))


def swiglu_quantize(x: Any, dim: Any, middle: Any, end: Any) -> Any:
    return results(ops.swiglu_quantize(x), 2)


def fused_swiglu_chain(x: Any) -> Any:
    return quantized(ops.swiglu(x))


def fused_swiglu_quantize(x: Any) -> Any:
    return results(ops.swiglu_quantize(x), 2)


def check_norm(match: Match) -> str | None:
    return check_modulation(match, "x", "weight", "scale", "shift")


@register
@dataclass(frozen=True)
class QuantProducerFusion(GraphPass):
    """Activations leave their producer as FP8, quantized once for all layers that read them; no bf16 copy is stored."""

    name = "quant_producer_fusion"
    after = ("fp8_linear", "vae_fp8_linear", "norm_modulate", "fused_swiglu")
    builds_on = ("fp8_linear", "vae_fp8_linear")
    promise = Exact()

    def applies(self, device: Device, view: PipelineView) -> str | None:
        return None if device.has_fp8 else f"{device.name} has no FP8; SM89 or newer does"

    def rules(self) -> Sequence[Rule]:
        into = {"index": "scale"}
        return (
            Rule(norm_chain, norm_quantize, check_norm, into),
            Rule(fused_norm_chain, fused_norm_quantize, check_norm, into),
            Rule(widened_chain, widened_quantize, check_wide_norm),
            Rule(narrowed_chain, narrowed_quantize, check_wide_norm),
            Rule(float32_chain, float32_quantize, check_wide_norm),
            Rule(swiglu_chain, swiglu_quantize, check_swiglu_halves),
            Rule(fused_swiglu_chain, fused_swiglu_quantize),
        )

    def expect(self, facts: GraphFacts) -> int | None:
        """Count the quantizations, less those of attention outputs and those that something reads unquantized too."""
        if not facts.holds:
            return None
        quantizations = facts.operators.get(ops.quantize_rows, 0)
        if facts.region == "vae.block":
            layers = facts.quantized_layers("vae.block") if quantizations else frozenset()
            return (layers >= QKV) + ("ff.net.0.proj" in layers) + ("ff.net.2" in layers)
        unfused = 0
        for blocks in facts.quantized("transformer.block"):
            readers = [QKV, {"ff.net.0.proj"}, {"ff.net.2"}]  # of the norms' outputs, and of the SwiGLU's
            read_unquantized = sum(
                bool(group & blocks.layers) and (not group <= blocks.layers or bool(group & facts.adapted))
                for group in readers
            )
            unfused += facts.count(blocks) * (("attn.to_out.0" in blocks.layers) + read_unquantized)
        return max(quantizations - unfused, 0)

    def example(self, draw: Draw) -> Example:
        return Example(lambda *args: ops.quantize_rows(norm_and_modulate(*args)), draw.modulation())

    def declines(self) -> Sequence[Decline]:
        def read_unquantized(draw: Draw) -> Example:
            def model(*args):
                modulated = norm_and_modulate(*args)
                return (*ops.quantize_rows(modulated), modulated)

            return Example(model, draw.modulation())

        def cast_between(draw: Draw) -> Example:
            def model(*args):
                return ops.quantize_rows(norm_and_modulate(*args).to(torch.float16).to(torch.float32))

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
            return quantized(x)

        return (
            Mutant("the scale is that of the input", with_replacement(self, scale_of_input)),
            Mutant("the norm is left out", with_replacement(self, norm_skipped)),
        )
