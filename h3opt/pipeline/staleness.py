"""Staleness of cached results: whether the tensors that a result was computed from are still the same.

Tensors are compared by identity and version counter, so that nothing waits for the device. Writes through ``.data``
are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


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


class TensorSnapshot:
    """Which tensors a result was computed from, and their content then.

    The snapshot keeps the tensors alive, so that no new tensor can take the identity of an old one.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._versions = [(tensor, mutation_version(tensor)) for tensor in tensors]

    def matches(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether these are the same tensors, in the same order and unmodified since."""
        current = list(tensors)
        return len(current) == len(self._versions) and all(
            tensor is known and is_unmodified(known, since)
            for tensor, (known, since) in zip(current, self._versions, strict=True)
        )


class TensorCache(Generic[Result]):
    """Results by the tensor they were computed from; modified tensors have no result."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[TensorSnapshot, Result]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tensor: torch.Tensor) -> Result | None:
        """Return the result of this very tensor, or ``None`` if there is none or the tensor was modified."""
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0].matches([tensor]) else None

    def put(self, tensor: torch.Tensor, result: Result) -> None:
        """Keep ``result``, and the tensor with it."""
        self._entries[id(tensor)] = TensorSnapshot([tensor]), result

    def first(self) -> Result:
        """Return the result that was put first."""
        return next(iter(self._entries.values()))[1]

    def clear(self) -> None:
        """Drop all results."""
        self._entries.clear()

    def keep_last(self, count: int) -> None:
        """Drop all results but the ``count`` that were put last."""
        drop_oldest(self._entries, count)


def content_key(tensor: torch.Tensor) -> tuple[torch.dtype, bytes]:
    """Return a key that equal content gives, bit for bit; waits for the device."""
    return tensor.dtype, tensor.detach().cpu().view(torch.uint8).numpy().tobytes()


def drop_oldest(entries: dict[Any, Any], count: int) -> None:
    """Keep the ``count`` entries that were inserted last."""
    for key in list(entries)[: max(len(entries) - count, 0)]:
        del entries[key]
