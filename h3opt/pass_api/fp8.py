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
from h3opt.kernels.ops.linear import ACCUMULATE
from h3opt.pass_api.base import FormatPass, QuantizedBlocks
from h3opt.pipeline.minimax_h3 import PROJECTIONS

if TYPE_CHECKING:
    from h3opt.pipeline.view import PipelineView


_EVERY = "every layer"


class FP8Linear(torch.nn.Module):
    """A linear layer with e4m3 weights and one float32 scale per output row.

    ``forward`` quantizes its input per token and multiplies in FP8, with sums as ``accumulate`` says. The quantize is
    an operator of its own, so that a graph pass can merge equal ones and move them into their producer. The bias stays
    the parameter it was: the video decoder asks a layer's first parameter for the dtype to compute in.

    Attributes:
        weight: e4m3 ``[out, in]``.
        weight_scale: float32 ``[out, 1]``.
        bias: ``[out]`` in the model's dtype, or ``None``.
        accumulate: ``"precise"`` or ``"fast"``, see :func:`h3opt.kernels.ops.linear.scaled_linear_definition`.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.nn.Parameter | None,
        accumulate: str = "precise",
    ) -> None:
        super().__init__()
        self.accumulate = accumulate
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantized, scale = ops.quantize_rows(x)
        return ops.scaled_linear(quantized, scale, self.weight, self.weight_scale, self.bias, x.dtype, self.accumulate)


@dataclass(frozen=True)
class FP8BlocksPass(FormatPass):
    """Base of the passes that make linear layers of repeated blocks FP8.

    The originals wait in host memory, or are freed where the pipeline need not be restorable.

    Options:
        layers: which linear layers of a block, by their path in it.
        keep_first, keep_last: how many blocks at either end stay as they are.
        accumulate: how products are summed, ``"precise"`` or ``"fast"`` for all layers, or a mapping from layers to
            these; a layer that it does not name is precise.

    Precise is the default of every layer. Measured on an H200, with operands whose channels have offsets as trained
    networks' have: at 14,336 inputs (``ff.net.2``) fast accumulation has an error of 0.066 where precise has 0.003, and
    saves 3 % of the product's time; at 5,376 inputs 0.024 and 0.003, for 10 %. At both the limit that quantization sets
    is below 0.003, so fast loses more than FP8 itself does there.
    """

    block_kind: ClassVar[str]
    layers: tuple[str, ...] = PROJECTIONS
    keep_first: int = 0
    keep_last: int = 0
    accumulate: Any = "precise"

    def __post_init__(self) -> None:
        if isinstance(self.layers, str) or len(set(self.layers)) < len(tuple(self.layers)):
            raise ValueError(f"layers must be a list that names each layer once, got {self.layers!r}")
        object.__setattr__(self, "layers", tuple(self.layers))
        unknown = [layer for layer in self.layers if layer not in PROJECTIONS]
        if unknown:
            raise ValueError(f"layers has {unknown[0]!r}, which is none of {', '.join(PROJECTIONS)}")
        if any(type(kept) is not int or kept < 0 for kept in (self.keep_first, self.keep_last)):
            raise ValueError("keep_first and keep_last must be whole numbers and must not be negative")
        if not isinstance(self.accumulate, str):  # pairs in order, so that equal passes are equal and can be hashed
            object.__setattr__(self, "accumulate", tuple(sorted(dict(self.accumulate).items())))
        for layer, choice in self._choices():
            if choice not in ACCUMULATE:
                raise ValueError(f"accumulate must be {' or '.join(ACCUMULATE)}, got {choice!r} for {layer}")
            if layer not in (*self.layers, _EVERY):
                raise ValueError(f"accumulate has {layer!r}, which is none of the layers {', '.join(self.layers)}")

    def accumulate_of(self, layer: str) -> str:
        """How the products of a layer, named by its path in a block, are summed."""
        choices = dict(self._choices())
        return choices.get(_EVERY) or choices.get(layer, "precise")

    def _choices(self) -> tuple[tuple[str, str], ...]:
        return ((_EVERY, self.accumulate),) if isinstance(self.accumulate, str) else self.accumulate

    @abc.abstractmethod
    def blocks(self, view: PipelineView) -> Sequence[torch.nn.Module]:
        """All repeated blocks of the model, none if it is missing."""

    def quantized_blocks(self) -> QuantizedBlocks:
        return QuantizedBlocks(self.block_kind, frozenset(self.layers), self.keep_first + self.keep_last)

    def expect(self, view: PipelineView) -> int:
        return max(len(self.blocks(view)) - self.keep_first - self.keep_last, 0) * len(self.layers)

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        count = 0
        for parent, name, layer in self._sites(view):
            original = getattr(parent, name)
            device = original.weight.device
            converted = self.convert(original)
            converted.accumulate = self.accumulate_of(layer)
            setattr(parent, name, converted)
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

    def _sites(self, view: PipelineView) -> Iterator[tuple[Any, str, str]]:
        blocks = self.blocks(view)
        for block in blocks[self.keep_first : max(len(blocks) - self.keep_last, 0)]:
            for layer in self.layers:
                path, _, name = layer.rpartition(".")
                parent = block.get_submodule(path)
                if type(parent.get_submodule(name)) is torch.nn.Linear:
                    yield parent, name, layer


def _put_back(parent: Any, name: str, original: torch.nn.Linear, device: torch.device) -> None:
    original.weight.data = original.weight.data.to(device)
    setattr(parent, name, original)
