"""TODO"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from h3opt.errors import PipelineError
from h3opt.metrics.bits import paired_chunks, require_same


def psnr_db(reference: torch.Tensor, candidate: torch.Tensor, peak: float = 1.0) -> float:
    """Peak signal-to-noise ratio, 10 log10(peak² / mean squared error) in dB; infinite for equal tensors.

    Args:
        reference, candidate: floating point, of one shape and dtype.
        peak: the largest value a sample can have.

    Raises:
        PipelineError: when shapes or dtypes differ, or the tensors are empty.
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


SSIM_WINDOW = 11
"""Pixels a side of the window of :func:`ssim_per_frame`; frames must be at least this large."""


_SIGMA, _K1, _K2 = 1.5, 0.01, 0.03  # the constants of Wang et al.


_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


_BATCH = 16  # frames at a time: a real clip in float32 twice over would take gigabytes


def psnr_per_frame(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio of each frame, -10 log10(mean squared error) in dB; infinite for equal frames.

    Args:
        reference, candidate: ``[batch, frames, 3, height, width]`` or ``[frames, 3, height, width]``, floating point
            in [0, 1].

    Returns:
        float64 ``[batch * frames]`` on the CPU.

    Raises:
        PipelineError: the shapes differ, or these are no videos.
    """
    parts = [(a - b).double().square().mean((1, 2, 3)).cpu() for a, b in _pairs(reference, candidate)]
    return -10 * torch.cat(parts).log10()


def ssim_per_frame(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Structural similarity of each frame's luma: 1 for equal frames, 0 for unrelated ones.

    Wang et al., "Image Quality Assessment: From Error Visibility to Structural Similarity", IEEE TIP 2004: Gaussian
    window of 11 x 11 pixels and sigma 1.5, K1 = 0.01, K2 = 0.03, averaged over the windows that lie in the frame.

    Args:
        reference, candidate: as :func:`psnr_per_frame`, at least 11 pixels high and wide.

    Returns:
        float64 ``[batch * frames]`` on the CPU; NaN for a frame with NaN in it.

    Raises:
        PipelineError: the shapes differ, or these are no videos of sufficient size.
    """
    if min(reference.shape[-2:]) < SSIM_WINDOW:
        raise PipelineError(
            f"SSIM needs frames of at least {SSIM_WINDOW}x{SSIM_WINDOW} pixels, got {list(reference.shape[-2:])}. "
            "Generate a larger video."
        )
    c1, c2 = _K1**2, _K2**2
    found = []
    for pair in _pairs(reference, candidate):
        a, b = (luma(part).double()[:, None] for part in pair)
        mean_a, mean_b = _windowed(a), _windowed(b)
        variance_a = _windowed(a * a) - mean_a**2
        variance_b = _windowed(b * b) - mean_b**2
        covariance = _windowed(a * b) - mean_a * mean_b
        similarity = ((2 * mean_a * mean_b + c1) * (2 * covariance + c2)) / (
            (mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2)
        )
        found.append(similarity.mean((1, 2, 3)).cpu())
    return torch.cat(found)


def temporal_difference(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """How differently two clips change from one frame to the next: flicker that a still frame does not show.

    The mean over pixels of ``|(c[t+1] - c[t]) - (r[t+1] - r[t])|``; 0 for equal clips and for a constant offset.

    Args:
        reference, candidate: as :func:`psnr_per_frame`; one clip.

    Returns:
        float32 ``[frames - 1]`` on the CPU.

    Raises:
        PipelineError: the shapes differ, or these are no videos.
    """
    error = [(b.float() - a.float()).cpu() for a, b in _pairs(reference, candidate)]
    steps: list[torch.Tensor] = []
    last = None
    for part in error:
        whole = part if last is None else torch.cat([last, part])
        steps.append((whole[1:] - whole[:-1]).abs().mean((1, 2, 3)))
        last = part[-1:]
    return torch.cat(steps)


def frames_of(video: torch.Tensor) -> torch.Tensor:
    """``[batch * frames, 3, height, width]``.

    Raises:
        PipelineError: this is no video.
    """
    if video.ndim not in (4, 5) or video.shape[-3] != 3 or video.numel() == 0 or not video.is_floating_point():
        raise PipelineError(
            "A video must be floating point [batch, frames, 3, height, width] or [frames, 3, height, width], "
            f"not {video.dtype} {list(video.shape)}. Pass what the pipeline returns."
        )
    return video.detach().flatten(0, -4)


def luma(frames: torch.Tensor) -> torch.Tensor:
    """``[frames, 3, height, width]`` → ``[frames, height, width]`` with the weights of ITU-R BT.601, float32."""
    weights = torch.tensor(_LUMA, device=frames.device)
    return torch.einsum("fchw,c->fhw", frames.float(), weights)


def _pairs(reference: torch.Tensor, candidate: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if reference.shape != candidate.shape:
        raise PipelineError(
            f"Videos of {list(reference.shape)} and {list(candidate.shape)} cannot be compared. Pass equal requests."
        )
    a, b = frames_of(reference), frames_of(candidate)
    return [
        (a[start : start + _BATCH], b[start : start + _BATCH].to(a.device)) for start in range(0, a.shape[0], _BATCH)
    ]


def _windowed(image: torch.Tensor) -> torch.Tensor:
    """Gaussian-weighted means over all windows that lie in ``[frames, 1, height, width]``."""
    at = torch.arange(SSIM_WINDOW, dtype=image.dtype, device=image.device) - SSIM_WINDOW // 2
    weights = torch.exp(-(at**2) / (2 * _SIGMA**2))
    weights = weights / weights.sum()
    return F.conv2d(F.conv2d(image, weights.view(1, 1, -1, 1)), weights.view(1, 1, 1, -1))
