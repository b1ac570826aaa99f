"""What a denoising step computes from the prompt and the layout alone, computed once per generation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.pass_api import Device, Exact, Mutant, PipelineView, SchedulePass, register
from h3opt.pipeline.adapters import base_layer, before_merges
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.minimax_h3 import STEP_INVARIANTS
from h3opt.pipeline.staleness import TensorSnapshot, autocast_state, has_hooks, module_state


@register
@dataclass(frozen=True)
class HoistStepInvariants(SchedulePass):
    """Context embedder, token refiner and rope give every step the same tensors: run them in the first step only.

    A result is reused while the module reads the same tensor objects and the same weights, unmodified since, under the
    same autocast; with gradients on, never. Nothing is compared by value, so nothing waits for the device; tensors
    made under ``inference_mode`` have no version counter and are compared. Writes through ``.data`` are not seen.
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
        return len(STEP_INVARIANTS)

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        inputs: dict[str, torch.Tensor] = {}
        wrapped: dict[str, LastResult] = {}

        def wrap_current() -> None:
            """Wrap the modules that the transformer has now: an adapter puts another module into their place."""
            for name, source in STEP_INVARIANTS.items():
                module = getattr(view.transformer, name)
                if name not in wrapped or wrapped[name].module is not module:
                    wrapped[name] = self.last_result(module, source, inputs)
                    wrap_calls(module, wrapped[name], undo)

        def forget(merge: str) -> None:
            for result in wrapped.values():
                result.forget()

        def remember_inputs(proceed: Any, *args: Any, **kwargs: Any) -> Any:
            wrap_current()
            inputs.update({name: kwargs[name] for name in STEP_INVARIANTS.values() if name in kwargs})
            try:
                return proceed(*args, **kwargs)
            finally:
                inputs.clear()

        wrap_calls(view.transformer, remember_inputs, undo)
        before_merges(view.transformer, forget, undo)
        wrap_current()
        return len(STEP_INVARIANTS)

    def last_result(self, module: torch.nn.Module, source: str, inputs: dict[str, torch.Tensor]) -> LastResult:
        """The wrapper around ``module``."""
        return LastResult(module, source, inputs)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("a result outlives its generation", _NeverStale()),)


class LastResult:
    """Wraps a module and reuses the last result while the module would compute the same again.

    Attributes:
        module: the wrapped module.
        source: the transformer's argument that the result depends on.
        inputs: the arguments of the transformer call that is running, by name.
    """

    def __init__(self, module: torch.nn.Module, source: str, inputs: dict[str, torch.Tensor]) -> None:
        self.module, self.source, self.inputs = module, source, inputs
        self._snapshot: TensorSnapshot | None = None
        self._state: Any = None
        self._result: Any = None

    def __call__(self, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        # The module is called on its own, or the transformer by position; or each call needs a graph for gradients; or
        # something else must happen in each call.
        if self.source not in self.inputs or torch.is_grad_enabled() or has_hooks(self.module):
            return proceed(*args, **kwargs)
        tensors, state = self.tensors(args), self.state(args)
        if self._snapshot is None or self._state != state or not self._snapshot.matches(tensors):
            snapshot = TensorSnapshot(tensors)
            self._result = proceed(*args, **kwargs)
            self._snapshot, self._state = snapshot, state
        return self._result

    def forget(self) -> None:
        """Drop the result."""
        self._snapshot = self._result = None

    def state(self, args: tuple[Any, ...]) -> Any:
        """What the result is computed from besides tensors."""
        return autocast_state(args[0].device), module_state(self.module)

    def tensors(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """The tensors that the result is computed from.

        The embedder, a linear layer, reads a cast of ``source``, which may be a new tensor in every step. The other
        modules read their arguments; the refiner's argument is the embedder's result.
        """
        read = (self.inputs[self.source],) if isinstance(base_layer(self.module), torch.nn.Linear) else args
        return (*read, *self.module.parameters(), *self.module.buffers())


class _StaleResult(LastResult):
    def state(self, args: tuple[Any, ...]) -> Any:
        return ()

    def tensors(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        return ()


@dataclass(frozen=True)
class _NeverStale(HoistStepInvariants):
    def last_result(self, module: torch.nn.Module, source: str, inputs: dict[str, torch.Tensor]) -> LastResult:
        return _StaleResult(module, source, inputs)
