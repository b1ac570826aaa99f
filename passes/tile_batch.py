"""The video decoder's equal tiles, decoded as batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from h3opt.device import Device
from h3opt.promises import Rounding
from h3opt.protocol import Mutant, No, SchedulePass, Yes
from h3opt.registry import register

if TYPE_CHECKING:
    from h3opt.components import PipelineView


@register
@dataclass(frozen=True)
class TileBatch(SchedulePass):
    """The decoder runs equal tiles of one and of neighbouring chunks as a batch, so that its GEMMs fill the GPU.

    GEMM kernels are chosen by shape, so batching may change the order of a reduction: Rounding, not Exact.

    Options:
        max_tiles: most tiles in one decoder call.
    """

    max_tiles: int = 8

    name = "tile_batch"
    promise = Rounding(ulps=8)
    happens_before = (
        "All tiles of a chunk are decoded before that chunk is stitched.",
        "Chunks are stitched and cross-faded in their order, with the decoder's own arithmetic.",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.max_tiles, int) or isinstance(self.max_tiles, bool) or self.max_tiles < 1:
            raise ValueError(f"max_tiles must be a whole number of at least 1, got {self.max_tiles!r}")

    def applies(self, device: Device, view: PipelineView) -> Yes | No:
        return Yes() if view.vae is not None else No("there is no video VAE")

    def expect(self, view: PipelineView) -> int:
        return 1

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        vae = view.vae
        undo.callback(vae.__dict__.pop, "_decode", None)

        def decode(z: torch.Tensor) -> torch.Tensor:
            with ExitStack() as own_clips:
                clips = self.clips(vae, z)
                vae._decode_clip = lambda _: next(clips)
                own_clips.callback(vae.__dict__.pop, "_decode_clip", None)
                return type(vae)._decode(vae, z)

        vae._decode = decode
        return 1

    def clips(self, vae: Any, z: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each chunk's stitched clip ``[batch, 3, frames, height, width]``, in the order ``_decode`` asks for them."""
        chunks = list(latent_chunks(vae, z))
        grids = [TileGrid.of(vae, chunk) for chunk in chunks]
        queue = [tile for grid in grids for tile in grid.tiles]
        decoded: list[torch.Tensor] = []
        for grid in grids:
            while len(decoded) < len(grid.tiles):
                batch = queue[: self.batch_size(len(queue))]
                del queue[: len(batch)]
                out = vae.decoder(vae.post_quant_conv(torch.cat(batch)))
                decoded += out.split(batch[0].shape[0])
            mine, decoded = decoded[: len(grid.tiles)], decoded[len(grid.tiles) :]
            yield grid.stitch(mine)

    def batch_size(self, waiting: int) -> int:
        """Batches of nearly equal size: a lone tile at the end would be another shape, and another captured graph."""
        batches = -(-waiting // self.max_tiles)
        return -(-waiting // batches)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("chunks come in reverse", _ReversedChunks()),)


@dataclass
class TileGrid:
    """The tiles of one chunk and how they are put together again.

    Attributes:
        tiles: latent tiles of equal shape ``[batch, channels, frames, rows, columns]``, row by row.
        stitch: decoded tiles, in the same order → the clip.
    """

    tiles: list[torch.Tensor]
    stitch: Callable[[list[torch.Tensor]], torch.Tensor]

    @classmethod
    def of(cls, vae: Any, chunk: torch.Tensor) -> TileGrid:
        """Lay tiles over a latent chunk exactly as ``_decode_clip`` does."""
        if not vae.use_tiling:
            return cls([chunk], lambda decoded: decoded[0])
        ratio = vae.spatial_compression_ratio
        rows, row_sizes, row_overlaps = vae._split_tiles(
            chunk.shape[-2] * ratio, vae.tile_sample_min_height, vae.tile_sample_min_overlap_height
        )
        columns, column_sizes, column_overlaps = vae._split_tiles(
            chunk.shape[-1] * ratio, vae.tile_sample_min_width, vae.tile_sample_min_overlap_width
        )
        tiles = [
            chunk[..., top // ratio : (top + height) // ratio, left // ratio : (left + width) // ratio]
            for top, height in zip(rows, row_sizes, strict=True)
            for left, width in zip(columns, column_sizes, strict=True)
        ]

        def stitch(decoded: list[torch.Tensor]) -> torch.Tensor:
            wide = len(columns)
            grid = [decoded[start : start + wide] for start in range(0, len(decoded), wide)]
            return vae._stitch_tiles(grid, row_overlaps, column_overlaps)

        return cls(tiles, stitch)


def latent_chunks(vae: Any, z: torch.Tensor) -> Iterator[torch.Tensor]:
    """The overlapping latent chunks ``_decode`` cuts ``z`` into, the last frame repeated to fill the last one."""
    size, dropped = vae.tokens_chunk_size, vae.config.token_drop
    tokens = z.shape[2] + dropped
    padding = -tokens % size
    if padding:
        z = torch.cat([z, z[:, :, -1:].repeat(1, 1, padding, 1, 1)], dim=2)
    for number in range((tokens + padding) // size - int(dropped > 0)):
        yield z[:, :, number * size : (number + 1) * size + vae.token_overlap]


@dataclass(frozen=True)
class _ReversedChunks(TileBatch):
    def clips(self, vae: Any, z: torch.Tensor) -> Iterator[torch.Tensor]:
        clips = list(super().clips(vae, z))
        return iter(clips[::-1])
