"""What passes may choose about tiles: size, batch, blending, where merging runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class Blender:
    """How one tile goes over into the next: ``vae._blend``, written over the pixels it changes."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def own(self, tile: torch.Tensor) -> torch.Tensor:
        """A copy of a finished tile that may be written to: its neighbours blend with the tile as it came."""
        return tile.clone()

    def blend(self, before: torch.Tensor, after: torch.Tensor, dim: int) -> None:
        """Go over from ``before`` to ``after`` along ``dim``, in place of ``after``; both have the same shape."""
        after.copy_(self.vae._blend(before, after, after.shape[dim], dim))


class MergeQueue:
    """Where merging runs: here, in order."""

    def run(self, merge: Callable[[], Sequence[torch.Tensor]], device: torch.device) -> None:
        """Do ``merge``, which returns the tensors it read."""
        merge()

    def finish(self) -> None:
        """Called once all has been handed over, or something failed: what comes now comes after every merge."""


class BatchRunner:
    """How a batch of tiles goes through the model: by calling it.

    Attributes:
        kept: finished batches that it keeps besides those being merged.
    """

    kept = 0

    def run(self, model: Callable[[torch.Tensor], torch.Tensor], tiles: torch.Tensor, what: str) -> torch.Tensor:
        """``model(tiles)``; ``what`` is ``"decode"`` or ``"encode"``."""
        return model(tiles)


@dataclass(frozen=True)
class TileOptions:
    """What passes may choose; ``None`` leaves it as the model has it.

    Attributes:
        tile: ``(height, width, overlap)`` of a decoded tile, in pixels.
        max_tiles: most tiles to run as one batch.
        memory_budget: bytes that a decode or encode may add to weights and input; batches are made to fit.
        blends: makes the :class:`Blender` of one decode.
        lane: where merging runs.
        calls: how batches go through the model.
    """

    tile: tuple[int, int, int] | None = None
    max_tiles: int | None = None
    memory_budget: int | None = None
    blends: Callable[[Any], Blender] | None = None
    lane: MergeQueue | None = None
    calls: BatchRunner | None = None

    def joined(self, other: TileOptions) -> TileOptions:
        """These, and those of ``other`` where it makes one."""
        made = {each.name: chosen for each in dataclasses.fields(other) if (chosen := getattr(other, each.name))}
        return dataclasses.replace(self, **made)
