"""Linear layers of the transformer stored and multiplied as FP8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.pass_api import Device, FP8BlocksPass, Mutant, Perceptual, PipelineView, register
from h3opt.pipeline.minimax_h3 import transformer_blocks


@register
@dataclass(frozen=True)
class FP8LinearPass(FP8BlocksPass):
    """Weights as e4m3 with a scale per row, activations quantized per token: half the bytes, twice the GEMM rate.

    Options:
        layers: which linear layers of a transformer block, by their path in it.
        keep_first, keep_last: how many blocks at either end stay as they are.
        accumulate: how products are summed: "precise" (in float32), "fast" (in the tensor cores' about 14 bits), or a
            mapping from layers to these, where a layer that is left out is precise.
    """

    name = "fp8_linear"
    block_kind = "transformer.block"
    # Tiny pipeline, 4 and 10 steps: the pass LPIPS 0.00006 and 61 dB, its mutant (scales off by two) 0.06 and 25.8 dB.
    promise = Perceptual(lpips=0.03, audio_snr_db=40.0, on_reference=Perceptual(lpips=0.00045, audio_snr_db=41.0))

    def applies(self, device: Device, view: PipelineView) -> str | None:
        if view.transformer is None:
            return "there is no transformer"
        return None if device.has_fp8 else f"{device.name} has no FP8; SM89 or newer does"

    def blocks(self, view: PipelineView) -> Sequence[torch.nn.Module]:
        return list(transformer_blocks(view.transformer)) if view.transformer is not None else []

    def model(self, view: PipelineView) -> Any:
        return view.transformer

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("weight scales off by two", _ScalesOffByTwo()),)


@dataclass(frozen=True)
class _ScalesOffByTwo(FP8LinearPass):
    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, scale = super().quantize(weight)
        return quantized, scale * 2
