"""Linear layers of the video decoder stored and multiplied as FP8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.pass_api import Device, FP8BlocksPass, Mutant, Perceptual, PipelineView, register
from h3opt.pipeline.minimax_h3 import decoder_blocks, video_decoder


@register
@dataclass(frozen=True)
class VAEFP8Linear(FP8BlocksPass):
    """The decoder's attention and feed-forward GEMMs, most of a decode, at the rate and half the bytes of FP8.

    Weights as e4m3 with a scale per row, activations quantized per token, biases and everything else as they are.

    Options:
        layers: which linear layers of a decoder block, by their path in it.
        keep_first, keep_last: how many blocks at either end stay as they are.
        accumulate: how products are summed: "precise" (in float32), "fast" (in the tensor cores' about 14 bits), or a
            mapping from layers to these, where a layer that is left out is precise.
    """

    name = "vae_fp8_linear"
    block_kind = "vae.block"
    # Tiny pipeline, 3 steps: the pass LPIPS 0.00003, its mutant (scales off by two) 0.076.
    promise = Perceptual(lpips=0.05, on_reference=Perceptual(lpips=0.00025))

    def applies(self, device: Device, view: PipelineView) -> str | None:
        if view.vae is None:
            return "there is no video VAE"
        return None if device.has_fp8 else f"{device.name} has no FP8; SM89 or newer does"

    def blocks(self, view: PipelineView) -> Sequence[torch.nn.Module]:
        return list(decoder_blocks(view.vae)) if view.vae is not None else []

    def model(self, view: PipelineView) -> Any:
        return video_decoder(view.vae)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("weight scales off by two", _ScalesOffByTwo()),)


@dataclass(frozen=True)
class _ScalesOffByTwo(VAEFP8Linear):
    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, scale = super().quantize(weight)
        return quantized, scale * 2
