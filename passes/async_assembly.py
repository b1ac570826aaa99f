"""Finished tiles become video on a side stream while the next tiles compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.pass_api import Device, Exact, Mutant, PipelineView, ReversedMergeQueue, SchedulePass, register
from h3opt.pipeline.tiling.scheduler import schedule_tiles
from h3opt.pipeline.tiling.strategies import MergeQueue, TileOptions


class SideStream(MergeQueue):
    """Merges on a CUDA stream of its own; on a device without streams, in place and in order.

    A finished tile's memory belongs to the stream that computes. It is held until that stream has been told to wait
    for the merge, one batch later: so the allocator may hand it out again at once. ``record_stream`` would leave the
    moment to the host, which runs far ahead of the device and would find no finished tile's memory free again.
    """

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}  # one each: every stream has a memory pool
        self.held: deque[tuple[torch.cuda.Event, Sequence[torch.Tensor]]] = deque()
        self.computing: torch.cuda.Stream | None = None

    def __reduce__(self) -> Any:
        return type(self), ()  # streams and events cannot be copied with a model

    def run(self, merge: Callable[[], Sequence[torch.Tensor]], device: torch.device) -> None:
        if device.type != "cuda":
            merge()
            return
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        side, self.computing = self.streams[device], torch.cuda.current_stream(device)
        side.wait_stream(self.computing)
        with torch.cuda.stream(side):
            read = merge()
        self.held.append((side.record_event(), read))
        while len(self.held) > 1:
            merged, _ = self.held[0]
            self.computing.wait_event(merged)
            self.held.popleft()

    def finish(self) -> None:
        for side in self.streams.values():
            if self.computing is not None:
                self.computing.wait_stream(side)
        self.held.clear()
        self.computing = None


@register
@dataclass(frozen=True)
class AsyncAssembly(SchedulePass):
    """Blending, cross-fading and copying a finished tile into the video overlaps the decoder's next tile.

    Every tile goes straight into one buffer of the video's size: nothing is concatenated at the end. On the CPU the
    same work runs in order. An error in the decoder or in merging reaches the caller; the streams join first.
    """

    name = "async_assembly"
    promise = Exact()
    happens_before = (
        "A tile is finished before it is merged; tiles are merged in their order.",
        "A tile is merged before the decoder computes in the memory it came in.",
        "Everything is merged before the video is returned or an error leaves the decode.",
    )

    def applies(self, device: Device, view: PipelineView) -> str | None:
        return None if view.vae is not None else "there is no video VAE"

    def expect(self, view: PipelineView) -> int:
        return 1

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        schedule_tiles(view.vae, TileOptions(lane=self.lane()), undo)
        return 1

    def lane(self) -> MergeQueue:
        """Where merging runs."""
        return SideStream()

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("tiles are merged last first", _LastFirst()),)


@dataclass(frozen=True)
class _LastFirst(AsyncAssembly):
    def lane(self) -> MergeQueue:
        return ReversedMergeQueue()
