"""Buffers of the tile merge, allocated once and used for all equal tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.pass_api import Exact, Mutant, TilePass, register
from h3opt.pipeline import minimax_h3
from h3opt.pipeline.tiling.strategies import Blender, TileOptions


class ReusedBuffers(Blender):
    """The same products and sums as the VAE's own blend, written to buffers; weights are computed once per overlap.

    Buffers live as long as one decode. The weights are the VAE's own blend of ones and zeros.
    """

    def __init__(self, vae: Any) -> None:
        super().__init__(vae)
        self.buffers: dict[Any, torch.Tensor] = {}
        self.weights: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def own(self, tile: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return super().own(tile)
        return self.buffer("tile", tile).copy_(tile)

    def blend(self, before: torch.Tensor, after: torch.Tensor, dim: int) -> None:
        if torch.is_grad_enabled():  # the backward pass needs the tensors that a reused buffer would overwrite
            super().blend(before, after, dim)
            return
        weight_before, weight_after = self.blend_weights(after, dim)
        product = torch.mul(before, weight_before, out=self.buffer("product", before))
        torch.add(product, after.mul_(weight_after), out=after)

    def blend_weights(self, after: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of the earlier and of the later tile along ``dim``, broadcast along the other dimensions."""
        key = after.shape[dim], dim, after.dtype, after.device
        if key not in self.weights:
            shape = [1] * after.ndim
            shape[dim] = after.shape[dim]
            ones, zeros = after.new_ones(shape), after.new_zeros(shape)
            self.weights[key] = (
                minimax_h3.blend_tiles(self.vae, ones, zeros, dim),
                minimax_h3.blend_tiles(self.vae, zeros, ones, dim),
            )
        return self.weights[key]

    def buffer(self, use: str, like: torch.Tensor) -> torch.Tensor:
        """The buffer for this use and shape; it still holds the content of the last use."""
        key = use, like.shape, like.dtype, like.device
        if key not in self.buffers:
            self.buffers[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return self.buffers[key]


@register
@dataclass(frozen=True)
class TileBufferReuse(TilePass):
    """Merging equal tiles reuses buffers and blend weights: three launches a border, no allocation.

    diffusers allocates for every border and computes the weights again. The tensors of the decoder itself come back
    from torch's caching allocator and are left alone: a copy out of it would cost more. With gradients on, nothing is
    reused.
    """

    name = "tile_buffer_reuse"
    former_names = ("memory_query_reuse",)
    promise = Exact()
    happens_before = ("A tile is merged before the next one's merge writes the buffers: both are on one stream.",)

    def tile_options(self, vae: Any) -> TileOptions:
        return TileOptions(blender=self.blender)

    def blender(self, vae: Any) -> Blender:
        """The blender of one decode."""
        return ReusedBuffers(vae)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("a buffer keeps the first tile", _KeepFirstTile()),)


class _StaleBuffers(ReusedBuffers):
    def own(self, tile: torch.Tensor) -> torch.Tensor:
        known = len(self.buffers)
        buffer = self.buffer("tile", tile)
        return buffer.copy_(tile) if len(self.buffers) > known else buffer


@dataclass(frozen=True)
class _KeepFirstTile(TileBufferReuse):
    def blender(self, vae: Any) -> Blender:
        return _StaleBuffers(vae)
