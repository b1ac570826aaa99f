"""The video decoder's launches, recorded once for each shape of a batch of tiles and replayed for the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.pass_api import Device, Exact, Mutant, PipelineView, SchedulePass, register
from h3opt.pipeline.tiling.cuda_graphs import CudaGraphRunner, Model
from h3opt.pipeline.tiling.scheduler import schedule_tiles
from h3opt.pipeline.tiling.strategies import TileOptions


@register
@dataclass(frozen=True)
class TileGraph(SchedulePass):
    """The decoder is launched tile by tile from a recording, at the pace of the GPU and not of the host's Python.

    The kernels are those of the direct run, on the same operands in the same order. What a recording works in stays
    reserved between decodes, as much as one batch needs. With gradients or autocast on, while anything listens to the
    decoder's modules (hooks, offloading, a patched forward), and for encoding, the model is called as ever. On a CPU
    there is nothing to record.
    """

    name = "tile_graph"
    promise = Exact()
    happens_before = (
        "A batch's tiles are in the recording's input before it is replayed.",
        "A recording's result is copied out before the next replay.",
    )

    def applies(self, device: Device, view: PipelineView) -> str | None:
        return None if view.vae is not None else "there is no video VAE"

    def expect(self, view: PipelineView) -> int:
        return 1

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        calls = self.calls(view.vae)
        undo.callback(calls.forget)
        schedule_tiles(view.vae, TileOptions(calls=calls), undo)
        return 1

    def calls(self, vae: Any) -> CudaGraphRunner:
        """How the decoder is run."""
        return CudaGraphRunner(vae)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("a replay sees the tiles of the recording", _Stuck()),)


class _FirstTiles(CudaGraphRunner):
    def run(self, model: Model, tiles: torch.Tensor, what: str) -> torch.Tensor:
        recording = self.known.get((tiles.shape, tiles.dtype, tiles.device))
        return super().run(model, tiles if recording is None else recording.given.clone(), what)


@dataclass(frozen=True)
class _Stuck(TileGraph):
    def calls(self, vae: Any) -> CudaGraphRunner:
        return _FirstTiles(vae)
