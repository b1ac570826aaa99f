"""Measures of video: PSNR, SSIM, flicker, shift in time; frames, luma and pixels of a video."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from h3opt.errors import PipelineError
from h3opt.metrics.bits import paired_chunks, require_same

SSIM_WINDOW = 11
"""Side of the window of :func:`ssim_per_frame` in pixels; frames must be at least this high and wide."""

MAX_SHIFT_FRAMES = 6
"""The largest shift in time that is searched, in frames: a quarter of a second."""

_SIGMA, _K1, _K2 = 1.5, 0.01, 0.03  # the constants of Wang et al.
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601
_BATCH = 16  # frames at a time: float32 copies of two real clips would take gigabytes


def psnr_db(reference: torch.Tensor, candidate: torch.Tensor, peak: float = 1.0) -> float:
    """Compute the peak signal-to-noise ratio, 10 log10(peak² / mean squared error), in dB; infinite for equal tensors.

    Args:
        reference, candidate: floating point, of one shape and dtype.
        peak: the largest value that a sample can have.

    Raises:
        PipelineError: shapes or dtypes differ, or the tensors are empty.
    """
    require_same(reference, candidate)
    if reference.numel() == 0:
        raise PipelineError("the PSNR of empty tensors is not defined; pass at least one frame")
    squares = sum(
        (part_a.double() - part_b.double()).square().sum().item()
        for part_a, part_b in paired_chunks(reference, candidate)
    )
    mean = squares / reference.numel()
    return math.inf if mean == 0 else 10 * math.log10(peak**2 / mean)


def ssim_per_frame(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Compute the structural similarity of the luma of each frame: 1 for equal frames, 0 for unrelated frames.

    Wang et al., "Image Quality Assessment: From Error Visibility to Structural Similarity", IEEE TIP 2004: Gaussian
    window of 11 x 11 pixels and sigma 1.5, K1 = 0.01, K2 = 0.03, averaged over the windows that lie in the frame.

    Args:
        reference, candidate: ``[batch, frames, 3, height, width]`` or ``[frames, 3, height, width]``, floating point
            in [0, 1], at least 11 pixels high and wide.

    Returns:
        float64 ``[batch * frames]`` on the CPU; NaN for a frame that contains NaN.

    Raises:
        PipelineError: the shapes differ, or these are no videos of sufficient size.
    """
    if min(reference.shape[-2:]) < SSIM_WINDOW:
        raise PipelineError(
            f"SSIM needs frames of at least {SSIM_WINDOW}x{SSIM_WINDOW} pixels, got {list(reference.shape[-2:])}. "
            "Generate a larger video."
        )
    c1, c2 = _K1**2, _K2**2
    means = []
    for pair in _batches(reference, candidate):
        a, b = (luma(part).double()[:, None] for part in pair)
        mean_a, mean_b = _gaussian_means(a), _gaussian_means(b)
        variance_a = _gaussian_means(a * a) - mean_a**2
        variance_b = _gaussian_means(b * b) - mean_b**2
        covariance = _gaussian_means(a * b) - mean_a * mean_b
        similarity = ((2 * mean_a * mean_b + c1) * (2 * covariance + c2)) / (
            (mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2)
        )
        means.append(similarity.mean((1, 2, 3)).cpu())
    return torch.cat(means)


