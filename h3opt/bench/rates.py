"""What the device can do: copy and matrix product rates."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def copy_rate(device: torch.device) -> float:
    """Measured device-to-device copy in TB/s, bytes read plus bytes written."""
    source = torch.randint(0, 255, (2**31,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best_of(lambda: target.copy_(source)) / 1e12


def gemm_rate(device: torch.device) -> float:
    """Measured bf16 matrix product in TFLOP/s on random data, 8192 × 8192 × 8192."""
    size = 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _best_of(lambda: left @ right) / 1e12


def _best_of(work: Callable[[], Any], times: int = 7) -> float:
    seconds = []
    for _ in range(times):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds[2:])
