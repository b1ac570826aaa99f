"""Sound decoded on a stream of its own while the video decodes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from h3opt.pass_api import Device, Exact, Mutant, PipelineView, SchedulePass, register
from h3opt.pipeline.early_step import EarlyResult, EarlyStep
from h3opt.pipeline.minimax_h3 import AUDIO, AUDIO_DECODE_STEP, LATENTS, VIDEO_DECODE_STEP
from h3opt.pipeline.steps import find_steps, find_steps_making, wrap_step


@register
@dataclass(frozen=True)
class AudioOverlap(SchedulePass):
    """Sound, a chain of small kernels, decodes beside the video, whose GEMMs it hides behind; diffusers runs it last.

    On a CPU there are no streams: sound is decoded before the video, with the same bits.
    """

    name = "audio_overlap"
    promise = Exact()
    happens_before = (
        "All that the main stream was given before video decoding is done before audio decoding starts.",
        "Audio decoding is done before anything that the main stream is given after the audio step.",
        "When either decode fails, the main stream waits for the side stream before the error goes on.",
    )

    def applies(self, device: Device, view: PipelineView) -> str | None:
        order = [type(step).__name__ for step in find_steps(view.pipe, VIDEO_DECODE_STEP, AUDIO_DECODE_STEP)]
        if order[:2] != [VIDEO_DECODE_STEP, AUDIO_DECODE_STEP]:
            return "there is no pipeline that decodes video and then audio"
        if _is_offloaded(view.audio_vae):
            return "the audio VAE is moved to the device for its own decode only (offloading)"
        return None

    def expect(self, view: PipelineView) -> int:
        return len(find_steps_making(view.pipe, AUDIO))

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        video_steps, audio_steps = (find_steps(view.pipe, name) for name in (VIDEO_DECODE_STEP, AUDIO_DECODE_STEP))
        pairs = list(zip(video_steps, audio_steps, strict=False))
        for video_step, audio_step in pairs:
            early = self.early_step(audio_step)
            undo.callback(early.join)
            wrap_step(video_step, early.launch, undo)
            wrap_step(audio_step, early.hand_over, undo)
        return len(pairs)

    def early_step(self, audio_step: Any) -> EarlyStep:
        """The audio step, to run when the video step starts."""
        return EarlyStep(audio_step, LATENTS["audio"], _may_run_early)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("a video gets the sound of the video before", _PreviousSound()),)


def _may_run_early(components: Any) -> bool:
    return not _is_offloaded(components.audio_vae)


def _is_offloaded(model: Any) -> bool:
    """Return whether weights come to the device for a call and leave it after, which a side stream would not see."""
    return getattr(model, "_hf_hook", None) is not None


class _PreviousResult(EarlyStep):
    previous: EarlyResult | None = None

    def hand_over(self, proceed: Any, components: Any, state: Any) -> Any:
        if self.pending is not None:  # not the step's own run ahead of time
            previous, self.previous = self.previous, self.pending
            values = (previous or self.pending).values
            self.pending = EarlyResult(self.pending.snapshot, values)
        return super().hand_over(proceed, components, state)


@dataclass(frozen=True)
class _PreviousSound(AudioOverlap):
    def early_step(self, audio_step: Any) -> EarlyStep:
        return _PreviousResult(audio_step, LATENTS["audio"], _may_run_early)
