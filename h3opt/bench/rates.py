"""Measured ceilings of a CUDA device: memory copies and bf16 matrix products."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def copy_rate(device: torch.device) -> float:
    """Measure a device-to-device copy of 2 GiB, in TB/s; bytes read and bytes written both count."""
    source = torch.randint(0, 255, (2**31,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _median_seconds(lambda: target.copy_(source)) / 1e12


def gemm_rate(device: torch.device) -> float:
    """Measure a bf16 matrix product of 8192 × 8192 × 8192 on random data, in TFLOP/s."""
    size = 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _median_seconds(lambda: left @ right) / 1e12


def _median_seconds(work: Callable[[], Any], times: int = 7) -> float:
    """Time ``work`` on the GPU; the first two runs warm up and do not count."""
    seconds = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds[2:])
