"""No wait for the device between the first transformer call and the decoded media."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from h3opt.pass_api import Device, Exact, Mutant, PipelineView, SchedulePass, register

DECODES = {"MiniMaxH3VideoDecodeStep": "vae", "MiniMaxH3AudioDecodeStep": "audio_vae"}
"""Step that copies constants to the device → the component it decodes with."""


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
        return None if view.loops() else "there is no pipeline with a denoising loop, so nothing waits"

    def expect(self, view: PipelineView) -> int:
        """Every loop, and every step that makes media."""
        return len(view.loops()) + len(view.steps_making("videos", "audio"))

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        loops, decodes = view.loops(), view.steps(*DECODES)
        for loop in loops:
            view.around_step(loop, self.begin_known, undo)
        for step in decodes:
            view.around_step(step, _DecodeWith(DECODES[type(step).__name__], self.constants()), undo, innermost=True)
        return len(loops) + len(decodes)

    def begin_known(self, proceed: Any, components: Any, state: Any) -> Any:
        """Run the loop with schedulers that need not search for the first timestep of their own schedule."""
        told = []
        for scheduler, name in ((components.scheduler, "timesteps"), (components.audio_scheduler, "audio_timesteps")):
            # with other timesteps than the scheduler's own only a search finds where they begin
            if scheduler.begin_index is None and state.get(name) is scheduler.timesteps:
                scheduler.set_begin_index(0)
                told.append(scheduler)
        try:
            return proceed(components, state)
        finally:
            for scheduler in told:
                scheduler.set_begin_index(None)

    def constants(self) -> QueuedConstants:
        """What ``torch.tensor`` goes through."""
        return QueuedConstants()

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("constants lose bits on the way to the device", _Rounded()),)


class QueuedConstants(TorchFunctionMode):
    """``torch.tensor(data, device=...)`` as a copy from pinned memory, which nobody waits for."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.tensor or kwargs.get("device") is None:
            return function(*args, **kwargs)
        return self.to_device(torch.tensor(*args, **{**kwargs, "device": "cpu"}), torch.device(kwargs["device"]))

    def to_device(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """``host`` on ``device``."""
        staged = torch.empty(host.shape, dtype=host.dtype, pin_memory=device.type == "cuda").copy_(host)
        return staged.to(device, non_blocking=True)


@dataclass
class _DecodeWith:
    """Around a decode step: constants are queued in the step itself; its component decodes as ever."""

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

        seen = _Overlay(components, **{self.component: _Overlay(decoder, decode=decode)})
        with self.constants:
            proceed(seen, state)
        return components, state


class _Overlay:
    """Another object, with some attributes replaced."""

    def __init__(self, below: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _below=below)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


class _RoundedConstants(QueuedConstants):
    def to_device(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        return super().to_device(host, device).bfloat16().to(host.dtype)


@dataclass(frozen=True)
class _Rounded(DeferredSync):
    def constants(self) -> QueuedConstants:
        return _RoundedConstants()
