"""Wrappers around calls: a chain of wrappers, and module calls that go through it without touching ``forward``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from h3opt._torch_private import module_call, set_compiled_call

Wrapper = Callable[..., Any]
"""Called as ``wrapper(proceed, *args, **kwargs)``; ``proceed(*args, **kwargs)`` goes on to the wrapped call."""


class WrapperChain:
    """Wrappers around one call.

    Attributes:
        inner: wrappers next to the call, the innermost first.
        outer: wrappers outside these, the outermost last.
    """

    def __init__(self) -> None:
        self.inner: list[Wrapper] = []
        self.outer: list[Wrapper] = []

    def __bool__(self) -> bool:
        return bool(self.inner or self.outer)

    def add(self, wrapper: Wrapper, innermost: bool = False) -> None:
        """Put ``wrapper`` outside all others, or inside all others."""
        if innermost:
            self.inner.insert(0, wrapper)
        else:
            self.outer.append(wrapper)

    def remove(self, wrapper: Wrapper) -> None:
        """Take ``wrapper`` off; compares by identity, as wrappers may define equality."""
        self.inner = [other for other in self.inner if other is not wrapper]
        self.outer = [other for other in self.outer if other is not wrapper]

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``target`` through all wrappers."""
        for wrapper in (*self.inner, *self.outer):
            target = partial(wrapper, target)
        return target(*args, **kwargs)


def wrap_calls(module: torch.nn.Module, wrapper: Wrapper, undo: ExitStack, innermost: bool = False) -> None:
    """Send calls of ``module`` through ``wrapper``, outside the wrappers already there (or inside them all).

    Args:
        module: any module; what ``module.compile()`` compiled stays inside all wrappers.
        wrapper: see :data:`Wrapper`.
        undo: takes the wrapper off; wrappers may be taken off in any order.
        innermost: put the wrapper next to the module, as a captured graph has to be.
    """
    call = getattr(module, "_compiled_call_impl", None)
    if not isinstance(call, _WrappedCall):
        call = _WrappedCall(module, call)
        set_compiled_call(module, call)
    call.wrappers.add(wrapper, innermost)
    undo.callback(call.remove, wrapper)


def is_observed(module: torch.nn.Module) -> bool:
    """Return whether hooks or wrappers (other than innermost wrappers) see the calls of ``module``.

    No call may be left out then. Libraries that move or convert weights around a call (the hooks of accelerate and of
    diffusers) replace the module's ``forward``, which counts too.
    """
    call = getattr(module, "_compiled_call_impl", None)
    wrapped = isinstance(call, _WrappedCall) and bool(call.wrappers.outer)
    replaced = module.__dict__.keys() & {"forward", "_hf_hook"}
    return bool(wrapped or module._forward_hooks or module._forward_pre_hooks or replaced)


class _WrappedCall:
    """The value of ``module._compiled_call_impl`` while a module is wrapped."""

    def __init__(self, module: torch.nn.Module, compiled: Callable[..., Any] | None) -> None:
        self.module, self.compiled = module, compiled
        self.wrappers = WrapperChain()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrappers.call(self._call_module, *args, **kwargs)

    def remove(self, wrapper: Wrapper) -> None:
        """Take ``wrapper`` off; after the last wrapper the module has its own call again."""
        self.wrappers.remove(wrapper)
        if not self.wrappers and getattr(self.module, "_compiled_call_impl", None) is self:
            set_compiled_call(self.module, self.compiled)

    def _call_module(self, *args: Any, **kwargs: Any) -> Any:
        if self.compiled is not None:
            return self.compiled(*args, **kwargs)
        return module_call(self.module, args, kwargs)
