"""Runs of the video decoder that are recorded as CUDA graphs, and repeated on other tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from h3opt.errors import DeviceError
from h3opt.pipeline.graph_calls import record_graph_calls
from h3opt.pipeline.hooks import observed
from h3opt.pipeline.tiling.strategies import BatchRunner

Model = Callable[[torch.Tensor], torch.Tensor]


_ATTENTION = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
)


class Recording:
    """A run of the decoder that can be repeated on other tiles. On a CPU: the run itself, from the same buffer."""

    def __init__(self, model: Model, tiles: torch.Tensor) -> None:
        self.model, self.given = model, tiles.clone()

    def replay(self, tiles: torch.Tensor) -> torch.Tensor:
        """What the decoder makes of ``tiles``, in memory of its own."""
        self.given.copy_(tiles)
        return self.model(self.given)


class SharedGraphStream:
    """What the graphs of a device take in turns, as they share memory: where they are recorded, and the last's end."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.over = torch.cuda.Stream(device), torch.cuda.Event()


class CudaRecording(Recording):
    """A CUDA graph: one launch instead of hundreds, of the same kernels on the same weights."""

    def __init__(self, model: Model, tiles: torch.Tensor, pool: Any, turns: SharedGraphStream) -> None:
        super().__init__(model, tiles)
        self.graph, self.turns = torch.cuda.CUDAGraph(), turns
        generator = torch.cuda.default_generators[turns.stream.device.index]
        random = generator.clone_state()
        # Other threads may allocate meanwhile: it is none of this recording's business.
        recording = torch.cuda.graph(self.graph, pool, turns.stream, capture_error_mode="thread_local")
        try:  # the outer stream makes the tiles' device current, and what was current comes back after an error too
            with record_graph_calls() as self.calls, torch.cuda.stream(turns.stream), recording:
                self.made = model(self.given)
        except RuntimeError as error:
            generator.graphsafe_set_state(random)  # the one it had is left marked as being recorded: no draw would work
            why = str(error).partition("\n")[0].rstrip(".")
            raise DeviceError(
                f"The video decoder cannot be recorded as a CUDA graph: {why}. Turn off the pass that records it."
            ) from error
        self.count(-1)  # nothing has run yet

    def replay(self, tiles: torch.Tensor) -> torch.Tensor:
        stream = torch.cuda.current_stream(tiles.device)
        stream.wait_event(self.turns.over)  # it may have run on another stream
        self.given.copy_(tiles)
        self.graph.replay()
        self.count(1)
        made = self.made.clone()
        stream.record_event(self.turns.over)
        return made

    def count(self, runs: int) -> None:
        """Captured graphs know how often they ran; here they run without being called."""
        for captured in self.calls:
            captured.calls += runs


class CudaGraphRunner(BatchRunner):
    """Runs a shape directly when it is new, records it the second time, and replays it from then on."""

    kept = 2  # the sizes a decode's batches have; those of another canvas make way

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.known: dict[Any, Recording | None] = {}
        self.made_with: Any = None
        self.turns: dict[torch.device, SharedGraphStream] = {}

    def __reduce__(self) -> Any:
        return type(self), (self.vae,)  # a copy makes recordings of its own

    def run(self, model: Model, tiles: torch.Tensor, what: str) -> torch.Tensor:
        # Casts that autocast keeps for its body alone must not get into a recording.
        modules = [self.vae, *self.vae.decoder.modules(), *self.vae.post_quant_conv.modules()]
        called = torch.is_grad_enabled() or torch.is_autocast_enabled(tiles.device.type) or any(map(observed, modules))
        called |= what != "decode" or (tiles.is_cuda and torch.cuda.is_current_stream_capturing())
        if called:
            return model(tiles)
        if self.made_with != (now := self.stamp(modules)):
            self.forget()
            self.made_with = now
        key = tiles.shape, tiles.dtype, tiles.device
        if key not in self.known:  # what is compiled, probed and tuned on the way cannot be recorded
            made = model(tiles)
            self.known[key] = None
            for oldest in list(self.known)[: -self.kept]:
                del self.known[oldest]
            return made
        if (recording := self.known[key]) is None:
            recording = self.known[key] = self.record(model, tiles)
        return recording.replay(tiles)

    def record(self, model: Model, tiles: torch.Tensor) -> Recording:
        """Graphs share their memory: each gives its result away before another runs."""
        if tiles.device.type != "cuda":
            return Recording(model, tiles)
        if tiles.device not in self.turns:
            self.turns[tiles.device] = SharedGraphStream(tiles.device)
        graphs = [one.graph for one in self.known.values() if isinstance(one, CudaRecording)]
        pool = graphs[0].pool() if graphs else torch.cuda.graph_pool_handle()
        return CudaRecording(model, tiles, pool, self.turns[tiles.device])

    def stamp(self, modules: Sequence[torch.nn.Module]) -> tuple[Any, ...]:
        """What a recording holds fast: where weights lie, which modules run, and how arithmetic is set."""
        held = [tensor for one in modules for tensor in (*one._parameters.values(), *one._buffers.values())]
        places = tuple(tensor.data_ptr() for tensor in held if tensor is not None)
        processors = [processor for one in modules if (processor := one.__dict__.get("processor")) is not None]
        chosen = tuple((id(one), getattr(one, "_attention_backend", None)) for one in processors)
        settings = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        kernels = (of() for of in _ATTENTION)
        return (torch.is_inference_mode_enabled(), *settings, *kernels, tuple(map(id, modules)), chosen, places)

    def forget(self) -> None:
        """Free all recordings."""
        self.known.clear()
