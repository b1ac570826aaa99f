"""Write generated clips: mp4 with sound, and a strip of frames to compare videos by eye."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fractions import Fraction

import torch
from torch.nn import functional as F

from h3opt.errors import MissingDependencyError, PipelineError
from h3opt.files import atomic_write


def write_mp4(
    path: str | os.PathLike[str],
    video: torch.Tensor,
    audio: torch.Tensor,
    sampling_rate: int,
    fps: int = 24,
) -> None:
    """Write video and stereo sound as mp4: H.264 (yuv420p, near-lossless) and AAC.

    H.264 with yuv420p needs even sizes: an odd height or width is padded by repeating the last row or column.
    NaN is written as black and as silence.

    Args:
        path: the file; it appears whole or not at all.
        video: [1, frames, 3, height, width] or [frames, 3, height, width], floating point in [0, 1].
        audio: [1, 2, samples] or [2, samples], floating point in [-1, 1].
        sampling_rate: samples per second of the audio.
        fps: frames per second.

    Raises:
        PipelineError: when the tensors have other shapes, or the file cannot be written.
        MissingDependencyError: when PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise MissingDependencyError(f"writing mp4 needs PyAV ({error}); pip install av") from error
    frames = _frames(video)
    frames = F.pad(frames, (0, frames.shape[-1] % 2, 0, frames.shape[-2] % 2), mode="replicate")
    pixels = _to_pixels(frames)
    samples = _stereo(audio)

    with (
        atomic_write(path, av.error.FFmpegError) as partial,
        av.open(str(partial), "w", format="mp4") as container,
    ):
        picture = container.add_stream("libx264", rate=fps, options={"crf": "12"})
        picture.height, picture.width, picture.pix_fmt = *frames.shape[-2:], "yuv420p"
        sound = container.add_stream("aac", rate=sampling_rate, layout="stereo")
        written = 0
        for index, frame in enumerate(pixels):
            container.mux(picture.encode(av.VideoFrame.from_ndarray(frame.numpy(), format="rgb24")))
            # Sound and picture are interleaved, so that a player need not seek; the last frame takes the rest.
            end = round((index + 1) * sampling_rate / fps) if index + 1 < len(pixels) else samples.shape[-1]
            if end > written and written < samples.shape[-1]:
                block = av.AudioFrame.from_ndarray(samples[:, written:end].numpy(), format="fltp", layout="stereo")
                block.sample_rate, block.pts, block.time_base = (
                    sampling_rate,
                    written,
                    Fraction(1, sampling_rate),
                )
                container.mux(sound.encode(block))
                written = end
        container.mux(picture.encode())
        container.mux(sound.encode())


def write_frame_strip(
    path: str | os.PathLike[str],
    videos: Mapping[str, torch.Tensor],
    frames: int = 6,
    frame_width: int = 320,
) -> None:
    """Write a PNG with one row of evenly spaced frames for each video, its label above the row.

    Args:
        path: the file; it appears whole or not at all.
        videos: label → [1, frames, 3, height, width] or [frames, 3, height, width], floating point in [0, 1].
        frames: columns; a video with fewer frames repeats some.
        frame_width: wider frames are scaled down to this many pixels.

    Raises:
        PipelineError: when there is no video, a tensor has another shape, or the file cannot be written.
        MissingDependencyError: when Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise MissingDependencyError(f"writing a frame strip needs Pillow ({error}); pip install pillow") from error
    if not videos or frames < 1:
        raise PipelineError(f"a frame strip needs a video and a frame, got {len(videos)} and {frames}")

    gap, band = 4, 20
    rows = []
    for label, video in videos.items():
        picked = _frames(video)
        picked = picked[torch.linspace(0, picked.shape[0] - 1, frames).round().long()]
        images = [Image.fromarray(frame.numpy()) for frame in _to_pixels(picked)]
        width, height = images[0].size
        if width > frame_width:
            size = (frame_width, max(1, round(height * frame_width / width)))
            images = [image.resize(size, Image.Resampling.LANCZOS) for image in images]
        rows.append((label, images))

    width = max(gap + frames * (images[0].width + gap) for _, images in rows)
    height = sum(band + images[0].height + gap for _, images in rows)
    strip = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(strip)
    top = 0
    for label, images in rows:
        draw.text((gap, top + 2), label, fill="black", font=ImageFont.load_default(14))
        for column, image in enumerate(images):
            strip.paste(image, (gap + column * (image.width + gap), top + band))
        top += band + images[0].height + gap
    with atomic_write(path) as partial:
        strip.save(partial, format="PNG")


def _frames(video: torch.Tensor) -> torch.Tensor:
    """Check a video and return it as [frames, 3, height, width] float32 on the CPU."""
    frames = video[0] if video.ndim == 5 and video.shape[0] == 1 else video
    if frames.ndim != 4 or frames.shape[1] != 3 or frames.numel() == 0 or not frames.is_floating_point():
        raise PipelineError(
            "a video must be floating point [1, frames, 3, height, width] or [frames, 3, height, width], "
            f"got {video.dtype} {list(video.shape)}"
        )
    return frames.detach().to("cpu", torch.float32)


def _to_pixels(frames: torch.Tensor) -> torch.Tensor:
    """Convert frames [frames, 3, height, width] in [0, 1] to uint8 [frames, height, width, 3]."""
    levels = frames.nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
    return levels.permute(0, 2, 3, 1).contiguous()


def _stereo(audio: torch.Tensor) -> torch.Tensor:
    """Check stereo sound and return it as [2, samples] float32 in [-1, 1] on the CPU."""
    sound = audio[0] if audio.ndim == 3 and audio.shape[0] == 1 else audio
    if sound.ndim != 2 or sound.shape[0] != 2 or sound.shape[1] == 0 or not sound.is_floating_point():
        raise PipelineError(
            f"audio must be floating point [1, 2, samples] or [2, samples], got {audio.dtype} {list(audio.shape)}"
        )
    return sound.detach().to("cpu", torch.float32).nan_to_num(0.0).clamp(-1, 1).contiguous()
