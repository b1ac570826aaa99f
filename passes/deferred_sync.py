"""No wait for the device between the first transformer call and the decoded media."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from h3opt.pass_api import Device, Exact, Mutant, PipelineView, SchedulePass, register
from h3opt.pipeline.minimax_h3 import AUDIO, DECODE_STEPS, SCHEDULERS, VIDEO
from h3opt.pipeline.steps import Overlay, find_loops, find_steps, find_steps_making, wrap_step


@register
@dataclass(frozen=True)
class DeferredSync(SchedulePass):
    """The host never waits for the device inside the loop or before decoding, so it queues decoding while steps run.

    Two things make it wait. Each scheduler searches the first timestep in its schedule (``nonzero``, ``item``), unless
    it is told where to begin. And each decode step builds latent and pixel statistics with ``torch.tensor(...,
    device=...)``, whose copy returns only when everything queued before it has run; from pinned memory it need not.
    """

    name = "deferred_sync"
    promise = Exact()
    happens_before = (
        "Both schedulers know where to begin before the first transformer call.",
        "A constant's copy is queued before the operation that reads it, on the same stream.",
    )

    def applies(self, device: Device, view: PipelineView) -> str | None:
        return None if find_loops(view.pipe) else "there is no pipeline with a denoising loop, so nothing waits"

    def expect(self, view: PipelineView) -> int:
        """Every loop, and every step that makes media."""
        return len(find_loops(view.pipe)) + len(find_steps_making(view.pipe, VIDEO, AUDIO))

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        loops, decode_steps = find_loops(view.pipe), find_steps(view.pipe, *DECODE_STEPS)
        for loop in loops:
            wrap_step(loop, self.set_begin_index, undo)
        for step in decode_steps:
            wrapper = _QueueConstants(DECODE_STEPS[type(step).__name__], self.constants())
            wrap_step(step, wrapper, undo, innermost=True)
        return len(loops) + len(decode_steps)

    def set_begin_index(self, proceed: Any, components: Any, state: Any) -> Any:
        """Run the loop with schedulers that need not search for the first timestep of their own schedule."""
        changed = []
        for component, name in SCHEDULERS.items():
            scheduler = getattr(components, component)
            # with other timesteps than the scheduler's own, only a search can tell where they begin
            if scheduler.begin_index is None and state.get(name) is scheduler.timesteps:
                scheduler.set_begin_index(0)
                changed.append(scheduler)
        try:
            return proceed(components, state)
        finally:
            for scheduler in changed:
                scheduler.set_begin_index(None)

    def constants(self) -> QueuedConstants:
        """The mode that ``torch.tensor`` runs in."""
        return QueuedConstants()

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("constants lose bits on the way to the device", _RoundConstants()),)


class QueuedConstants(TorchFunctionMode):
    """Makes ``torch.tensor(data, device=...)`` a copy from pinned memory, which the host does not wait for."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.tensor or kwargs.get("device") is None:
            return function(*args, **kwargs)
        return self.to_device(torch.tensor(*args, **{**kwargs, "device": "cpu"}), torch.device(kwargs["device"]))

    def to_device(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Queue a copy of ``host`` to ``device``."""
        staged = torch.empty(host.shape, dtype=host.dtype, pin_memory=device.type == "cuda").copy_(host)
        return staged.to(device, non_blocking=True)


@dataclass
class _QueueConstants:
    """Wraps a decode step: constants of the step itself are queued; the component decodes outside the mode."""

    component: str
    constants: QueuedConstants

    def __call__(self, proceed: Any, components: Any, state: Any) -> Any:
        decoder = getattr(components, self.component)

        def decode(*args: Any, **kwargs: Any) -> Any:
            self.constants.__exit__(None, None, None)  # captured graphs are not made for a function mode
            try:
                return decoder.decode(*args, **kwargs)
            finally:
                self.constants.__enter__()

        overlay = Overlay(components, **{self.component: Overlay(decoder, decode=decode)})
        with self.constants:
            proceed(overlay, state)
        return components, state


class _RoundedConstants(QueuedConstants):
    def to_device(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        return super().to_device(host, device).bfloat16().to(host.dtype)


@dataclass(frozen=True)
class _RoundConstants(DeferredSync):
    def constants(self) -> QueuedConstants:
        return _RoundedConstants()
