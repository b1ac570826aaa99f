"""Linear layers stored and multiplied as FP8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from h3opt.device import Device
from h3opt.kernels import ops
from h3opt.promises import Perceptual
from h3opt.protocol import FormatPass, Mutant, No, Yes
from h3opt.registry import register

if TYPE_CHECKING:
    from h3opt.components import PipelineView

E4M3_MAX = 448.0
PROJECTIONS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")


class FP8Linear(torch.nn.Module):
    """A linear layer with e4m3 weights and one float32 scale per output row.

    ``forward`` quantizes its input per token and multiplies in FP8 with float32 accumulation. The quantize is an
    operator of its own, so that a graph pass can merge equal ones and move them into their producer.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor

    def __init__(self, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantized, scale = ops.quantize_rows(x)
        return ops.scaled_linear(quantized, scale, self.weight, self.weight_scale, self.bias, x.dtype)


@register
@dataclass(frozen=True)
class FP8LinearPass(FormatPass):
    """Weights as e4m3 with a scale per row, activations quantized per token: half the bytes, twice the GEMM rate.

    Options:
        layers: which linear layers of a transformer block, by their path in it.
        keep_first, keep_last: how many blocks at either end stay as they are.
    """

    layers: tuple[str, ...] = PROJECTIONS
    keep_first: int = 0
    keep_last: int = 0

    name = "fp8_linear"
    # Tiny pipeline, 4 and 10 steps: the pass LPIPS 0.00006 and 61 dB, its mutant (scales off by two) 0.06 and 25.8 dB.
    promise = Perceptual(lpips=0.03, audio_snr_db=40.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        unknown = [layer for layer in self.layers if layer not in PROJECTIONS]
        if unknown:
            raise ValueError(f"layers has {unknown[0]!r}, which is none of {', '.join(PROJECTIONS)}")
        if min(self.keep_first, self.keep_last) < 0:
            raise ValueError("keep_first and keep_last must not be negative")

    def applies(self, device: Device, view: PipelineView) -> Yes | No:
        if view.transformer is None:
            return No("there is no transformer")
        return Yes() if device.has_fp8 else No(f"{device.name} has no FP8; SM89 or newer does")

    def expect(self, view: PipelineView) -> int:
        blocks = len(view.transformer.transformer_blocks) if view.transformer is not None else 0
        return max(blocks - self.keep_first - self.keep_last, 0) * len(self.layers)

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        count = 0
        for parent, name in self._sites(view):
            original = getattr(parent, name)
            device = original.weight.device
            setattr(parent, name, self.convert(original))
            undo.callback(_put_back, parent, name, original, device)
            if device.type != "cpu":
                original.to("cpu")
            count += 1
        return count

    def convert(self, linear: torch.nn.Linear) -> FP8Linear:
        """Quantize one layer's weight ``[out, in]`` row by row: scale = amax / 448."""
        weight, scale = ops.quantize_rows(linear.weight.detach())
        return FP8Linear(weight, scale, linear.bias)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("weight scales off by two", _ScalesOffByTwo()),)

    def _sites(self, view: PipelineView) -> Iterator[tuple[Any, str]]:
        blocks = view.transformer.transformer_blocks
        for block in blocks[self.keep_first : len(blocks) - self.keep_last]:
            for layer in self.layers:
                path, _, name = layer.rpartition(".")
                parent = block.get_submodule(path)
                if type(parent.get_submodule(name)) is torch.nn.Linear:
                    yield parent, name


def _put_back(parent: Any, name: str, original: torch.nn.Linear, device: torch.device) -> None:
    setattr(parent, name, original.to(device))


@dataclass(frozen=True)
class _ScalesOffByTwo(FP8LinearPass):
    def convert(self, linear: torch.nn.Linear) -> FP8Linear:
        converted = super().convert(linear)
        converted.weight_scale *= 2
        return converted
