"""Another tile size for the video decoder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from h3opt.pass_api import Device, Mutant, Perceptual, PipelineView, TilePass, register
from h3opt.pipeline.minimax_h3 import latent_channels, video_geometry
from h3opt.pipeline.tiling.plan import TilePlan, plan_decode
from h3opt.pipeline.tiling.strategies import Blender, TileOptions

STEP = 16
"""Pixels of a latent: tiles begin and end on whole latents."""


@register
@dataclass(frozen=True)
class TileGeometry(TilePass):
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
        if (reason := super().applies(device, view)) is not None:
            return reason
        return None if video_geometry(view.vae).tiled else "tiling is off; vae.enable_tiling() turns it on"

    def tile_options(self, vae: Any) -> TileOptions:
        return TileOptions(tile=parse_tile(self.tile))

    def plan(self, view: PipelineView, latents: tuple[int, int, int]) -> TilePlan:
        return plan_decode(view.vae, (1, latent_channels(view.vae), *latents), [self.tile_options(view.vae)])

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


class _FlippedTiles(Blender):
    def own(self, tile: torch.Tensor) -> torch.Tensor:
        return tile.flip(-2)


@dataclass(frozen=True)
class _UpsideDown(TileGeometry):
    def tile_options(self, vae: Any) -> TileOptions:
        return replace(super().tile_options(vae), blender=_FlippedTiles)
