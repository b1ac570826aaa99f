"""Base of the passes that choose how the tiles of the video VAE are cut, run or merged."""

from __future__ import annotations

import abc
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from h3opt.device import Device
from h3opt.pass_api.base import SchedulePass
from h3opt.pipeline.tiling.scheduler import schedule_tiles
from h3opt.pipeline.tiling.strategies import TileOptions

if TYPE_CHECKING:
    from h3opt.pipeline.view import PipelineView


@dataclass(frozen=True)
class TilePass(SchedulePass):
    """Installs the tile scheduler with the options of :meth:`tile_options`."""

    @abc.abstractmethod
    def tile_options(self, vae: Any) -> TileOptions:
        """Return what this pass chooses for this video VAE; the options of all tile passes are combined."""

    def applies(self, device: Device, view: PipelineView) -> str | None:
        return None if view.vae is not None else "there is no video VAE"

    def expect(self, view: PipelineView) -> int:
        return 1

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        schedule_tiles(view.vae, self.tile_options(view.vae), undo)
        return 1
