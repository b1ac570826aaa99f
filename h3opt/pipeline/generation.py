"""A generation: the settings, the call of the pipeline, and the video and sound that it returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from h3opt.errors import CheckpointError
from h3opt.pipeline.minimax_h3 import AUDIO, MIN_FRAMES, VIDEO
from h3opt.reference import WeightsError, trained_pipeline


@dataclass(frozen=True)
class GenerationSettings:
    """Inputs of one generation; :mod:`h3opt.pipeline.minimax_h3` has the limits.

    Attributes:
        prompt: a description of the video.
        height, width: in pixels, multiples of 32.
        num_frames: ``17 n + 5`` and at least 124, at 24 frames a second.
        num_inference_steps: points of the schedule; the transformer runs once less.
        seed: of the initial noise, which is drawn on the CPU and so is the same for every device.
    """

    prompt: str = "a red circle moves right over grey, a low hum"
    height: int = 64
    width: int = 96
    num_frames: int = MIN_FRAMES
    num_inference_steps: int = 4
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types."""
        return asdict(self)


@dataclass(frozen=True)
class Media:
    """The result of one generation.

    Attributes:
        video: ``[1, frames, 3, height, width]`` float32 in [0, 1].
        audio: ``[1, 2, samples]`` float32 in [-1, 1].
        sampling_rate: of the audio, in Hz.
    """

    video: torch.Tensor
    audio: torch.Tensor
    sampling_rate: int


def generate(pipe: Any, settings: GenerationSettings, **inputs: Any) -> Media:
    """Run ``pipe`` once; the result is on the CPU.

    Args:
        pipe: a MiniMax-H3 pipeline with all components loaded.
        settings: what to generate.
        inputs: further inputs of the pipeline, e.g. ``image``.
    """
    out = pipe(
        prompt=settings.prompt,
        height=settings.height,
        width=settings.width,
        num_frames=settings.num_frames,
        num_inference_steps=settings.num_inference_steps,
        generator=torch.Generator().manual_seed(settings.seed),
        output_type="pt",
        output=[VIDEO, AUDIO, "sampling_rate"],
        **inputs,
    )
    return Media(out[VIDEO].cpu(), out[AUDIO].cpu(), int(out["sampling_rate"]))


def reference_pipeline(dtype: torch.dtype, device: str | torch.device = "cpu") -> Any:
    """Build the small trained pipeline that comes with h3opt; it draws the scenes of :mod:`h3opt.reference.scenes`.

    Raises:
        CheckpointError: the weights are missing or cannot be read.
    """
    try:
        return trained_pipeline(dtype=dtype, device=device)
    except WeightsError as error:
        raise CheckpointError(str(error)) from error
