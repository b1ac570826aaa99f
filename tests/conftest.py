"""Pipelines and generations that many tests share: building one is quick, generating and capturing are not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import settings

from h3opt.compiler.optimize import Optimized
from h3opt.metrics.bits import bits_equal
from h3opt.pipeline.generation import GenerationSettings, Media, generate
from h3opt.reference import tiny_pipeline

settings.register_profile("h3opt", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("h3opt")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COMPONENTS = ("transformer", "vae", "audio_vae")


def build(dtype: str = "float32") -> Any:
    """A new tiny pipeline without progress bars."""
    pipe = tiny_pipeline(DTYPES[dtype])
    pipe.set_progress_bar_config(disable=True)
    return pipe


def installed(handle: Optimized) -> bool:
    """Whether the passes of a handle are installed on the pipeline."""
    return handle._session.installed


def assert_same_media(left: Media, right: Media) -> None:
    for kind in ("video", "audio"):
        comparison = bits_equal(getattr(left, kind), getattr(right, kind))
        assert comparison, f"{kind}: {comparison}"


def fingerprint(pipe: Any) -> dict[Any, Any]:
    """Everything that a pass may change: modules, their attributes, compiled calls, weights, pipeline steps."""
    parts: dict[Any, Any] = {}
    for name in COMPONENTS:
        component = getattr(pipe, name)
        for path, module in component.named_modules():
            # torch leaves an empty slot behind
            attributes = sorted(set(vars(module)) - {"_compiled_call_impl"})
            hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
            parts[name, path] = (type(module), id(module), module._compiled_call_impl, attributes, hooks)
        for key, tensor in component.state_dict().items():
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            parts[name, "weight", key] = (tensor.dtype, tuple(tensor.shape), hashlib.sha256(data).hexdigest())
    for number, step in enumerate(_steps(pipe._blocks)):
        parts["step", number] = type(step)
    return parts


def differing(before: dict[Any, Any], after: dict[Any, Any]) -> list[Any]:
    """The parts of two fingerprints that differ."""
    return [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]


def _steps(block: Any) -> Iterator[Any]:
    yield block
    for inner in getattr(block, "sub_blocks", {}).values():
        yield from _steps(inner)


class Stream:
    """Stands in for a CUDA stream, and logs the calls."""

    def __init__(self, log: list[str], name: str, device: Any = None) -> None:
        self.log, self.name, self.device, self.events = log, name, device, 0

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self, event: str | None = None) -> str:
        self.events += event is None
        if event is not None:
            self.log.append(f"{self.name} records {event}")
        return event or f"{self.name} {self.events}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def stream_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log of two streams: the current stream and the stream of a pass."""
    log: list[str] = []
    compute = Stream(log, "compute")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log, "side", device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return log


class SharedPipelines:
    """A pipeline for each dtype, and what it generates unmodified."""

    def __init__(self) -> None:
        self._pipes: dict[str, Any] = {}
        self._prints: dict[str, dict[Any, Any]] = {}
        self._media: dict[Any, Media] = {}

    def pipe(self, dtype: str) -> Any:
        if dtype not in self._pipes:
            self._pipes[dtype] = build(dtype)
            self._prints[dtype] = fingerprint(self._pipes[dtype])
        return self._pipes[dtype]

    def unmodified(self, dtype: str = "float32", clip: GenerationSettings | None = None) -> Media:
        """What a new pipeline generates."""
        key = (dtype, clip)
        if key not in self._media:
            self._media[key] = generate(build(dtype), clip or GenerationSettings())
        return self._media[key]

    def changed(self, dtype: str) -> list[Any]:
        return differing(self._prints[dtype], fingerprint(self._pipes[dtype])) if dtype in self._pipes else []

    def forget(self, dtype: str) -> None:
        self._pipes.pop(dtype, None)


@pytest.fixture(scope="session")
def shared() -> SharedPipelines:
    return SharedPipelines()


def _lend(shared: SharedPipelines, dtype: str) -> Iterator[Any]:
    yield shared.pipe(dtype)
    left = shared.changed(dtype)
    if left:
        shared.forget(dtype)
    assert not left, f"the test left the shared pipeline modified: {left[:5]}"


@pytest.fixture
def pipe(shared: SharedPipelines) -> Iterator[Any]:
    """The shared float32 pipeline; a test must leave it unmodified."""
    yield from _lend(shared, "float32")


@pytest.fixture
def bf16_pipe(shared: SharedPipelines) -> Iterator[Any]:
    """The shared bfloat16 pipeline; a test must leave it unmodified."""
    yield from _lend(shared, "bfloat16")


@pytest.fixture
def unmodified(shared: SharedPipelines) -> Callable[..., Media]:
    """``unmodified(dtype, settings)``: what the unmodified pipeline generates."""
    return shared.unmodified


@pytest.fixture
def silent(pipe: Any) -> Iterator[Any]:
    """The shared float32 pipeline without sound, which takes most of the time of a tiny generation."""
    pipe.audio_vae.decode = lambda latents, *args, **kwargs: (latents.new_zeros(2, 1, 8),)
    yield pipe
    del pipe.audio_vae.decode
