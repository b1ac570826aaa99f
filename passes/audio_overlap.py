"""Sound decoded on a stream of its own while the video decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from h3opt.pass_api import Device, Exact, Mutant, PipelineView, SchedulePass, register
from h3opt.pipeline.staleness import is_unmodified, mutation_version

VIDEO, AUDIO = "MiniMaxH3VideoDecodeStep", "MiniMaxH3AudioDecodeStep"


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
        order = [type(step).__name__ for step in view.steps(VIDEO, AUDIO)]
        if order[:2] != [VIDEO, AUDIO]:
            return "there is no pipeline that decodes video and then audio"
        if _offloaded(view.audio_vae):
            return "the audio VAE is moved to the device for its own decode only (offloading)"
        return None

    def expect(self, view: PipelineView) -> int:
        return len(view.steps_making("audio"))

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        pairs = list(zip(view.steps(VIDEO), view.steps(AUDIO), strict=False))
        for video, audio in pairs:
            early = self.early(audio)
            undo.callback(early.join)
            view.around_step(video, early.launch, undo)
            view.around_step(audio, early.hand_over, undo)
        return len(pairs)

    def early(self, audio_step: Any) -> EarlyAudio:
        """What stands around the two steps."""
        return EarlyAudio(audio_step)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("a video gets the sound of the one before", _OneLate()),)


@dataclass
class Pending:
    """What the audio step has made ahead of its time, and from which latents."""

    latents: torch.Tensor
    since: int | torch.Tensor
    made: dict[str, Any]

    @property
    def outdated(self) -> bool:
        """Whether the latents have been written to since."""
        return not is_unmodified(self.latents, self.since)


@dataclass
class EarlyAudio:
    """Runs the audio step when the video step starts, and gives its result out when it is its turn."""

    audio_step: Any
    pending: Pending | None = None
    side: torch.cuda.Stream | None = None

    def launch(self, proceed: Any, components: Any, state: Any) -> Any:
        """Around the video step."""
        self.pending = None  # from here on, hand_over lets the audio step through
        latents = state.get("audio_latents")
        if latents is not None and not _offloaded(components.audio_vae):
            ahead = PipelineState(dict(state.values), state.kwargs_mapping)
            with self.aside(latents):
                self.audio_step(components, ahead)
            made = {name: value for name, value in ahead.values.items() if value is not state.get(name)}
            self.pending = Pending(latents, mutation_version(latents), made)
        try:
            return proceed(components, state)
        except BaseException:
            self.pending = None
            self.join()
            raise

    def hand_over(self, proceed: Any, components: Any, state: Any) -> Any:
        """Around the audio step."""
        pending, self.pending = self.pending, None
        self.join()
        # a step between the two may have brought other latents, or written to these
        if pending is None or state.get("audio_latents") is not pending.latents or pending.outdated:
            return proceed(components, state)
        for value in pending.made.values():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(torch.cuda.current_stream(value.device))
        state.values.update(pending.made)
        return components, state

    @contextmanager
    def aside(self, latents: torch.Tensor) -> Iterator[None]:
        """Work in the body goes to the side stream, after all that the main stream was given so far."""
        if not latents.is_cuda:
            yield
            return
        if self.side is None or self.side.device != latents.device:
            self.side = torch.cuda.Stream(latents.device)
        self.side.wait_stream(torch.cuda.current_stream(latents.device))
        latents.record_stream(self.side)
        try:
            with torch.cuda.stream(self.side):
                yield
        except BaseException:
            self.join()
            raise

    def join(self) -> None:
        """The main stream waits for the side stream; the host does not."""
        if self.side is not None:
            torch.cuda.current_stream(self.side.device).wait_stream(self.side)


def _offloaded(model: Any) -> bool:
    """Whether weights come to the device for a call and leave it after, which a side stream would not wait for."""
    return getattr(model, "_hf_hook", None) is not None


class _Previous(EarlyAudio):
    last: Pending | None = None

    def hand_over(self, proceed: Any, components: Any, state: Any) -> Any:
        if self.pending is not None:  # not the step's own run ahead of time
            before, self.last = self.last, self.pending
            self.pending = Pending(self.last.latents, self.last.since, (before or self.last).made)
        return super().hand_over(proceed, components, state)


@dataclass(frozen=True)
class _OneLate(AudioOverlap):
    def early(self, audio_step: Any) -> EarlyAudio:
        return _Previous(audio_step)
