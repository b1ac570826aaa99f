"""One generation: settings, the call, video and sound."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline

from h3opt.errors import CheckpointError
from h3opt.reference import WeightsError, trained_pipeline


@dataclass(frozen=True)
class GenerationSettings:
    """What to generate.

    Attributes:
        prompt: the text.
        height, width: pixels, multiples of 32.
        num_frames: ``17 n + 5`` and at least 124, at 24 frames a second.
        num_inference_steps: points of the schedule; the transformer runs once less.
        seed: of the initial noise, drawn on the CPU so that it is the same on every device.
    """

    prompt: str = "a red circle moves right over grey, a low hum"
    height: int = 64
    width: int = 96
    num_frames: int = 124
    num_inference_steps: int = 4
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types."""
        return asdict(self)


@dataclass(frozen=True)
class Media:
    """What one generation made.

    Attributes:
        video: ``[1, frames, 3, height, width]`` float32 in [0, 1].
        audio: ``[1, 2, samples]`` float32 in [-1, 1].
        sampling_rate: of the audio, in Hz.
    """

    video: torch.Tensor
    audio: torch.Tensor
    sampling_rate: int


def generate(pipe: Any, settings: GenerationSettings, **inputs: Any) -> Media:
    """Run ``pipe`` once.

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
        output=["videos", "audio", "sampling_rate"],
        **inputs,
    )
    return Media(out["videos"].cpu(), out["audio"].cpu(), int(out["sampling_rate"]))


def reference_pipeline(dtype: torch.dtype, device: str | torch.device = "cpu") -> MiniMaxH3ModularPipeline:
    """The small trained pipeline that comes with h3opt; it draws what :mod:`h3opt.reference.scenes` describes.

    Raises:
        CheckpointError: its weights are missing or cannot be read.
    """
    try:
        return trained_pipeline(dtype=dtype, device=device)
    except WeightsError as error:
        raise CheckpointError(str(error)) from error
