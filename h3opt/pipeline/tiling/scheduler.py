"""The tile scheduler of the video VAE: which tiles there are, which run together, how they become a video again.

It stands in for ``_decode`` and ``_encode`` of an ``AutoencoderKLMiniMaxH3`` of any size while a pass needs it. It
cuts as these do, runs tiles through the model in their order, and merges each finished tile straight into the
result, with the model's own blend. With :class:`TileOptions` as they are by default the bits are those of the
unmodified methods; a pass changes one choice and leaves the others to its neighbours.

How large a tile's activations are is an estimate, made before anything runs: the tensors that are alive at once in
the widest layer of the unmodified model (a library's workspace and what other passes keep are not in it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from h3opt.pipeline.tiling.plan import Tile, TilePlan, _all, plan_decode, plan_encode
from h3opt.pipeline.tiling.strategies import BatchRunner, Blender, MergeQueue, TileOptions


def schedule_tiles(vae: Any, choices: TileOptions, undo: ExitStack) -> None:
    """Decode and encode ``vae`` through the scheduler, with these choices besides those of passes that came before.

    Args:
        vae: an ``AutoencoderKLMiniMaxH3``.
        choices: see :class:`TileOptions`.
        undo: takes the choices back; with the last of them the VAE has its own methods again.
    """
    scheduler = getattr(vae.__dict__.get("_decode"), "__self__", None)
    if not isinstance(scheduler, TileScheduler):
        scheduler = TileScheduler(vae)
        scheduler.install()
    scheduler.choices.append(choices)
    undo.callback(scheduler.leave, choices)


@dataclass(eq=False)
class TileScheduler:
    """Runs the tiles of one VAE."""

    vae: Any
    choices: list[TileOptions] = field(default_factory=list)
    _before: dict[str, Any] = field(default_factory=dict)

    def install(self) -> None:
        """Take the place of the VAE's methods."""
        attributes = self.vae.__dict__
        self._before = {name: attributes[name] for name in ("_decode", "_encode") if name in attributes}
        self.vae._decode, self.vae._encode = self.decode, self.encode

    def leave(self, choices: TileOptions) -> None:
        """Forget ``choices``, and give the methods back when they were the last."""
        self.choices = [one for one in self.choices if one is not choices]
        if not self.choices:
            for name in ("_decode", "_encode"):
                self.vae.__dict__.pop(name, None)
            self.vae.__dict__.update(self._before)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """``vae._decode``: latents ``[batch, channels, frames, rows, columns]`` → pixels ``[batch, 3, frames, ...]``.

        Raises:
            H3OptError: a choice does not fit these latents; nothing has run.
        """
        plan = plan_decode(self.vae, tuple(z.shape), self.choices)
        return self.run(plan, z, lambda tiles: self.vae.decoder(self.vae.post_quant_conv(tiles)))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """``vae._encode``: pixels ``[batch, 3, frames, height, width]`` → moments of the latents.

        Raises:
            H3OptError: a choice does not fit these pixels; nothing has run.
        """
        plan = plan_encode(self.vae, tuple(x.shape), self.choices)
        return self.run(plan, x, lambda tiles: self.vae.quant_conv(self.vae.encoder(tiles)))

    def run(self, plan: TilePlan, source: torch.Tensor, model: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Cut ``source`` as planned, send it through ``model`` and merge what comes back."""
        chosen = _all(self.choices)
        lane, calls = chosen.lane or MergeQueue(), chosen.calls or BatchRunner()
        video = _Video(plan, (chosen.blends or Blender)(self.vae))
        if plan.clips.padding:
            last = source[:, :, -1:].repeat(1, 1, plan.clips.padding, 1, 1)
            source = torch.cat([source, last], dim=2)
        try:
            for batch in plan.batches:
                tiles = [source[plan.region(tile)] for tile in batch]
                done = calls.run(model, tiles[0] if len(tiles) == 1 else torch.cat(tiles), plan.what)
                video.allocate(done)
                parts = done.split(source.shape[0])
                lane.run(lambda batch=batch, parts=parts: video.merge(batch, parts), done.device)  # type: ignore[misc]
        finally:
            lane.finish()
        return video.result()


class _Video:
    """The result, and the finished tiles that neighbours still blend with."""

    def __init__(self, plan: TilePlan, blends: Blender) -> None:
        self.plan, self.blends = plan, blends
        self.whole: torch.Tensor | None = None
        self.waiting: dict[tuple[int, int], torch.Tensor] = {}

    def allocate(self, like: torch.Tensor) -> None:
        """Once, where the model runs: what is allocated on another stream must not outlive its work there."""
        if self.whole is None:
            clips, rows, columns = self.plan.clips, self.plan.rows, self.plan.columns
            shape = (self.plan.samples, like.shape[1], clips.length, rows.length, columns.length)
            self.whole = like.new_empty(shape)

    def merge(self, tiles: Sequence[Tile], done: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Blend and place finished tiles, in the order of the plan; returns what was read."""
        read = list(done)
        for tile, finished in zip(tiles, done, strict=True):
            read += self._merge(tile, finished)
        return read

    def result(self) -> torch.Tensor:
        assert self.whole is not None
        return self.whole[:, :, : -self.plan.clips.cut] if self.plan.clips.cut else self.whole

    def _merge(self, tile: Tile, finished: torch.Tensor) -> list[torch.Tensor]:
        rows, columns = self.plan.rows, self.plan.columns
        own = self.blends.own(finished)
        read = []
        if tile.row > 0:  # the last to ask for the tile above, as that tile's right neighbour came before
            above = self.waiting.pop((tile.row - 1, tile.column))
            read.append(above)
            self._over(above, own, rows.overlaps[tile.row - 1], -2)
        if tile.column > 0:
            left = self.waiting[tile.row, tile.column - 1]
            read.append(left)
            self._over(left, own, columns.overlaps[tile.column - 1], -1)
            if tile.row == len(rows.sizes) - 1:
                del self.waiting[tile.row, tile.column - 1]
        if (tile.row, tile.column) != (len(rows.sizes) - 1, len(columns.sizes) - 1):
            self.waiting[tile.row, tile.column] = finished
        self._place(tile, own[..., : rows.shown(tile.row), : columns.shown(tile.column)])
        return read

    def _over(self, before: torch.Tensor, after: torch.Tensor, overlap: int, dim: int) -> None:
        extent = min(before.shape[dim], after.shape[dim], overlap)
        self.blends.blend(before.narrow(dim, before.shape[dim] - extent, extent), after.narrow(dim, 0, extent), dim)

    def _place(self, tile: Tile, own: torch.Tensor) -> None:
        assert self.whole is not None
        clips, top, left = self.plan.clips, self.plan.rows.offsets[tile.row], self.plan.columns.offsets[tile.column]
        target = self.whole[..., top : top + own.shape[-2], left : left + own.shape[-1]]
        for start, stop, offset in clips.kept:
            frames, place = own[:, :, start:stop], tile.clip * clips.stride + offset
            if tile.clip > 0 and offset == 0 and clips.faded:  # the tail of the clip before it is already there
                self.blends.blend(target[:, :, place : place + clips.faded], frames[:, :, : clips.faded], -3)
            target[:, :, place : place + frames.shape[2]] = frames
