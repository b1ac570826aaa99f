"""Linear layers stored and multiplied as FP8, and the passes that put them into a model's blocks."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from h3opt.device import to_host
from h3opt.kernels import ops
from h3opt.pass_api.base import FormatPass, QuantizedBlocks
from h3opt.pipeline.minimax_h3 import PROJECTIONS

if TYPE_CHECKING:
    from h3opt.pipeline.view import PipelineView


class FP8Linear(torch.nn.Module):
    """A linear layer with e4m3 weights and one float32 scale per output row.

    ``forward`` quantizes its input per token and multiplies in FP8 with float32 accumulation. The quantize is an
    operator of its own, so that a graph pass can merge equal ones and move them into their producer. The bias stays
    the parameter it was: the video decoder asks a layer's first parameter for the dtype to compute in.

    Attributes:
        weight: e4m3 ``[out, in]``.
        weight_scale: float32 ``[out, 1]``.
        bias: ``[out]`` in the model's dtype, or ``None``.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor

    def __init__(self, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantized, scale = ops.quantize_rows(x)
        return ops.scaled_linear(quantized, scale, self.weight, self.weight_scale, self.bias, x.dtype)


@dataclass(frozen=True)
class FP8BlocksPass(FormatPass):
    """Base of the passes that make linear layers of repeated blocks FP8.

    The originals wait in host memory, or are freed where the pipeline need not be restorable.

    Options:
        layers: which linear layers of a block, by their path in it.
        keep_first, keep_last: how many blocks at either end stay as they are.
    """

    block_kind: ClassVar[str]
    layers: tuple[str, ...] = PROJECTIONS
    keep_first: int = 0
    keep_last: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.layers, str) or len(set(self.layers)) < len(tuple(self.layers)):
            raise ValueError(f"layers must be a list that names each layer once, got {self.layers!r}")
        object.__setattr__(self, "layers", tuple(self.layers))
        unknown = [layer for layer in self.layers if layer not in PROJECTIONS]
        if unknown:
            raise ValueError(f"layers has {unknown[0]!r}, which is none of {', '.join(PROJECTIONS)}")
        if any(type(kept) is not int or kept < 0 for kept in (self.keep_first, self.keep_last)):
            raise ValueError("keep_first and keep_last must be whole numbers and must not be negative")

    @abc.abstractmethod
    def blocks(self, view: PipelineView) -> Sequence[torch.nn.Module]:
        """All repeated blocks of the model, none if it is missing."""

    def quantized_blocks(self) -> QuantizedBlocks:
        return QuantizedBlocks(self.block_kind, frozenset(self.layers), self.keep_first + self.keep_last)

    def expect(self, view: PipelineView) -> int:
        return max(len(self.blocks(view)) - self.keep_first - self.keep_last, 0) * len(self.layers)

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        count = 0
        for parent, name in self._sites(view):
            original = getattr(parent, name)
            device = original.weight.device
            setattr(parent, name, self.convert(original))
            count += 1
            if view.restorable:
                undo.callback(_put_back, parent, name, original, device)
                if device.type != "cpu":  # the weight alone: the bias is in use
                    original.weight.data = to_host(original.weight.data)
        return count

    def convert(self, linear: torch.nn.Linear) -> FP8Linear:
        """Quantize one layer's weight ``[out, in]`` row by row: scale = amax / 448."""
        weight, scale = ops.quantize_rows(linear.weight.detach())
        return FP8Linear(weight, scale, linear.bias)

    def _sites(self, view: PipelineView) -> Iterator[tuple[Any, str]]:
        blocks = self.blocks(view)
        for block in blocks[self.keep_first : max(len(blocks) - self.keep_last, 0)]:
            for layer in self.layers:
                path, _, name = layer.rpartition(".")
                parent = block.get_submodule(path)
                if type(parent.get_submodule(name)) is torch.nn.Linear:
                    yield parent, name


def _put_back(parent: Any, name: str, original: torch.nn.Linear, device: torch.device) -> None:
    original.weight.data = original.weight.data.to(device)
    setattr(parent, name, original)
