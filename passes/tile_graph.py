"""The video decoder's launches, recorded once for each shape of a batch of tiles and replayed for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.pass_api import Exact, Mutant, TilePass, register
from h3opt.pipeline.tiling.cuda_graphs import CudaGraphRunner
from h3opt.pipeline.tiling.strategies import TileModel, TileOptions


@register
@dataclass(frozen=True)
class TileGraph(TilePass):
    """The decoder is launched tile by tile from a recording, at the pace of the GPU and not of the host's Python.

    The kernels are those of the direct run, on the same operands in the same order. The memory that a recording works
    in stays reserved between decodes, as much as one batch needs. The model is called directly with gradients or
    autocast on, while anything observes the decoder's modules (hooks, offloading, a patched forward), and for
    encoding. On a CPU there is nothing to record.
    """

    name = "tile_graph"
    promise = Exact()
    happens_before = (
        "A batch's tiles are in the recording's input before it is replayed.",
        "A recording's result is copied out before the next replay.",
    )

    def tile_options(self, vae: Any) -> TileOptions:
        return TileOptions(batch_runner=self.batch_runner(vae))

    def batch_runner(self, vae: Any) -> CudaGraphRunner:
        """How batches go through the decoder."""
        return CudaGraphRunner(vae)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("a replay sees the tiles of the recording", _ReplayFirstTiles()),)


class _StaleInput(CudaGraphRunner):
    def run(self, model: TileModel, tiles: torch.Tensor, operation: str) -> torch.Tensor:
        recorded_run = self.recorded.get((tiles.shape, tiles.dtype, tiles.device))
        return super().run(model, tiles if recorded_run is None else recorded_run.input.clone(), operation)


@dataclass(frozen=True)
class _ReplayFirstTiles(TileGraph):
    def batch_runner(self, vae: Any) -> CudaGraphRunner:
        return _StaleInput(vae)
