"""What a cached result was made from, and whether it has changed since."""

from __future__ import annotations

import torch


def writes(tensor: torch.Tensor) -> int | torch.Tensor:
    """How often ``tensor`` has been written to; under ``inference_mode`` nobody counts, so then a copy of it."""
    return tensor.clone() if tensor.is_inference() else tensor._version


def unwritten(tensor: torch.Tensor, since: int | torch.Tensor) -> bool:
    """Whether ``tensor`` is as it was when :func:`writes` gave ``since``. Waits for the device for a copy only."""
    return torch.equal(tensor, since) if isinstance(since, torch.Tensor) else tensor._version == since


def ambient(device: torch.device) -> tuple[bool, torch.dtype]:
    """What a result also depends on: whether autocast is on for ``device``, and its dtype."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
