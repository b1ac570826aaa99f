"""Runs of the video decoder that are recorded as CUDA graphs and replayed on other tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from h3opt.errors import DeviceError
from h3opt.pipeline import minimax_h3
from h3opt.pipeline.graph_calls import record_graph_calls
from h3opt.pipeline.hooks import is_observed
from h3opt.pipeline.tiling.strategies import BatchRunner, TileModel


class CudaGraphRunner(BatchRunner):
    """Runs a shape directly when it is new, records it the second time, and replays it from then on.

    Attributes:
        recorded: shape, dtype and device of a batch → the recorded run; ``None`` after the first, direct run.
    """

    retained_batches = 2  # a decode has batches of at most two sizes; runs recorded for another canvas are dropped

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.recorded: dict[Any, RecordedRun | None] = {}
        self._recorded_state: Any = None
        self._streams: dict[torch.device, SharedGraphStream] = {}

    def __reduce__(self) -> Any:
        return type(self), (self.vae,)  # a copy of the VAE records for itself

    def run(self, model: TileModel, tiles: torch.Tensor, operation: str) -> torch.Tensor:
        modules = minimax_h3.modules_of_decoding(self.vae)
        if operation != "decode" or not _may_record(modules, tiles):
            return model(tiles)
        if self._recorded_state != (state := _execution_state(modules)):
            self.release()
            self._recorded_state = state
        key = tiles.shape, tiles.dtype, tiles.device
        if key not in self.recorded:  # compiling, probing and tuning in the first run cannot be recorded
            finished = model(tiles)
            self.recorded[key] = None
            for oldest in list(self.recorded)[: -self.retained_batches]:
                del self.recorded[oldest]
            return finished
        if (recorded_run := self.recorded[key]) is None:
            recorded_run = self.recorded[key] = self.record(model, tiles)
        return recorded_run.replay(tiles)

    def record(self, model: TileModel, tiles: torch.Tensor) -> RecordedRun:
        """Record a run. CUDA graphs share their memory: each result is copied out before another graph runs."""
        if tiles.device.type != "cuda":
            return RecordedRun(model, tiles)
        if tiles.device not in self._streams:
            self._streams[tiles.device] = SharedGraphStream(tiles.device)
        graphs = [run.graph for run in self.recorded.values() if isinstance(run, CudaGraphRun)]
        pool = graphs[0].pool() if graphs else torch.cuda.graph_pool_handle()
        return CudaGraphRun(model, tiles, pool, self._streams[tiles.device])

    def release(self) -> None:
        self.recorded.clear()


class RecordedRun:
    """A run of the decoder that can be replayed on other tiles. On a CPU: a direct run from a fixed input buffer."""

    def __init__(self, model: TileModel, tiles: torch.Tensor) -> None:
        self.model, self.input = model, tiles.clone()

    def replay(self, tiles: torch.Tensor) -> torch.Tensor:
        """Return ``model(tiles)`` in memory of its own."""
        self.input.copy_(tiles)
        return self.model(self.input)


class SharedGraphStream:
    """The stream on which all graphs of a device are recorded, and the end of the last replay.

    The graphs share memory, so a replay waits for the end of the replay before it.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream, self.last_replay = torch.cuda.Stream(device), torch.cuda.Event()


class CudaGraphRun(RecordedRun):
    """A CUDA graph: one launch instead of hundreds, of the same kernels on the same weights."""

    def __init__(self, model: TileModel, tiles: torch.Tensor, pool: Any, shared: SharedGraphStream) -> None:
        super().__init__(model, tiles)
        self.graph, self.shared = torch.cuda.CUDAGraph(), shared
        generator = torch.cuda.default_generators[shared.stream.device.index]
        random_state = generator.clone_state()
        # Other threads may allocate while this thread records.
        recording = torch.cuda.graph(self.graph, pool, shared.stream, capture_error_mode="thread_local")
        try:  # the outer stream context makes the tiles' device current, and restores both after an error too
            with record_graph_calls() as self._graph_calls, torch.cuda.stream(shared.stream), recording:
                self.output = model(self.input)
        except RuntimeError as error:
            generator.graphsafe_set_state(
                random_state
            )  # the current state stays marked as recorded: no draw would work
            why = str(error).partition("\n")[0].rstrip(".")
            raise DeviceError(
                f"The video decoder cannot be recorded as a CUDA graph: {why}. Turn off the pass that records it."
            ) from error
        self._count_graph_calls(-1)  # recording called the captured graphs and ran nothing

    def replay(self, tiles: torch.Tensor) -> torch.Tensor:
        stream = torch.cuda.current_stream(tiles.device)
        stream.wait_event(self.shared.last_replay)  # which may have run on another stream
        self.input.copy_(tiles)
        self.graph.replay()
        self._count_graph_calls(1)
        output = self.output.clone()
        stream.record_event(self.shared.last_replay)
        return output

    def _count_graph_calls(self, runs: int) -> None:
        """Correct the call counts of captured graphs, which run here without being called."""
        for captured in self._graph_calls:
            captured.calls += runs


def _may_record(modules: Sequence[torch.nn.Module], tiles: torch.Tensor) -> bool:
    """Return whether a recorded run would do all that a direct run does."""
    if torch.is_grad_enabled() or any(map(is_observed, modules)):
        return False
    if torch.is_autocast_enabled(tiles.device.type):  # autocast frees the casts that it caches; a graph would use them
        return False
    return not (tiles.is_cuda and torch.cuda.is_current_stream_capturing())


def _execution_state(modules: Sequence[torch.nn.Module]) -> tuple[Any, ...]:
    """Return what a recorded run depends on: where weights are, which modules run, and the settings of arithmetic."""
    tensors = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]
    addresses = tuple(tensor.data_ptr() for tensor in tensors if tensor is not None)
    processors = [processor for module in modules if (processor := module.__dict__.get("processor")) is not None]
    attention = tuple((id(processor), getattr(processor, "_attention_backend", None)) for processor in processors)
    settings = (
        torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )
    return (*settings, tuple(map(id, modules)), attention, addresses)
