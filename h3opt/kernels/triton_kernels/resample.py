"""Twice up through 12 taps with SnakeBeta, and back down: the two halves of BigVGAN's anti-aliased activation.

Two kernels, not one: the sines are a signal's most expensive part, and one kernel would take each of them six times.
Between them the signal is written once, as two phases, which every load and store then meets in consecutive order.
An activation moves 6 floats per element this way (the eager chain: 38), mostly within an H200's L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from h3opt.kernels.triton_kernels.device import EXACT_LAUNCH, sin

SAMPLES = 512  # per program


NUM_WARPS = 4


@triton.jit
def snake(x, frequency, magnitude):
    wave = sin(frequency * x)
    return x + magnitude * (wave * wave)


@triton.jit
def upsample_snake_kernel(
    x_ptr, taps_ptr, frequency_ptr, magnitude_ptr, out_ptr, channels, length, WIDTH: tl.constexpr
):
    """x [rows, length] -> [rows, 2, length]; row r is channel r % channels. All float32."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    even = tl.zeros((WIDTH,), tl.float32)
    odd = tl.zeros((WIDTH,), tl.float32)
    for j in tl.static_range(7):
        at = tl.minimum(tl.maximum(m + (j - 3), 0), length - 1)
        value = tl.load(x_ptr + row * length + at)
        if j < 6:
            even = even + value * tl.load(taps_ptr + (11 - 2 * j))
        if j > 0:
            odd = odd + value * tl.load(taps_ptr + (12 - 2 * j))
    frequency = tl.load(frequency_ptr + row % channels)
    magnitude = tl.load(magnitude_ptr + row % channels)
    out = out_ptr + 2 * row * length + m
    tl.store(out, snake(even, frequency, magnitude), mask=m < length)
    tl.store(out + length, snake(odd, frequency, magnitude), mask=m < length)


@triton.jit
def downsample_kernel(x_ptr, taps_ptr, out_ptr, length, WIDTH: tl.constexpr):
    """x [rows, 2, length] -> [rows, length], float32."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for k in tl.static_range(12):
        at = tl.minimum(tl.maximum(2 * m + (k - 5), 0), 2 * length - 1)
        value = tl.load(x_ptr + 2 * row * length + (at % 2) * length + at // 2)
        total = total + value * tl.load(taps_ptr + k)
    tl.store(out_ptr + row * length + m, total, mask=m < length)


def upsample_snake(
    x: torch.Tensor, taps: torch.Tensor, frequency: torch.Tensor, magnitude: torch.Tensor, width: int = SAMPLES
) -> torch.Tensor:
    """Launch `upsample_snake_kernel` on x [batch, channels, length], which is not empty."""
    x, (batch, channels, length) = x.contiguous(), x.shape
    out = torch.empty((batch, channels, 2, length), dtype=x.dtype, device=x.device)
    vectors = (one.contiguous() for one in (taps, frequency, magnitude))
    upsample_snake_kernel[(batch * channels, triton.cdiv(length, width))](
        x, *vectors, out, channels, length, WIDTH=width, num_warps=NUM_WARPS, **EXACT_LAUNCH
    )
    return out


def downsample(x: torch.Tensor, taps: torch.Tensor, width: int = SAMPLES) -> torch.Tensor:
    """Launch `downsample_kernel` on x [batch, channels, 2, length], which is not empty."""
    x, (batch, channels, _, length) = x.contiguous(), x.shape
    out = torch.empty((batch, channels, length), dtype=x.dtype, device=x.device)
    downsample_kernel[(batch * channels, triton.cdiv(length, width))](
        x, taps.contiguous(), out, length, WIDTH=width, num_warps=NUM_WARPS, **EXACT_LAUNCH
    )
    return out
