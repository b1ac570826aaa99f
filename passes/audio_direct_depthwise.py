"""The audio decoder's activations as direct depthwise filters, and its weight norms folded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn.utils.weight_norm import WeightNorm

from h3opt.errors import PipelineError
from h3opt.kernels import ops
from h3opt.pass_api import Device, FormatPass, Mutant, Perceptual, PipelineView, register
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.minimax_h3 import audio_decoder_dtype, audio_layer_counts, is_audio_activation
from h3opt.pipeline.staleness import TensorSnapshot, has_hooks

TAPS = 12


class DirectActivation(torch.nn.Module):
    """Mixed into the class of an activation: two kernels upsample by two, apply SnakeBeta, and downsample by two.

    The activation takes ``[batch, channels, length]``, float32. It stays the object that it was, with its parameters
    and filters. The transposed convolution of a zero-stuffed signal is two filters of every other tap, one per output
    phase; what depends on weights alone (``exp``, reciprocal, the factor 2) is computed once.

    Attributes:
        direct: whether the kernels run; otherwise the activation runs as it was written.
        up, down, frequency, magnitude: see :meth:`AudioDirectDepthwise.operands`.
    """

    direct: bool
    up: torch.Tensor
    down: torch.Tensor
    frequency: torch.Tensor
    magnitude: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(self, DirectActivation):  # a library's hook has kept this method, and the pass is off again
            return type(self).forward(self, x)
        if not self.direct:
            result: torch.Tensor = super().forward(x)
            return result
        return ops.downsample(ops.upsample_snake(x, self.up, self.frequency, self.magnitude), self.down)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PipelineError(
            "A copy would not notice changes of the weights that the direct filters were made from. "
            "Call restore() before copying or pickling."
        )


@cache
def _direct(original: type) -> type:
    """Return the class of activations of class ``original`` that run in two kernels."""
    return type(f"Direct{original.__name__}", (DirectActivation, original), {"__module__": __name__})


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
        activations, convolutions = list(_activations(decoder)), []
        for activation in activations:
            undo.callback(_as_written, activation)
            for name, tensor in self.operands(activation).items():
                activation.register_buffer(name, tensor, persistent=False)  # moves with .to()
            activation.direct = True
            original: Any = type(activation)
            activation.__class__ = _direct(original)
        for module in decoder.modules():
            convolutions += _fold_weight_norm(module, undo)
        wrap_calls(decoder, _FollowWeights(self, activations, convolutions), undo)
        return len(activations) + len(convolutions)

    def operands(self, activation: Any) -> dict[str, torch.Tensor]:
        """Compute what the kernels read from the weights of an activation: two filters of 12 taps, and per channel."""
        with torch.no_grad():
            return {
                "up": activation.upsample.ratio * activation.upsample.filter.reshape(-1),
                "down": activation.downsample.lowpass.filter.reshape(-1).clone(),
                "frequency": torch.exp(activation.act.alpha),
                "magnitude": (torch.exp(activation.act.beta) + 1e-9).reciprocal(),
            }

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("the upsampling filter is one tap off", _OneTapOff()),)


class _FollowWeights:
    """A call wrapper of the decoder that computes operands and weights again where they are stale.

    Where gradients are wanted, or an activation has hooks inside, the decoder computes as it was written.
    """

    def __init__(
        self, direct: AudioDirectDepthwise, activations: Sequence[Any], convolutions: Sequence[tuple[Any, WeightNorm]]
    ) -> None:
        self._pass, self._activations, self._convolutions = direct, activations, convolutions
        self._computed_from: TensorSnapshot | None = TensorSnapshot(self._sources())

    def __call__(self, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        sources = self._sources()
        cast = next((tensor.dtype for tensor in sources if tensor.dtype != torch.float32), None)
        if cast is not None:
            raise PipelineError(
                f"The audio decoder was cast to {cast}, and the kernels of {self._pass.name} take float32. "
                "Call restore() before a cast, or turn the pass off."
            )
        differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sources)
        if differentiable or self._computed_from is None or not self._computed_from.matches(sources):
            for module, hook in self._convolutions:
                with torch.set_grad_enabled(differentiable):
                    setattr(module, hook.name, hook.compute_weight(module))
            for activation in self._activations:
                for name, tensor in self._pass.operands(activation).items():
                    setattr(activation, name, tensor)
            self._computed_from = None if differentiable else TensorSnapshot(sources)
        for activation in self._activations:
            activation.direct = not differentiable and not any(map(has_hooks, activation.children()))
        return proceed(*args, **kwargs)

    def _sources(self) -> list[torch.Tensor]:
        sources = []
        for activation in self._activations:
            act = activation.act
            sources += [act.alpha, act.beta, activation.upsample.filter, activation.downsample.lowpass.filter]
        for module, hook in self._convolutions:
            sources += [getattr(module, f"{hook.name}_{part}") for part in "gv"]
        return sources


def _as_written(activation: Any) -> None:
    """Give an activation the class that it had before, without the operands."""
    if isinstance(activation, DirectActivation):
        activation.__class__ = type(activation).__bases__[1]
    for name in ("up", "down", "frequency", "magnitude", "direct"):
        if hasattr(activation, name):
            delattr(activation, name)


def _activations(decoder: Any) -> Iterator[Any]:
    """Yield each activation that the kernels serve: factor two, 12 taps, up and down."""
    for module in decoder.modules():
        if is_audio_activation(module):
            up: Any = module.upsample
            down: Any = module.downsample.lowpass
            if up.ratio == down.stride == 2 and up.filter.numel() == down.filter.numel() == TAPS:
                yield module


def _fold_weight_norm(module: Any, undo: ExitStack) -> list[tuple[Any, WeightNorm]]:
    """Replace the hook that computes ``weight`` before every call by the computed weight; return module and hook."""
    hooks: Any = module._forward_pre_hooks
    for key, hook in list(hooks.items()):
        if isinstance(hook, WeightNorm):
            before = module.__dict__.pop(hook.name)
            with torch.no_grad():
                module.register_buffer(hook.name, hook.compute_weight(module), persistent=False)  # moves with .to()
            del hooks[key]
            undo.callback(_unfold, module, key, hook, before)
            return [(module, hook)]
    return []


def _unfold(module: torch.nn.Module, key: int, hook: WeightNorm, before: torch.Tensor) -> None:
    delattr(module, hook.name)
    setattr(module, hook.name, before)
    hooks: Any = module._forward_pre_hooks
    hooks[key] = hook
    hooks.move_to_end(key, last=False)


@dataclass(frozen=True)
class _OneTapOff(AudioDirectDepthwise):
    def operands(self, activation: Any) -> dict[str, torch.Tensor]:
        operands = super().operands(activation)
        return {**operands, "up": operands["up"].roll(1)}