def temporal_difference(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Compute how differently two clips change from frame to frame: flicker, which no single frame shows.

    The mean over pixels of ``|(c[t+1] - c[t]) - (r[t+1] - r[t])|``; 0 for equal clips and for a constant offset.

    Args:
        reference, candidate: a clip, otherwise as for :func:`ssim_per_frame`.

    Returns:
        float32 ``[frames - 1]`` on the CPU.

    Raises:
        PipelineError: the shapes differ, or these are no videos.
    """
    differences: list[torch.Tensor] = []
    last: torch.Tensor | None = None
    for a, b in _batches(reference, candidate):
        error = (b.float() - a.float()).cpu()
        errors = error if last is None else torch.cat([last, error])
        differences.append((errors[1:] - errors[:-1]).abs().mean((1, 2, 3)))
        last = error[-1:]
    return torch.cat(differences)


def video_shift(reference: torch.Tensor, candidate: torch.Tensor) -> int:
    """Estimate by how many frames the candidate is late: the shift at which the frames differ least.

    Searches a quarter of a second in both directions. A video without motion has shift 0.

    Args:
        reference, candidate: ``[1, frames, 3, height, width]`` or ``[frames, 3, height, width]`` of one shape.

    Raises:
        PipelineError: the shapes differ, or these are no videos.
    """
    a, b = (_downsample(luma(frames)) for frames in _frames_of_both(reference, candidate))
    count = a.shape[0]
    costs = {}
    for shift in sorted(range(-MAX_SHIFT_FRAMES, MAX_SHIFT_FRAMES + 1), key=abs):
        if count - abs(shift) < 2:
            break
        early, late = a[max(-shift, 0) : count - max(shift, 0)], b[max(shift, 0) : count - max(-shift, 0)]
        costs[shift] = float((early - late).square().mean())  # squares: edges that moved outweigh an even change
    best = min(costs, key=lambda shift: costs[shift], default=0)  # of equal costs the first, the smallest shift
    # A shift must explain the difference, not reduce it a little by chance.
    return best if costs and costs[best] < 0.5 * costs[0] else 0


def frames_of(video: torch.Tensor) -> torch.Tensor:
    """Check that a tensor is a video and return the frames ``[batch * frames, 3, height, width]``.

    Raises:
        PipelineError: the tensor is not ``[batch, frames, 3, height, width]`` or ``[frames, 3, height, width]`` in
            floating point, or is empty.
    """
    if video.ndim not in (4, 5) or video.shape[-3] != 3 or video.numel() == 0 or not video.is_floating_point():
        raise PipelineError(
            "A video must be floating point [batch, frames, 3, height, width] or [frames, 3, height, width], "
            f"not {video.dtype} {list(video.shape)}. Pass what the pipeline returns."
        )
    return video.detach().flatten(0, -4)


def luma(frames: torch.Tensor) -> torch.Tensor:
    """Convert ``[frames, 3, height, width]`` to luma ``[frames, height, width]``, ITU-R BT.601, in float32."""
    weights = torch.tensor(_LUMA, device=frames.device)
    return torch.einsum("fchw,c->fhw", frames.float(), weights)


def denormalize(decoded: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Convert the output of a video VAE to pixels, as the decode step of the pipeline does.

    Args:
        decoded: ``[batch, 3, frames, height, width]``.
        mean, std: of each channel, as the pipeline has them: ``pixel_mean`` and ``pixel_std``.

    Returns:
        float32 ``[batch, frames, 3, height, width]`` in [0, 1].
    """
    mean_of, std_of = (torch.tensor(values, device=decoded.device).view(-1, 1, 1, 1) for values in (mean, std))
    return (decoded.float() * std_of + mean_of).clamp(0, 1).transpose(1, 2)


def _frames_of_both(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if reference.shape != candidate.shape:
        raise PipelineError(
            f"Videos of {list(reference.shape)} and {list(candidate.shape)} cannot be compared. Pass equal requests."
        )
    return frames_of(reference), frames_of(candidate)


def _batches(reference: torch.Tensor, candidate: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair up to 16 frames of both videos at a time, on the device of the reference."""
    a, b = _frames_of_both(reference, candidate)
    return [
        (a[start : start + _BATCH], b[start : start + _BATCH].to(a.device)) for start in range(0, a.shape[0], _BATCH)
    ]


def _gaussian_means(image: torch.Tensor) -> torch.Tensor:
    """Compute Gaussian-weighted means over all windows that lie in ``[frames, 1, height, width]``."""
    offsets = torch.arange(SSIM_WINDOW, dtype=image.dtype, device=image.device) - SSIM_WINDOW // 2
    weights = torch.exp(-(offsets**2) / (2 * _SIGMA**2))
    weights = weights / weights.sum()
    return F.conv2d(F.conv2d(image, weights.view(1, 1, -1, 1)), weights.view(1, 1, 1, -1))


def _downsample(pictures: torch.Tensor) -> torch.Tensor:
    """Average ``[frames, height, width]`` down to 64 to 127 pixels on the shorter side; smaller pictures stay."""
    factor = max(1, min(pictures.shape[-2:]) // 64)
    return F.avg_pool2d(pictures[:, None], factor)[:, 0]
