"""The video VAE's equal tiles, run as batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from h3opt.pass_api import Mutant, PipelineView, ReversedMergeQueue, Rounding, TilePass, register
from h3opt.pipeline.minimax_h3 import latent_channels
from h3opt.pipeline.tiling.plan import TilePlan, memory_bytes, plan_decode
from h3opt.pipeline.tiling.strategies import TileOptions


@register
@dataclass(frozen=True)
class TileBatch(TilePass):
    """The VAE runs equal tiles of one and of neighbouring chunks as a batch, so that its GEMMs fill the GPU.

    GEMM and convolution kernels are chosen by shape, so batching may change the order of a reduction: Rounding, not
    Exact. No distance in ulps bounds the effect on a pixel near zero; the noise floor bounds it.

    Options:
        max_tiles: most tiles in one call of the decoder or encoder.
        memory_budget: what a decode may add to weights and latents at its peak, its result included: bytes or a text
            such as ``"2GiB"``. Batches are made to fit; an estimate, see :mod:`h3opt.pipeline.tiling.plan`. A budget
            that one tile at a time does not fit into is a ``MemoryBudgetError`` when the size of the video is known.
    """

    max_tiles: int = 8
    memory_budget: int | str = "8GiB"

    name = "tile_batch"
    promise = Rounding(ulps=None)
    happens_before = (
        "All tiles of a batch are finished before the first of them is merged.",
        "Tiles are merged in their order, with the decoder's own arithmetic.",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.max_tiles, int) or isinstance(self.max_tiles, bool) or self.max_tiles < 1:
            raise ValueError(f"max_tiles must be a whole number of at least 1, got {self.max_tiles!r}")
        memory_bytes(self.memory_budget)

    def tile_options(self, vae: Any) -> TileOptions:
        return TileOptions(max_tiles=self.max_tiles, memory_budget=memory_bytes(self.memory_budget))

    def plan(self, view: PipelineView, latents: tuple[int, int, int]) -> TilePlan:
        return plan_decode(view.vae, (1, latent_channels(view.vae), *latents), [self.tile_options(view.vae)])

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("batches are merged last first", _MergeLastFirst(max_tiles=2)),)


@dataclass(frozen=True)
class _MergeLastFirst(TileBatch):
    def tile_options(self, vae: Any) -> TileOptions:
        return replace(super().tile_options(vae), merge_queue=ReversedMergeQueue())
