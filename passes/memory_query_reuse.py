"""Buffers of the tile merge, allocated once and used for every equal tile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.pass_api import Device, Exact, Mutant, PipelineView, SchedulePass, register
from h3opt.pipeline.tiling.scheduler import schedule_tiles
from h3opt.pipeline.tiling.strategies import Blender, TileOptions


class ReusedBuffers(Blender):
    """The same products and sums as ``vae._blend``, written to buffers; its weights are computed once per overlap.

    Buffers live as long as one decode. The weights are those that ``_blend`` itself gives for one and zero.
    """

    def __init__(self, vae: Any) -> None:
        super().__init__(vae)
        self.buffers: dict[Any, torch.Tensor] = {}
        self.weights: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def own(self, tile: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return super().own(tile)
        return self.like("tile", tile).copy_(tile)

    def blend(self, before: torch.Tensor, after: torch.Tensor, dim: int) -> None:
        if torch.is_grad_enabled():  # the derivative needs what a reused buffer would lose
            super().blend(before, after, dim)
            return
        key = after.shape[dim], dim, after.dtype, after.device
        if key not in self.weights:
            shape = [1] * after.ndim
            shape[dim] = after.shape[dim]
            one, zero = after.new_ones(shape), after.new_zeros(shape)
            ends = ((one, zero), (zero, one))
            going, coming = (self.vae._blend(first, second, shape[dim], dim) for first, second in ends)
            self.weights[key] = going, coming
        going, coming = self.weights[key]
        product = torch.mul(before, going, out=self.like("product", before))
        torch.add(product, after.mul_(coming), out=after)

    def like(self, use: str, tensor: torch.Tensor) -> torch.Tensor:
        """The buffer for this use and shape; contents are whatever came before."""
        key = use, tensor.shape, tensor.dtype, tensor.device
        if key not in self.buffers:
            self.buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return self.buffers[key]


@register
@dataclass(frozen=True)
class MemoryQueryReuse(SchedulePass):
    """Merging equal tiles reuses its buffers and blend weights: three launches a border, no allocation.

    diffusers asks for no memory figures between tiles, unlike the runtime this lever comes from; what it does there is
    go to the allocator and recompute the weights for every border. What the decoder itself allocates comes back from
    torch's caching allocator and is left alone: a copy out of it would cost more. With gradients on, nothing is reused.
    """

    name = "memory_query_reuse"
    promise = Exact()
    happens_before = ("A tile is merged before the next one's merge writes the buffers: both are on one stream.",)

    def applies(self, device: Device, view: PipelineView) -> str | None:
        return None if view.vae is not None else "there is no video VAE"

    def expect(self, view: PipelineView) -> int:
        return 1

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        schedule_tiles(view.vae, TileOptions(blends=self.blends), undo)
        return 1

    def blends(self, vae: Any) -> Blender:
        """The blends of one decode."""
        return ReusedBuffers(vae)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("a buffer keeps the first tile", _FirstTileStays()),)


class _Stale(ReusedBuffers):
    def own(self, tile: torch.Tensor) -> torch.Tensor:
        known = len(self.buffers)
        buffer = self.like("tile", tile)
        return buffer.copy_(tile) if len(self.buffers) > known else buffer


@dataclass(frozen=True)
class _FirstTileStays(MemoryQueryReuse):
    def blends(self, vae: Any) -> Blender:
        return _Stale(vae)
