"""The parts of the tile scheduler that passes exchange: tile size, batches, blending, and where merging runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.pipeline import minimax_h3

TileModel = Callable[[torch.Tensor], torch.Tensor]
"""The decoder or the encoder: a batch of tiles → the finished tiles."""


class Blender:
    """Blends neighbouring tiles as the video VAE does; writes the result over the later tile."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def own(self, tile: torch.Tensor) -> torch.Tensor:
        """Return a copy of a finished tile that may be written to: neighbours blend with the original."""
        return tile.clone()

    def blend(self, before: torch.Tensor, after: torch.Tensor, dim: int) -> None:
        """Overwrite ``after`` with the transition from ``before`` along ``dim``; both have the same shape."""
        after.copy_(minimax_h3.blend_tiles(self.vae, before, after, dim))


class MergeQueue:
    """Runs merges on the current stream, in the order in which they are submitted."""

    def run(self, merge: Callable[[], Sequence[torch.Tensor]], device: torch.device) -> None:
        """Submit ``merge``, which returns the tensors it read."""
        merge()

    def finish(self) -> None:
        """Flush: later work is ordered after all merges. Called at the end and after an error."""


class BatchRunner:
    """Runs a batch of tiles by calling the model.

    Attributes:
        retained_batches: finished batches kept in memory besides the batches being merged.
    """

    retained_batches = 0

    def run(self, model: TileModel, tiles: torch.Tensor, operation: str) -> torch.Tensor:
        """Return ``model(tiles)``; ``operation`` is ``"decode"`` or ``"encode"``."""
        return model(tiles)

    def release(self) -> None:
        """Free what is kept between decodes. Called when the pass that chose this runner is taken off."""


@dataclass(frozen=True)
class TileOptions:
    """What passes may choose; ``None`` leaves the choice to the model.

    Attributes:
        tile: ``(height, width, overlap)`` of a decoded tile, in pixels.
        max_tiles: most tiles to run as one batch.
        memory_budget: bytes that a decode or encode may add to weights and input; batches are made to fit.
        blender: makes the :class:`Blender` of one decode from the VAE.
        merge_queue: where merging runs.
        batch_runner: how batches go through the model.
    """

    tile: tuple[int, int, int] | None = None
    max_tiles: int | None = None
    memory_budget: int | None = None
    blender: Callable[[Any], Blender] | None = None
    merge_queue: MergeQueue | None = None
    batch_runner: BatchRunner | None = None


def combine_options(options: Iterable[TileOptions]) -> TileOptions:
    """Combine the options of several passes; a later choice replaces an earlier choice."""
    combined = TileOptions()
    for each in options:
        chosen = {
            field.name: value for field in dataclasses.fields(each) if (value := getattr(each, field.name)) is not None
        }
        combined = dataclasses.replace(combined, **chosen)
    return combined
