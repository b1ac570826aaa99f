"""Depthwise resampling filters of the audio decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from h3opt.kernels.ops.registry import launch, register_op


def upsample_snake_definition(x: Tensor, taps: Tensor, frequency: Tensor, magnitude: Tensor) -> Tensor:
    """Twice upsampled, then x + magnitude * sin(frequency * x)^2, both phases apart: no zero is stuffed or multiplied.

    x [batch, channels, length], taps [12] of the upsampling filter times 2, frequency and magnitude [channels]
    -> [batch, channels, 2, length], where [:, :, p, m] is sample 2m + p of the upsampled signal. Past its ends x keeps
    its first and last value. Source: diffusers' MiniMaxH3AudioUpSample1d and MiniMaxH3AudioSnakeBeta (frequency is
    exp(alpha) and magnitude 1 / (exp(beta) + 1e-9) there).

    Sample 2m + p reads x[m-3+p .. m+2+p] through the odd taps (p = 0) or the even ones (p = 1), last tap first. The
    CUDA kernel sums in that order, every product and sum rounded; this definition sums as the CPU's convolution does.
    """
    if not x.numel():
        return x.new_empty((*x.shape[:-1], 2, x.shape[-1]))
    channels, padded = x.shape[1], F.pad(x, (3, 3), mode="replicate")
    phases = [
        F.conv1d(padded[..., p : p + x.shape[-1] + 5], taps.flip(0)[p::2].expand(channels, 1, -1), groups=channels)
        for p in (0, 1)
    ]
    up = torch.stack(phases, dim=2)
    wave = frequency[:, None, None] * up
    return wave.sin_().square_().mul_(magnitude[:, None, None]).add_(up)  # in place: fresh memory costs more than sines


def downsample_definition(x: Tensor, taps: Tensor) -> Tensor:
    """Every second sample of the filtered signal, from the signal's two phases.

    x [batch, channels, 2, length] as `upsample_snake` gives it, taps [12] -> [batch, channels, length]. Sample m is
    the sum over k of taps[k] * signal[2m - 5 + k], summed in this order by the CUDA kernel; past its ends the signal
    keeps its first and last value. Source: diffusers' MiniMaxH3AudioLowPassFilter1d.
    """
    channels, length = x.shape[1], x.shape[3]
    if not x.numel():
        return x.new_empty((*x.shape[:2], length))
    padded = F.pad(x.transpose(2, 3).flatten(2), (5, 6), mode="replicate")
    return F.conv1d(padded, taps.expand(channels, 1, -1), stride=2, groups=channels)


def _upsample_snake_fake(x, taps, frequency, magnitude):
    return x.new_empty((*x.shape[:-1], 2, x.shape[-1]))


def _downsample_fake(x, taps):
    return x.new_empty((*x.shape[:2], x.shape[3]))


def _resampling_served(x: Tensor, ndim: int, taps: Tensor, *per_channel: Tensor) -> bool:
    return (
        x.ndim == ndim
        and all(t.dtype == torch.float32 for t in (x, taps, *per_channel))
        and taps.shape == (12,)
        and all(t.shape == x.shape[1:2] for t in per_channel)
        and x.numel() > 0
    )


def _upsample_snake_cuda(x, taps, frequency, magnitude):
    if not _resampling_served(x, 3, taps, frequency, magnitude):
        return upsample_snake_definition(x, taps, frequency, magnitude)
    return launch("resample", "upsample_snake", x, taps, frequency, magnitude)


def _downsample_cuda(x, taps):
    if not _resampling_served(x, 4, taps) or x.shape[2] != 2:
        return downsample_definition(x, taps)
    return launch("resample", "downsample", x, taps)


upsample_snake = register_op(
    "upsample_snake",
    "(Tensor x, Tensor taps, Tensor frequency, Tensor magnitude) -> Tensor",
    upsample_snake_definition,
    _upsample_snake_cuda,
    _upsample_snake_fake,
    "upsample_snake_kernel",
)


downsample = register_op(
    "downsample",
    "(Tensor x, Tensor taps) -> Tensor",
    downsample_definition,
    _downsample_cuda,
    _downsample_fake,
    "downsample_kernel",
)
