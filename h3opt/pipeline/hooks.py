"""Calls of modules sent through wrappers, without touching a module's forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from h3opt._torch_private import module_call, set_compiled_call

_REPLACED = {"forward", "_hf_hook"}


Wrapper = Callable[..., Any]
"""Called as ``wrapper(proceed, *args, **kwargs)``; ``proceed(*args, **kwargs)`` goes on to the module."""


def wrap_calls(module: torch.nn.Module, wrapper: Wrapper, undo: ExitStack, innermost: bool = False) -> None:
    """Send calls of ``module`` through ``wrapper``, outside those already there (or inside them all).

    Args:
        module: any module; one compiled with ``module.compile()`` keeps that innermost.
        wrapper: see :data:`Wrapper`.
        undo: takes the wrapper off; wrappers may be taken off in any order.
        innermost: put the wrapper next to the module, as a captured graph has to be.
    """
    slot = getattr(module, "_compiled_call_impl", None)
    if not isinstance(slot, _Slot):
        slot = _Slot(module, slot)
        set_compiled_call(module, slot)
    slot.wrappers.insert(0 if innermost else len(slot.wrappers), wrapper)
    slot.innermost += [wrapper] * innermost
    undo.callback(slot.remove, wrapper)


def observed(module: torch.nn.Module) -> bool:
    """Whether its calls are seen by hooks or wrappers, other than the one next to it: none may be left out then.

    Libraries that move or convert weights around a call (accelerate's and diffusers' hooks) put a forward of their own
    on the module.
    """
    slot = getattr(module, "_compiled_call_impl", None)
    wrapped = isinstance(slot, _Slot) and len(slot.wrappers) > len(slot.innermost)
    return bool(wrapped or module._forward_hooks or module._forward_pre_hooks or module.__dict__.keys() & _REPLACED)


class _Slot:
    """What ``module._compiled_call_impl`` holds while a module is wrapped."""

    def __init__(self, module: torch.nn.Module, compiled: Callable[..., Any] | None) -> None:
        self.module, self.compiled = module, compiled
        self.wrappers: list[Wrapper] = []
        self.innermost: list[Wrapper] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(len(self.wrappers), args, kwargs)

    def _call(self, depth: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if depth > 0:
            return self.wrappers[depth - 1](lambda *a, **k: self._call(depth - 1, a, k), *args, **kwargs)
        if self.compiled is not None:
            return self.compiled(*args, **kwargs)
        return module_call(self.module, args, kwargs)

    def remove(self, wrapper: Wrapper) -> None:
        self.wrappers.remove(wrapper)
        self.innermost = [one for one in self.innermost if one is not wrapper]
        if not self.wrappers and getattr(self.module, "_compiled_call_impl", None) is self:
            set_compiled_call(self.module, self.compiled)
