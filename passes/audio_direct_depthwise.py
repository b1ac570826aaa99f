"""The audio decoder's activations as direct depthwise filters, and its weight norms folded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.weight_norm import WeightNorm

from h3opt.kernels import ops
from h3opt.pass_api import Device, FormatPass, Mutant, Perceptual, PipelineView, register
from h3opt.pipeline.minimax_h3 import audio_decoder_dtype, audio_layer_counts, is_audio_activation

TAPS = 12


class DirectActivation(torch.nn.Module):
    """Upsampling by two, SnakeBeta and downsampling by two of ``[batch, channels, length]``, float32, in two kernels.

    The transposed convolution of a zero-stuffed signal is two filters of every other tap, one per output phase; what
    depends on weights alone (``exp``, reciprocal, the factor 2) is computed once.
    """

    up: torch.Tensor
    down: torch.Tensor
    frequency: torch.Tensor
    magnitude: torch.Tensor

    def __init__(self, original: Any) -> None:
        super().__init__()
        with torch.no_grad():
            self.register_buffer("up", original.upsample.ratio * original.upsample.filter.reshape(-1))
            self.register_buffer("down", original.downsample.lowpass.filter.reshape(-1).clone())
            self.register_buffer("frequency", torch.exp(original.act.alpha))
            self.register_buffer("magnitude", (torch.exp(original.act.beta) + 1e-9).reciprocal())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.downsample(ops.upsample_snake(x, self.up, self.frequency, self.magnitude), self.down)


@register
@dataclass(frozen=True)
class AudioDirectDepthwise(FormatPass):
    """An activation of the audio decoder moves 6 floats per element instead of 38; weight norm is computed once.

    Nothing has to be compiled for it: a decode that took minutes to compile whole is two kernels per activation and
    the library's convolutions between them. Filters are summed in another order than the library's, and a decode's
    sums cancel, so the promise is a distance of the sound, not of each sample; the picture's bits do not change.
    """

    name = "audio_direct_depthwise"
    promise = Perceptual(lpips=0.0, audio_snr_db=40.0, on_reference=Perceptual(lpips=0.0, audio_snr_db=127.0))

    def applies(self, device: Device, view: PipelineView) -> str | None:
        if view.audio_vae is None:
            return "there is no audio VAE"
        dtype = audio_decoder_dtype(view.audio_vae)
        return None if dtype == torch.float32 else f"the audio decoder is in {dtype}; the kernels take float32"

    def expect(self, view: PipelineView) -> int:
        """The activations and the weight-normed convolutions of the decoder, by the configuration."""
        return sum(audio_layer_counts(view.audio_vae))

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        decoder: Any = view.audio_vae.decoder
        count = 0
        for parent, name, original in _activations(decoder):
            setattr(parent, name, self.convert(original))
            undo.callback(setattr, parent, name, original)
            count += 1
        for module in decoder.modules():
            count += _fold_weight_norm(module, undo)
        return count

    def convert(self, activation: Any) -> DirectActivation:
        """The replacement of one activation."""
        return DirectActivation(activation)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("the upsampling filter is one tap off", _OneTapOff()),)


def _activations(decoder: Any) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """Yield parent, name and module of each activation that the kernels serve: factor two, 12 taps, up and down."""
    for parent in list(decoder.modules()):
        for name, child in list(parent.named_children()):
            if is_audio_activation(child):
                up: Any = child.upsample
                down: Any = child.downsample.lowpass
                if up.ratio == down.stride == 2 and up.filter.numel() == down.filter.numel() == TAPS:
                    yield parent, name, child


def _fold_weight_norm(module: torch.nn.Module, undo: ExitStack) -> int:
    """Replace the hook that computes ``weight`` before every call by the computed weight; return 0 or 1 hooks."""
    hooks: Any = module._forward_pre_hooks
    for key, hook in list(hooks.items()):
        if isinstance(hook, WeightNorm):
            before = module.__dict__.pop(hook.name)
            with torch.no_grad():
                module.register_buffer(hook.name, hook.compute_weight(module), persistent=False)  # moves with .to()
            del hooks[key]
            undo.callback(_unfold, module, key, hook, before)
            return 1
    return 0


def _unfold(module: torch.nn.Module, key: int, hook: WeightNorm, before: torch.Tensor) -> None:
    delattr(module, hook.name)
    setattr(module, hook.name, before)
    hooks: Any = module._forward_pre_hooks
    hooks[key] = hook
    hooks.move_to_end(key, last=False)


@dataclass(frozen=True)
class _OneTapOff(AudioDirectDepthwise):
    def convert(self, activation: Any) -> DirectActivation:
        converted = super().convert(activation)
        converted.up = converted.up.roll(1)
        return converted
