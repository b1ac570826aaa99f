"""Run a MiniMax-H3 pipeline from a prompt, and load one from disk the way diffusers does."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import ModularPipeline

from h3opt.errors import CheckpointError, PipelineError


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

    prompt: str = "A red fox runs through snow."
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


def load_pipeline(
    directory: str | os.PathLike[str], dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> ModularPipeline:
    """``ModularPipeline.from_pretrained`` and ``load_components(torch_dtype=dtype)`` on ``device``.

    Modules the model keeps in float32 stay float32. Only safetensors are read.

    Raises:
        CheckpointError: the directory is missing, is not a modular pipeline, or its weights cannot be read.
        PipelineError: a component is missing from it.
    """
    directory = Path(directory)
    if not (directory / "modular_model_index.json").is_file() and not (directory / "model_index.json").is_file():
        raise CheckpointError(
            f"{directory} holds no modular_model_index.json. Give a directory that diffusers' save_pretrained wrote."
        )
    try:
        pipe = ModularPipeline.from_pretrained(str(directory), local_files_only=True)
        pipe.load_components(torch_dtype=dtype, use_safetensors=True)
    except Exception as error:  # diffusers, transformers, safetensors and json each raise their own kinds
        raise CheckpointError(
            f"{directory} cannot be loaded: {_first_line(error)} Save the pipeline again, or mend the file named."
        ) from error
    missing = [name for name, component in pipe.components.items() if component is None and _is_needed(name)]
    if missing:
        raise PipelineError(
            f"{directory} has no {', '.join(missing)}. Save the pipeline with all components, in the place it is "
            "loaded from: diffusers records absolute paths."
        )
    return pipe.to(device)


def _is_needed(name: str) -> bool:
    """``transformer_ref`` serves reference-to-video runs alone."""
    return name in {
        "text_encoder",
        "tokenizer",
        "transformer",
        "vae",
        "audio_vae",
        "scheduler",
        "audio_scheduler",
    }


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or repr(error)
    line = text.splitlines()[0]
    return line if line.endswith(".") else line + "."
