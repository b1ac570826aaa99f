"""`audio_overlap`: which work comes first, and that nothing but the order changes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import build
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from h3opt import optimize
from h3opt.metrics.bits import bits_equal
from h3opt.passes.audio_overlap import AudioOverlap
from h3opt.pipeline.early_step import EarlyStep
from h3opt.pipeline.minimax_h3 import AUDIO_DECODE_STEP, VIDEO_DECODE_STEP
from h3opt.pipeline.steps import find_steps
from h3opt.pipeline.view import PipelineView


class Decoders:
    """The two decode steps of a pipeline whose VAEs are stand-ins that keep a diary."""

    def __init__(self) -> None:
        self.pipe = build()
        self.diary: list[str] = []
        self.pipe.vae.decode = self.decode("video", (1, 3, 5, 32, 32))
        self.pipe.audio_vae.decode = self.decode("audio", (2, 1, 8))

    def decode(self, kind: str, shape: tuple[int, ...]) -> Any:
        def call(latents: torch.Tensor, return_dict: bool = True) -> tuple[torch.Tensor]:
            self.diary.append(kind)
            if latents.isnan().any():
                raise FloatingPointError(f"no {kind}")
            return (latents.mean().expand(shape) / 4,)

        return call

    def state(self, seed: int = 0, **values: Any) -> PipelineState:
        generator = torch.Generator().manual_seed(seed)
        latents = torch.randn(1, 24, 2, 2, 2, generator=generator)
        audio = torch.randn(2, 32, 3, generator=generator)
        return PipelineState({"latents": latents, "audio_latents": audio, "output_type": "pt", **values})

    def run(self, state: PipelineState, between: Any = None) -> PipelineState:
        video, audio = find_steps(self.pipe, VIDEO_DECODE_STEP, AUDIO_DECODE_STEP)
        self.diary.clear()
        video(self.pipe, state)
        if between is not None:
            between(state)
        audio(self.pipe, state)
        return state


@pytest.fixture(scope="module")
def decoders() -> Decoders:
    return Decoders()


def same(left: PipelineState, right: PipelineState) -> bool:
    assert left.values.keys() == right.values.keys()
    assert left.get("sampling_rate") == right.get("sampling_rate") == 16_000
    return all(bool(bits_equal(left.get(name), right.get(name))) for name in ("videos", "audio"))


def test_sound_is_decoded_once_and_before_the_video(decoders: Decoders) -> None:
    expected = decoders.run(decoders.state())
    assert decoders.diary == ["video", "audio"]
    with optimize(decoders.pipe, ["audio_overlap"], profile="cpu") as opt:
        found = decoders.run(decoders.state())
        assert decoders.diary == ["audio", "video"]
        assert opt.report["audio_overlap"].matched == opt.report["audio_overlap"].expected == 1
    assert same(expected, found)
    decoders.run(decoders.state())
    assert decoders.diary == ["video", "audio"]


def replaced(state: PipelineState) -> None:
    state.set("audio_latents", state.get("audio_latents") + 1)


def written(state: PipelineState) -> None:
    state.get("audio_latents").add_(1)


@pytest.mark.parametrize("between", [replaced, written])
def test_latents_that_change_in_between_are_decoded_again(decoders: Decoders, between: Any) -> None:
    expected = decoders.run(decoders.state(), between)
    with optimize(decoders.pipe, ["audio_overlap"], profile="cpu"):
        found = decoders.run(decoders.state(), between)
    assert decoders.diary == ["audio", "video", "audio"]
    assert same(expected, found)


@pytest.mark.parametrize("broken", ["latents", "audio_latents"])
def test_a_decode_that_fails_says_so_and_the_next_generation_is_right(decoders: Decoders, broken: str) -> None:
    expected = decoders.run(decoders.state(seed=1))
    bad = decoders.state()
    bad.get(broken).fill_(torch.nan)
    with optimize(decoders.pipe, ["audio_overlap"], profile="cpu"):
        with pytest.raises(FloatingPointError, match="no audio" if "audio" in broken else "no video"):
            decoders.run(bad)
        assert same(expected, decoders.run(decoders.state(seed=1)))


def test_what_a_failed_generation_made_is_not_handed_to_a_lone_audio_step(decoders: Decoders) -> None:
    bad = decoders.state()
    bad.get("latents").fill_(torch.nan)
    with optimize(decoders.pipe, ["audio_overlap"], profile="cpu"):
        with pytest.raises(FloatingPointError):
            decoders.run(bad)
        decoders.diary.clear()
        find_steps(decoders.pipe, AUDIO_DECODE_STEP)[0](decoders.pipe, bad)
        assert decoders.diary == ["audio"]


def test_installed_twice_sound_is_still_decoded_once(decoders: Decoders) -> None:
    expected = decoders.run(decoders.state())
    optimize(decoders.pipe, ["audio_overlap"], profile="cpu")
    with optimize(decoders.pipe, ["deferred_sync", "audio_overlap", "timestep_plan"], profile="cpu"):
        found = decoders.run(decoders.state())
    assert decoders.diary == ["audio", "video"] and same(expected, found)


def test_a_bare_model_and_an_offloaded_one_decline(decoders: Decoders) -> None:
    with optimize(decoders.pipe.audio_vae, ["audio_overlap"], profile="cpu") as opt:
        assert "no pipeline" in opt.report["audio_overlap"].declined
    decoders.pipe.audio_vae._hf_hook = object()
    try:
        with optimize(decoders.pipe, ["audio_overlap"], profile="cpu") as opt:
            assert "offloading" in opt.report["audio_overlap"].declined
    finally:
        del decoders.pipe.audio_vae._hf_hook


def test_a_model_that_is_offloaded_later_decodes_in_its_turn(decoders: Decoders) -> None:
    with optimize(decoders.pipe, ["audio_overlap"], profile="cpu"):
        decoders.pipe.audio_vae._hf_hook = object()
        try:
            decoders.run(decoders.state())
        finally:
            del decoders.pipe.audio_vae._hf_hook
    assert decoders.diary == ["video", "audio"]


def test_restoring_joins_a_decode_that_nobody_took_over(stream_log: list[str], decoders: Decoders) -> None:
    early = EarlyStep(None, "audio_latents")
    early.stream = torch.cuda.Stream(torch.device("cuda", 0))
    one = _Given(given=early)
    with ExitStack() as undo:
        assert one.install(PipelineView.of(decoders.pipe), undo) == 1
        assert stream_log == []
    assert stream_log == ["compute waits for side"]


@dataclass(frozen=True)
class _Given(AudioOverlap):
    given: Any = None

    def early_step(self, audio_step: Any) -> EarlyStep:
        return self.given
