"""Staleness of cached results: has a tensor been written to, and under which autocast state was a result computed."""

from __future__ import annotations

import torch


def mutation_version(tensor: torch.Tensor) -> int | torch.Tensor:
    """Return a stamp of the tensor's current content, for :func:`is_unmodified`.

    The stamp is torch's version counter. Tensors made under ``inference_mode`` have none, so for them it is a copy.
    """
    return tensor.clone() if tensor.is_inference() else tensor._version


def is_unmodified(tensor: torch.Tensor, since: int | torch.Tensor) -> bool:
    """Return whether ``tensor`` still has the content it had when :func:`mutation_version` gave ``since``.

    Waits for the device only where the stamp is a copy.
    """
    return torch.equal(tensor, since) if isinstance(since, torch.Tensor) else tensor._version == since


def autocast_state(device: torch.device) -> tuple[bool, torch.dtype]:
    """Return whether autocast is on for ``device``, and its dtype: a cached result depends on both."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
