"""Finished tiles become video on a side stream while the next tiles compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.pass_api import Exact, Mutant, ReversedMergeQueue, TilePass, register
from h3opt.pipeline.tiling.strategies import MergeQueue, TileOptions


class SideStreamQueue(MergeQueue):
    """Merges on a CUDA stream of its own; on a device without streams, at once and in order.

    The memory of a finished tile belongs to the stream that computes. The tile is held until that stream has been told
    to wait for the merge, one batch later, so that the allocator may use the memory again at once. ``record_stream``
    would leave the moment to the host, which runs far ahead of the device and would see no tile's memory free again.

    Attributes:
        streams: one side stream per device, for all decodes: every stream has a memory pool of its own.
        held: merges that the computing stream has not been told to wait for: the end of each, and what it reads.
        computing: the stream that computes; ``None`` between decodes.
    """

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
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
class AsyncAssembly(TilePass):
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

    def tile_options(self, vae: Any) -> TileOptions:
        return TileOptions(merge_queue=self.merge_queue())

    def merge_queue(self) -> MergeQueue:
        """Where merging runs."""
        return SideStreamQueue()

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("tiles are merged last first", _MergeLastFirst()),)


@dataclass(frozen=True)
class _MergeLastFirst(AsyncAssembly):
    def merge_queue(self) -> MergeQueue:
        return ReversedMergeQueue()
