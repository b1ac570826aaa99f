"""Another tile size for the video decoder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from h3opt.pass_api import Device, Mutant, Perceptual, PipelineView, SchedulePass, register
from h3opt.pipeline.tiling.plan import TilePlan, plan_decode
from h3opt.pipeline.tiling.scheduler import schedule_tiles
from h3opt.pipeline.tiling.strategies import Blender, TileOptions

STEP = 16
"""Pixels of a latent: tiles begin and end on whole latents."""


@register
@dataclass(frozen=True)
class TileGeometry(SchedulePass):
    """Larger or fewer tiles cover the frame with less overlap decoded twice: 8 a chunk, not 15, at 544x960.

    The released picture is that of tiles of 256 pixels: what a tile sees of the frame, and where in it each pixel lies,
    is part of what the decoder computes. So another tile is another picture, and this pass is never on by default.
    Encoding keeps the released tiles. Look at seams too: :func:`h3opt.metrics.seams.seam_visibility` at the
    ``borders`` of the plan's rows and columns.

    Options:
        tile: ``"HxWxO"`` in pixels: height and width of a tile, and the least overlap of neighbours. Multiples of 16,
            the overlap less than the tile. A tile larger than the frame is a ``PipelineError`` when the frame is known.
    """

    tile: str = "288x272x32"

    name = "tile_geometry"
    # Tiny pipeline at 64x96, untiled against 64x64x16: LPIPS 0.0001, its mutant (tiles upside down) 0.115. The bound is
    # the upper end of what others measured with the released weights at 544x960, 0.05 to 0.09. Seams there: visibility
    # 1.02, and 1.02 with blending left out: random weights draw noise, in which no seam shows.
    promise = Perceptual(lpips=0.09, on_reference=Perceptual(lpips=0.003))
    happens_before = ("Tiles are merged in their order, with the decoder's own arithmetic.",)

    def __post_init__(self) -> None:
        parse_tile(self.tile)

    def applies(self, device: Device, view: PipelineView) -> str | None:
        if view.vae is None:
            return "there is no video VAE"
        return None if view.vae.use_tiling else "tiling is off; vae.enable_tiling() turns it on"

    def expect(self, view: PipelineView) -> int:
        return 1

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        schedule_tiles(view.vae, self.choices(), undo)
        return 1

    def choices(self) -> TileOptions:
        """What this pass asks of the tile scheduler."""
        return TileOptions(tile=parse_tile(self.tile))

    def plan(self, view: PipelineView, latents: tuple[int, int, int]) -> TilePlan:
        return plan_decode(view.vae, (1, view.vae.config.latent_channels, *latents), [self.choices()])

    def test_instance(self) -> TileGeometry:
        return replace(self, tile="64x64x16")

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("a tile is turned upside down", _UpsideDown(tile="64x64x16")),)


def parse_tile(text: str) -> tuple[int, int, int]:
    """Height, width and overlap in pixels from ``"HxWxO"``.

    Raises:
        ValueError: not three whole numbers, not positive multiples of 16, or an overlap no less than the tile.
    """
    parts = re.fullmatch(r"(-?\d+)x(-?\d+)x(-?\d+)", text) if isinstance(text, str) else None
    if parts is None:
        raise ValueError(f"tile must be three whole numbers HxWxO such as '288x272x32', got {text!r}")
    height, width, overlap = (int(part) for part in parts.groups())
    if min(height, width, overlap) <= 0 or any(size % STEP for size in (height, width, overlap)):
        raise ValueError(f"tile must be of positive multiples of {STEP} pixels, got {text!r}")
    if overlap >= min(height, width):
        raise ValueError(f"tile must be larger than its overlap of {overlap} pixels, got {text!r}")
    return height, width, overlap


class _Flipped(Blender):
    def own(self, tile: torch.Tensor) -> torch.Tensor:
        return tile.flip(-2)


@dataclass(frozen=True)
class _UpsideDown(TileGeometry):
    def choices(self) -> TileOptions:
        def blends(vae: Any) -> Blender:
            return _Flipped(vae)

        return replace(super().choices(), blends=blends)
