"""Draw the pictures of a comparison as PNG: charts by matplotlib, frames and heat maps."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from h3opt.errors import MissingDependencyError
from h3opt.metrics.audio import spectrogram_db
from h3opt.metrics.video import frames_of
from h3opt.verification.latents import LatentTrace
from h3opt.verification.noise_floors import Floor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_LEAST_DB = -100.0
_LINES: tuple[dict[str, Any], ...] = (
    {"color": "#0b3c5d"},
    {"color": "#b3541e", "linestyle": "--"},
)  # distinguishable in grey too


def check_figures() -> None:
    """Check before the work that figures can be drawn after it.

    Raises:
        MissingDependencyError: matplotlib or Pillow is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"The report page needs matplotlib and Pillow ({error}). Run pip install 'h3opt[report]'."
        ) from error


def lpips_chart(per_frame: Sequence[float], floors: Sequence[Floor] = ()) -> bytes:
    """Draw LPIPS per frame over the noise floor as a band, with a labelled line for every other floor.

    Args:
        per_frame: LPIPS of each frame.
        floors: the measured floors; a line far above the frames appears in the legend only.
    """

    def draw(axes: Any) -> None:
        measured = {floor.name: floor for floor in floors if floor.difference is not None}
        finite = [value for value in per_frame if math.isfinite(value)]
        band = measured.pop("ulp").difference if "ulp" in measured else None
        if band is not None:
            worst, mean = band.worst_frame_lpips, band.lpips
            axes.axhspan(0, worst, color="#c8d5dd", label=f"noise floor, worst frame {worst:.2g}")
            axes.axhspan(0, mean, color="#9fb6c3", label=f"noise floor, mean {mean:.2g}")
            finite.append(worst)
        for floor, style in zip(measured.values(), ("-.", ":", "--", (0, (1, 4))), strict=False):
            mean = floor.difference.lpips if floor.difference is not None else 0.0
            label = f"{floor.label}, mean {mean:.2g}"
            if mean > 4 * max(finite, default=0.0):  # a ceiling would flatten the curve
                axes.plot([], [], " ", label=f"{label} (above)")
                continue
            axes.axhline(mean, color="#555555", linestyle=style, linewidth=1, label=label)
        axes.plot(per_frame, label="optimized", **_LINES[0])
        axes.set(xlabel="frame", ylabel="LPIPS to the unmodified clip", xlim=(0, max(len(per_frame) - 1, 1)))
        axes.set_ylim(bottom=0)
        axes.legend(loc="best", fontsize=8)

    return _chart(draw)


