"""The tile scheduler of the video VAE: which tiles there are, which run together, and how they become a video again.

It replaces ``_decode`` and ``_encode`` of an ``AutoencoderKLMiniMaxH3`` of any size while a pass needs it. It cuts as
these methods do, runs the tiles in the same order, and merges each finished tile straight into the result, with the
model's own blend. With default :class:`TileOptions` the bits are those of the unmodified methods; a pass changes one
option and leaves the others to other passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from h3opt.pipeline import minimax_h3
from h3opt.pipeline.tiling.plan import Tile, TilePlan, plan_decode, plan_encode
from h3opt.pipeline.tiling.strategies import (
    BatchRunner,
    Blender,
    MergeQueue,
    TileModel,
    TileOptions,
    combine_options,
)


def schedule_tiles(vae: Any, options: TileOptions, undo: ExitStack) -> None:
    """Decode and encode ``vae`` through the scheduler, with these options besides those of earlier passes.

    Args:
        vae: an ``AutoencoderKLMiniMaxH3``.
        options: see :class:`TileOptions`.
        undo: takes the options back; after the last options the VAE has its own methods again.
    """
    scheduler = getattr(vae.__dict__.get(minimax_h3.TILED_METHODS[0]), "__self__", None)
    if not isinstance(scheduler, TileScheduler):
        scheduler = TileScheduler(vae)
        scheduler.install()
    scheduler.options.append(options)
    undo.callback(scheduler.remove, options)


@dataclass(eq=False)
class TileScheduler:
    """Runs the tiles of one VAE.

    Attributes:
        vae: the VAE.
        options: those of each pass that is on, in the order of installation.
    """

    vae: Any
    options: list[TileOptions] = field(default_factory=list)
    _replaced: dict[str, Any] = field(default_factory=dict)

    def install(self) -> None:
        """Take the place of the VAE's methods."""
        attributes = self.vae.__dict__
        self._replaced = {name: attributes[name] for name in minimax_h3.TILED_METHODS if name in attributes}
        for name, method in zip(minimax_h3.TILED_METHODS, (self.decode, self.encode), strict=True):
            setattr(self.vae, name, method)

    def remove(self, options: TileOptions) -> None:
        """Drop ``options``; after the last options, give the VAE its own methods back."""
        self.options = [other for other in self.options if other is not options]
        if options.batch_runner is not None:
            options.batch_runner.release()
        if not self.options:
            for name in minimax_h3.TILED_METHODS:
                self.vae.__dict__.pop(name, None)
            self.vae.__dict__.update(self._replaced)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Decode latents ``[batch, channels, frames, rows, columns]`` → pixels ``[batch, 3, frames, height, width]``.

        Raises:
            H3OptError: an option does not fit these latents; nothing has run.
        """
        plan = plan_decode(self.vae, tuple(z.shape), self.options)
        return self.run(plan, z, partial(minimax_h3.decode_tiles, self.vae))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Encode pixels ``[batch, 3, frames, height, width]`` → moments of the latents.

        Raises:
            H3OptError: an option does not fit these pixels; nothing has run.
        """
        plan = plan_encode(self.vae, tuple(x.shape), self.options)
        return self.run(plan, x, partial(minimax_h3.encode_tiles, self.vae))

    def run(self, plan: TilePlan, source: torch.Tensor, model: TileModel) -> torch.Tensor:
        """Cut ``source`` as planned, send the tiles through ``model`` and merge the finished tiles."""
        options = combine_options(self.options)
        merge_queue = options.merge_queue or MergeQueue()
        batch_runner = options.batch_runner or BatchRunner()
        output = _Output(plan, (options.blender or Blender)(self.vae))
        if plan.chunks.padding:
            last = source[:, :, -1:].repeat(1, 1, plan.chunks.padding, 1, 1)
            source = torch.cat([source, last], dim=2)
        try:
            for batch in plan.batches:
                tiles = [source[plan.region(tile)] for tile in batch]
                finished = batch_runner.run(model, tiles[0] if len(tiles) == 1 else torch.cat(tiles), plan.operation)
                output.allocate(finished)
                merge_queue.run(partial(output.merge, batch, finished.split(source.shape[0])), finished.device)
        finally:
            merge_queue.finish()
        return output.result()


class _Output:
    """The result of a decode or encode, and the finished tiles that neighbours still blend with."""

    def __init__(self, plan: TilePlan, blender: Blender) -> None:
        self.plan, self.blender = plan, blender
        self.whole: torch.Tensor | None = None
        self.waiting: dict[tuple[int, int], torch.Tensor] = {}

    def allocate(self, like: torch.Tensor) -> None:
        """Allocate the result once, on the stream that computes: memory of a side stream must not outlive the work."""
        if self.whole is None:
            chunks, rows, columns = self.plan.chunks, self.plan.rows, self.plan.columns
            shape = (self.plan.samples, like.shape[1], chunks.length, rows.length, columns.length)
            self.whole = like.new_empty(shape)

    def merge(self, tiles: Sequence[Tile], finished: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Blend and place finished tiles, in the order of the plan; return the tensors that were read."""
        read = list(finished)
        for tile, tensor in zip(tiles, finished, strict=True):
            read += self._merge_tile(tile, tensor)
        return read

    def result(self) -> torch.Tensor:
        """Return the result without the frames that padding added."""
        assert self.whole is not None
        return self.whole[:, :, : -self.plan.chunks.cut] if self.plan.chunks.cut else self.whole

    def _merge_tile(self, tile: Tile, finished: torch.Tensor) -> list[torch.Tensor]:
        rows, columns = self.plan.rows, self.plan.columns
        own = self.blender.own(finished)
        read = []
        if tile.row > 0:  # this tile is the last to need the tile above, after the right neighbour of that tile
            above = self.waiting.pop((tile.row - 1, tile.column))
            read.append(above)
            self._blend(above, own, rows.overlaps[tile.row - 1], -2)
        if tile.column > 0:
            left = self.waiting[tile.row, tile.column - 1]
            read.append(left)
            self._blend(left, own, columns.overlaps[tile.column - 1], -1)
            if tile.row == len(rows.sizes) - 1:
                del self.waiting[tile.row, tile.column - 1]
        if (tile.row, tile.column) != (len(rows.sizes) - 1, len(columns.sizes) - 1):
            self.waiting[tile.row, tile.column] = finished
        self._place(tile, own[..., : rows.visible(tile.row), : columns.visible(tile.column)])
        return read

    def _blend(self, before: torch.Tensor, after: torch.Tensor, overlap: int, dim: int) -> None:
        extent = min(before.shape[dim], after.shape[dim], overlap)
        self.blender.blend(before.narrow(dim, before.shape[dim] - extent, extent), after.narrow(dim, 0, extent), dim)

    def _place(self, tile: Tile, own: torch.Tensor) -> None:
        assert self.whole is not None
        chunks, top, left = self.plan.chunks, self.plan.rows.offsets[tile.row], self.plan.columns.offsets[tile.column]
        target = self.whole[..., top : top + own.shape[-2], left : left + own.shape[-1]]
        for start, stop, offset in chunks.kept:
            frames, place = own[:, :, start:stop], tile.chunk * chunks.stride + offset
            if tile.chunk > 0 and offset == 0 and chunks.faded:  # the tail of the previous chunk is already there
                self.blender.blend(target[:, :, place : place + chunks.faded], frames[:, :, : chunks.faded], -3)
            target[:, :, place : place + frames.shape[2]] = frames
