"""Staleness of cached results: whether the tensors that a result was computed from are still the same.

Tensors are compared by identity, storage and version counter, so that nothing waits for the device. Moves and casts,
which put another storage into a parameter, are seen; writes into the same storage through ``.data`` are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import torch

from h3opt.pipeline.adapters import adapter_state

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

    The snapshot keeps the tensors and their storages alive, so that no new tensor can take the identity or the address
    of an old one.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._versions = [(tensor, tensor.detach(), mutation_version(tensor)) for tensor in tensors]

    def matches(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether these are the same tensors, in the same order and unmodified since."""
        current = list(tensors)
        return len(current) == len(self._versions) and all(
            tensor is known and _same_storage(known, content) and is_unmodified(known, since)
            for tensor, (known, content, since) in zip(current, self._versions, strict=True)
        )


def _same_storage(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether ``tensor`` still has the dtype, the device and the address of its earlier content."""
    return (tensor.dtype, tensor.device, tensor.data_ptr()) == (before.dtype, before.device, before.data_ptr())


def module_state(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return what the result of ``module`` depends on besides tensors: adapters, hooks, training mode, ``forward``.

    States compare equal while all of it is the same.
    """
    return (adapter_state(module), module.training, tuple(_hooks(module)))


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a user's hooks run in ``module``: their result may depend on anything."""
    return any(inner._forward_pre_hooks or inner._forward_hooks for inner in module.modules())


def is_managed(module: torch.nn.Module) -> bool:
    """Return whether a library replaced ``forward`` in ``module`` to move or cast weights around every call."""
    return any(inner.__dict__.keys() & {"forward", "_hf_hook"} for inner in module.modules())


def _hooks(module: torch.nn.Module) -> list[Any]:
    hooks: list[Any] = []
    for inner in module.modules():
        hooks += [*inner._forward_pre_hooks.values(), *inner._forward_hooks.values()]
        hooks += [inner.__dict__[name] for name in ("forward", "_hf_hook") if name in inner.__dict__]
    return hooks


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