def waveforms(reference: torch.Tensor, candidate: torch.Tensor, sampling_rate: int) -> bytes:
    """Draw the sound of both clips ``[1, channels, samples]`` and the difference, a row for each channel."""
    left, right = (audio.detach().cpu().float().flatten(0, -2) for audio in (reference, candidate))
    figure, rows = _subplots(len(left), 1, 1.8)
    seconds = torch.arange(left.shape[-1]) / sampling_rate
    step = max(1, left.shape[-1] // 4000)  # more points than pixels add nothing
    for number, axes in enumerate(rows):
        for name, wave, line in (("unmodified", left, _LINES[0]), ("optimized", right, _LINES[1])):
            axes.plot(seconds[::step], wave[number][::step], label=name, linewidth=0.7, **line)
        difference = (right - left)[number][::step]
        axes.plot(seconds[::step], difference, label="difference", linewidth=0.7, color="#555555", linestyle=":")
        axes.set(ylabel=_channel(number, len(left)), xlim=(0, float(seconds[-1]) or 1.0))
    rows[0].legend(loc="upper right", fontsize=8, ncols=3)
    rows[-1].set_xlabel("seconds")
    return _png(figure)


def spectrograms(reference: torch.Tensor, candidate: torch.Tensor, sampling_rate: int) -> bytes:
    """Draw spectrograms of the sound of both clips ``[1, channels, samples]``, a row for each channel."""
    clips = [audio.detach().cpu().flatten(0, -2) for audio in (reference, candidate)]
    figure, rows = _subplots(len(clips[0]), 2, 2.2)
    extent = (0.0, clips[0].shape[-1] / sampling_rate, 0.0, sampling_rate / 2000)
    for number, pair in enumerate(rows):
        for name, clip, axes in zip(("unmodified", "optimized"), clips, pair, strict=True):
            picture = spectrogram_db(clip[number]).nan_to_num(_LEAST_DB)
            axes.imshow(picture, origin="lower", aspect="auto", extent=extent, vmin=_LEAST_DB, vmax=0, cmap="cividis")
            axes.set(title=f"{name}, {_channel(number, len(rows))}", ylabel="kHz", xlabel="seconds")
    return _png(figure)


def latent_chart(reference: LatentTrace, candidate: LatentTrace) -> bytes:
    """Draw the change of video and audio latents by every denoising step, as root mean squares, for both clips."""
    figure, rows = _subplots(1, 2, 2.2)
    for stream, axes in zip(("video", "audio"), rows[0], strict=True):
        for name, trace, line in (("unmodified", reference, _LINES[0]), ("optimized", candidate, _LINES[1])):
            steps = range(1, len(trace.steps) + 1)
            axes.plot(steps, [step[f"{stream}_motion"] for step in trace.steps], marker="o", label=name, **line)
        axes.set(title=f"{stream} latents", xlabel="step", ylabel="change", xticks=steps)
    rows[0][0].legend(fontsize=8)
    return _png(figure)


def seam_chart(
    unmodified: torch.Tensor,
    candidate: torch.Tensor,
    unmodified_borders: tuple[Sequence[int], Sequence[int]],
    candidate_borders: tuple[Sequence[int], Sequence[int]],
    name: str,
    seams: tuple[float, float],
) -> bytes:
    """Draw two frames with their tile borders, and where they differ.

    Args:
        unmodified, candidate: frames ``[3, height, width]`` in [0, 1].
        unmodified_borders, candidate_borders: rows and columns at which blending begins and ends.
        name: name of the pass that made the candidate.
        seams: visibility of the seams in both frames, for the titles.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 10 * unmodified.shape[1] / unmodified.shape[2]), layout="constrained")
    axes = figure.subplots(2, 2)
    pair = ((unmodified, unmodified_borders, "unmodified"), (candidate, candidate_borders, name))
    for panel, (frame, (rows, columns), title), seam in zip(axes[0], pair, seams, strict=True):
        panel.imshow(frame.permute(1, 2, 0).numpy())
        for row in rows:
            panel.axhline(row - 0.5, color="white", linewidth=0.5, linestyle="--")
        for column in columns:
            panel.axvline(column - 0.5, color="white", linewidth=0.5, linestyle="--")
        panel.set_title(f"{title}, tile borders; seam visibility {seam:.3f}", fontsize=9)
    axes[1][0].imshow(candidate.permute(1, 2, 0).numpy())
    axes[1][0].set_title(f"{name}, without lines", fontsize=9)
    difference = (candidate - unmodified).abs().amax(0)
    shown = axes[1][1].imshow(difference.numpy(), cmap="inferno", vmin=0, vmax=float(difference.max()) or 1.0)
    axes[1][1].set_title(f"difference, at most {float(difference.max()):.2g}", fontsize=9)
    figure.colorbar(shown, ax=axes[1][1], shrink=0.8)
    for panel in axes.flat:
        panel.set(xticks=[], yticks=[])
    return _png(figure)


def frame_png(frame: torch.Tensor, width: int) -> bytes:
    """Encode a frame ``[3, height, width]`` in [0, 1] as a picture no wider than ``width``; NaN is magenta."""
    pixels = frame.detach().cpu().float()
    missing = pixels.isnan().any(0)
    pixels = torch.where(missing, torch.tensor([1.0, 0.0, 1.0]).view(3, 1, 1), pixels.nan_to_num(0.0).clamp(0, 1))
    return _image(pixels.mul(255).round().to(torch.uint8).permute(1, 2, 0), width)


def heat_png(reference: torch.Tensor, candidate: torch.Tensor, full: float, width: int) -> bytes:
    """Draw where two frames ``[3, height, width]`` differ: black for equal, yellow for a difference of ``full``."""
    from matplotlib import colormaps

    difference = (candidate.float() - reference.float()).abs().amax(0).cpu().nan_to_num(full)
    shaded = colormaps["inferno"]((difference / full).clamp(0, 1).numpy())
    return _image(torch.from_numpy(shaded[..., :3]).mul(255).round().to(torch.uint8), width)


def largest_difference(reference: torch.Tensor, candidate: torch.Tensor, frames: Sequence[int]) -> float:
    """The largest difference of a channel in the given frames, for the scale of heat maps; 1 for equal frames."""
    left, right = frames_of(reference), frames_of(candidate)
    return max(float((right[n].float() - left[n].float()).abs().nan_to_num(0.0).max()) for n in frames) or 1.0


def _chart(draw: Callable[[Any], None]) -> bytes:
    figure, rows = _subplots(1, 1, 2.6)
    draw(rows[0])
    return _png(figure)


def _subplots(rows: int, columns: int, height: float) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure  # not pyplot: no window system, no global state

    figure = Figure(figsize=(8, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, axes if columns > 1 else axes[:, 0]


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _image(pixels: torch.Tensor, width: int) -> bytes:
    from PIL import Image

    image = Image.fromarray(pixels.contiguous().numpy())
    if image.width > width:
        image = image.resize((width, max(1, round(image.height * width / image.width))), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _channel(number: int, of: int) -> str:
    return ("left", "right")[number] if of == 2 else f"channel {number}"
