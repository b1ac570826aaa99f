"""What a denoising step computes from the prompt and the layout alone, computed once per generation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.pass_api import Device, Exact, Mutant, PipelineView, SchedulePass, register
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.staleness import autocast_state, is_unmodified, mutation_version

SOURCES = {
    "context_embedder": "encoder_hidden_states",
    "token_refiner": "encoder_hidden_states",
    "rope": "position_ids",
}
"""Module of the transformer → the argument of its ``forward`` that the module's result depends on."""


@register
@dataclass(frozen=True)
class HoistStepInvariants(SchedulePass):
    """Context embedder, token refiner and rope give every step the same tensors: run them in the first step only.

    A result is reused while the module reads the same tensor objects and the same weights, unwritten since, under the
    same autocast; with gradients on, never. Nothing is compared by value, so nothing waits for the device; tensors
    made under ``inference_mode`` count no writes and are compared. Writes through ``.data`` are not seen either.
    """

    name = "hoist_step_invariants"
    promise = Exact()
    happens_before = ("The first step's embedder, refiner and rope run before every later step's first block.",)

    def applies(self, device: Device, view: PipelineView) -> str | None:
        if view.transformer is None:
            return "there is no transformer"
        if view.scope == "model":
            return "scope: model captures embedder, refiner and rope inside the transformer's graph"
        return None

    def expect(self, view: PipelineView) -> int:
        return len(SOURCES)

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        current: dict[str, torch.Tensor] = {}

        def remember_inputs(proceed: Any, *args: Any, **kwargs: Any) -> Any:
            current.update({name: kwargs[name] for name in SOURCES.values() if name in kwargs})
            try:
                return proceed(*args, **kwargs)
            finally:
                current.clear()

        wrap_calls(view.transformer, remember_inputs, undo)
        for name, source in SOURCES.items():
            module = getattr(view.transformer, name)
            wrap_calls(module, self.memo(module, source, current), undo)
        return len(SOURCES)

    def memo(self, module: torch.nn.Module, source: str, current: dict[str, torch.Tensor]) -> Memo:
        """What stands around ``module``."""
        return Memo(module, source, current)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("a result outlives its generation", _NeverForgets()),)


@dataclass
class Memo:
    """The last result of a module, and what it was computed from."""

    module: torch.nn.Module
    source: str
    current: dict[str, torch.Tensor]
    made_from: tuple[Any, ...] | None = None
    mode: Any = None
    result: Any = None

    @property
    def reads_source(self) -> bool:
        """Whether the source itself stands for what is read."""
        return isinstance(self.module, torch.nn.Linear)

    def __call__(self, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        # called on its own, or the transformer was called by position, or each call needs a graph for gradients
        if self.source not in self.current or torch.is_grad_enabled():
            return proceed(*args, **kwargs)
        tensors, mode = self.tensors(args), autocast_state(args[0].device)
        if self.made_from is None or self.mode != mode or not _same(self.made_from, tensors):
            made_from = tuple((tensor, mutation_version(tensor)) for tensor in tensors)
            self.result = proceed(*args, **kwargs)
            self.made_from, self.mode = made_from, mode
        return self.result

    def tensors(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """What the result is made from; holding on to it keeps its identity from being reused.

        The embedder reads a cast of its source, which may be a new tensor in every step; the others read what they
        are handed, and the refiner is handed the embedder's result.
        """
        read = (self.current[self.source],) if self.reads_source else args
        return (*read, *self.module.parameters(), *self.module.buffers())


def _same(made_from: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> bool:
    return len(made_from) == len(tensors) and all(
        one is other and is_unmodified(one, since) for (one, since), other in zip(made_from, tensors, strict=True)
    )


class _Stale(Memo):
    def tensors(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        return ()


@dataclass(frozen=True)
class _NeverForgets(HoistStepInvariants):
    def memo(self, module: torch.nn.Module, source: str, current: dict[str, torch.Tensor]) -> Memo:
        return _Stale(module, source, current)
