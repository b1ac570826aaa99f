"""A step that runs ahead of its turn: the streams wait for each other, and errors leave nothing behind."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from h3opt.pipeline.early_step import EarlyStep


class OnGPU(torch.Tensor):
    """Latents that say they are on a GPU, and write down which stream keeps them."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    log: list[str]

    def record_stream(self, stream: Any) -> None:
        self.log.append(f"latents are kept for {stream.name}")


class TwoSteps:
    """Two stand-ins for the decode steps, which write down when the host starts them; sound runs ahead of its turn."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.fails = log, ""
        self.early = EarlyStep(self.audio, "audio_latents")
        latents = torch.zeros(2).as_subclass(OnGPU)
        latents.log = log
        self.state = PipelineState({"audio_latents": latents})
        self.components = SimpleNamespace(audio_vae=torch.nn.Identity())

    def audio(self, components: Any, state: PipelineState) -> Any:
        return self.step("audio", components, state)

    def step(self, kind: str, components: Any, state: PipelineState) -> Any:
        self.log.append(kind)
        if kind == self.fails:
            raise FloatingPointError(f"no {kind}")
        state.set({"audio": "audio", "video": "videos"}[kind], torch.ones(1).as_subclass(Made))
        return components, state

    def run(self) -> None:
        self.early.launch(partial(self.step, "video"), self.components, self.state)
        self.early.hand_over(partial(self.step, "audio"), self.components, self.state)


class Made(torch.Tensor):
    """What a step made on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        stream.log.append(f"sound is kept for {stream.name}")


BEGUN = ["side waits for compute", "latents are kept for side", "audio"]


def test_sound_waits_for_its_latents_and_whoever_reads_it_waits_for_the_sound(stream_log: list[str]) -> None:
    steps = TwoSteps(stream_log)
    steps.run()
    assert stream_log == [*BEGUN, "video", "compute waits for side", "sound is kept for compute"]
    assert isinstance(steps.state.get("audio"), torch.Tensor)
    stream_log.clear()
    steps.run()
    assert stream_log[0] == "side waits for compute" and "compute waits for side" in stream_log
    assert steps.early.stream is not None and steps.early.stream.name == "side"


@pytest.mark.parametrize("fails", ["audio", "video"])
def test_the_streams_join_before_an_error_goes_on(stream_log: list[str], fails: str) -> None:
    steps = TwoSteps(stream_log)
    steps.fails = fails
    with pytest.raises(FloatingPointError, match=f"no {fails}"):
        steps.run()
    assert stream_log == [*BEGUN, *(["video"] if fails == "video" else []), "compute waits for side"]
    steps.fails = ""
    stream_log.clear()
    steps.run()
    assert stream_log == [*BEGUN, "video", "compute waits for side", "sound is kept for compute"]
