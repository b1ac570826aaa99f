"""The structure of a module: what a captured graph depends on and Dynamo does not guard.

Dynamo guards tensors, sizes and most attributes, but not the hooks of nested modules (``skip_nnmodule_hook_guards``),
so a block with a hook would run the graph of a block without it. What Dynamo does guard counts against a limit on
captures for each compiled function, which a few configurations of adapters exhaust. Therefore each structure has a
compiled function of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# diffusers: the processor of an attention layer, and the backend that set_attention_backend() chose for it.
_PROCESSOR, _BACKEND = "processor", "_attention_backend"
# PEFT: which adapters of a layer are on. Their strengths are no part of the structure: a graph takes them as input.
_ACTIVE, _DISABLED, _MERGED, _STRENGTHS = "_active_adapter", "_disable_adapters", "merged_adapters", "scaling"


def structure_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal only for modules that one captured graph may stand for.

    The key holds the types and names of all submodules, their hooks and patched forwards by ``id``, attention
    processors with the chosen backend, and the active adapters. It is computed for every call of a block.
    """
    parts: list[Any] = []
    pending: list[Any] = [module]
    while pending:
        state = pending.pop()
        if state is None:
            parts.append(None)
            continue
        parts.append(state.__class__)
        state = state.__dict__
        if children := state["_modules"]:
            parts.append(tuple(children))
            pending.extend(children.values())
        if (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
        ):
            parts += [(name, *map(id, state[name].values())) for name in _HOOKS]
        if "forward" in state:
            parts.append(id(state["forward"]))
        if _PROCESSOR in state:
            processor = state[_PROCESSOR]
            parts.append((processor.__class__, getattr(processor, _BACKEND, None)))
        if _ACTIVE in state:
            active = state[_ACTIVE]
            names = (active,) if isinstance(active, str) else tuple(active)
            parts.append((names, state.get(_DISABLED), tuple(state.get(_MERGED, ()))))
    return tuple(parts)


def hook_functions(module: torch.nn.Module) -> list[Any]:
    """Return the hooks and patched forwards inside a module, which :func:`structure_of` has by ``id``."""
    return list(_hook_functions(module))


def adapter_strengths(module: torch.nn.Module) -> list[str]:
    """Return the strengths of all adapters inside a module, as paths that start at the module.

    Paths are written as Dynamo names the sources of values, e.g. ``._modules['to_q'].scaling['style']``.
    """
    return [
        "".join(f"._modules[{name!r}]" for name in path.split(".") if name) + f".{_STRENGTHS}[{adapter!r}]"
        for path, part in module.named_modules()
        if _ACTIVE in vars(part)
        for adapter in vars(part).get(_STRENGTHS, ())
    ]


def _hook_functions(module: torch.nn.Module) -> Iterator[Any]:
    for part in module.modules():
        state = vars(part)
        for name in _HOOKS:
            yield from state[name].values()
        if "forward" in state:
            yield state["forward"]
