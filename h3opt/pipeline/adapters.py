"""Adapters (LoRA and its relatives) that PEFT has put on the layers of a model.

PEFT wraps a layer in an *adapter layer*, which keeps the layer as ``base_layer``. This module reads the public
attributes of adapter layers and does not import PEFT, which is optional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

MERGES = ("fuse_lora", "unfuse_lora")
"""Methods of a diffusers model that write adapters into the weights of the base layers, or take them out again."""


def adapter_layers(module: torch.nn.Module) -> list[Any]:
    """Return the adapter layers in ``module``, which may be an adapter layer."""
    return [layer for layer in module.modules() if is_adapter_layer(layer)]


def is_adapter_layer(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is a layer with adapters around a base layer."""
    return hasattr(module, "base_layer") and hasattr(module, "active_adapters")


def base_layer(module: torch.nn.Module) -> torch.nn.Module:
    """Return the layer below all adapters; a layer without adapters is returned itself."""
    while is_adapter_layer(module):
        module = getattr(module, "base_layer")  # noqa: B009  mypy knows no such attribute of a module
    return module


def layers_with_adapters(blocks: Sequence[torch.nn.Module], paths: Sequence[str]) -> frozenset[str]:
    """Return those of the layers ``paths`` of a block that have an adapter layer in any of ``blocks``."""
    return frozenset(path for path in paths if any(is_adapter_layer(block.get_submodule(path)) for block in blocks))


def adapter_state(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return what the result of ``module`` depends on besides tensors, as far as adapters are concerned.

    That is, for each adapter layer: whether adapters are disabled, which are active, which are merged into the weights,
    and the scaling of each. States compare equal while all of it is the same. A state keeps the layers alive, so that
    no new layer can take the identity of an old one.
    """
    return tuple(
        (
            layer,
            getattr(layer, "disable_adapters", False),
            tuple(layer.active_adapters),
            tuple(getattr(layer, "merged_adapters", ())),
            tuple(_scaling(layer).items()),
        )
        for layer in adapter_layers(module)
    )


def scale_of_call(kwargs: Mapping[str, Any]) -> float:
    """Return the factor on all adapters that a call of a diffusers model asks for; 1 when it asks for none.

    Args:
        kwargs: keyword arguments of the call, or values of a pipeline's state.
    """
    return float((kwargs.get("attention_kwargs") or {}).get("scale", 1.0))


@contextmanager
def scaled_adapters(module: torch.nn.Module, scale: float) -> Iterator[None]:
    """Scale all active adapters in ``module``, as diffusers does around a forward that is given ``scale``.

    Afterwards each scaling has exactly the earlier value: dividing again, as PEFT does, may change the last bit.
    """
    layers = adapter_layers(module) if scale != 1.0 else []
    before = [(layer, dict(_scaling(layer))) for layer in layers]
    try:
        for layer in layers:
            layer.scale_layer(scale)
        yield
    finally:
        for layer, scaling in before:
            _scaling(layer).update(scaling)


def before_merges(module: Any, action: Callable[[str], None], undo: ExitStack) -> None:
    """Call ``action(name)`` before a method of :data:`MERGES` runs on this module; it may raise to refuse the call.

    Merges write through ``.data``, which no version counter notices.
    """
    for name in MERGES:
        if hasattr(module, name):
            _intercept(module, name, action, undo)


def _intercept(module: Any, name: str, action: Callable[[str], None], undo: ExitStack) -> None:
    original, before = getattr(module, name), vars(module).get(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        action(name)
        return original(*args, **kwargs)

    def remove() -> None:
        if before is None:
            vars(module).pop(name, None)
        else:
            setattr(module, name, before)

    setattr(module, name, call)
    undo.callback(remove)


def _scaling(layer: Any) -> dict[str, float]:
    """The scaling of each adapter in a layer; kinds of adapters without a strength have none."""
    scaling: dict[str, float] = getattr(layer, "scaling", None) or {}
    return scaling
