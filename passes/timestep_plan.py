"""The schedule of a generation, planned on the host and sent to the device in one go."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from h3opt.pass_api import Device, Exact, Mutant, PipelineView, SchedulePass, register

STEP = "MiniMaxH3SetTimestepsStep"
INDICES = ("video_indices", "audio_indices")
"""What the step reads on the host: the rows of each modality, int64."""


@register
@dataclass(frozen=True)
class TimestepPlan(SchedulePass):
    """The whole schedule goes to the device in one copy per dtype; diffusers copies and waits several times a step.

    The unmodified step makes its plan out of device tensors: three ``float(...)`` of them per denoising step, each of
    which waits for the device, then two copies. Here the same code runs on the host, where it reads the same values.
    """

    name = "timestep_plan"
    promise = Exact()
    happens_before = (
        "The layout's row indices reach the host before the plan is made.",
        "All of the plan is on its way to the device before anything that reads it is launched on the same stream.",
    )

    def applies(self, device: Device, view: PipelineView) -> str | None:
        return None if view.steps(STEP) else f"there is no pipeline with a {STEP}, so there is no plan"

    def expect(self, view: PipelineView) -> int:
        """One per denoising loop: each needs a schedule."""
        return len(view.loops())

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        steps = view.steps(STEP)
        for step in steps:
            view.around_step(step, self.plan_on_host, undo, innermost=True)  # others see the plan on the device
        return len(steps)

    def plan_on_host(self, proceed: Any, components: Any, state: Any) -> Any:
        """Run the step as if the pipeline were on the CPU, then send what it made to where the pipeline is."""
        device = torch.device(components._execution_device)
        indices = dict(zip(INDICES, to_host([state.get(name) for name in INDICES]), strict=True))
        host = PipelineState({**state.values, **indices}, state.kwargs_mapping)
        proceed(_OnHost(components), host)

        schedulers = (components.scheduler, components.audio_scheduler)
        steps = host.get("row_timestep_plan")
        made = [tensor for one in schedulers for tensor in (one.sigmas, one.timesteps)]
        made += [tensor for step in steps for tensor in step]
        sent = iter(self.send(made, device))
        for one in schedulers:
            one.sigmas, one.timesteps = next(sent), next(sent)
        state.values.update({name: value for name, value in host.values.items() if name not in INDICES})
        state.set("timesteps", components.scheduler.timesteps)
        state.set("audio_timesteps", components.audio_scheduler.timesteps)
        state.set("row_timestep_plan", [tuple(next(sent) for _ in step) for step in steps])
        return components, state

    def send(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Copies of host tensors on ``device``: one transfer per dtype, then each gets memory of its own."""
        sent: dict[int, torch.Tensor] = {}
        for dtype in {tensor.dtype: None for tensor in tensors}:
            group = [tensor for tensor in tensors if tensor.dtype == dtype]
            packed = torch.empty(sum(tensor.numel() for tensor in group), dtype=dtype, pin_memory=device.type == "cuda")
            torch.cat([tensor.reshape(-1) for tensor in group], out=packed)
            parts = packed.to(device, non_blocking=True).split([tensor.numel() for tensor in group])
            for tensor, part in zip(group, parts, strict=True):
                sent[id(tensor)] = part.view(tensor.shape).clone()
        return [sent[id(tensor)] for tensor in tensors]

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("every tensor of a dtype is the first one of its shape", _FirstOfItsShape()),)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """1-D tensors of one dtype, brought to the host in one transfer."""
    return list(torch.cat(list(tensors)).cpu().split([tensor.numel() for tensor in tensors]))


class _OnHost:
    """A pipeline's components, said to run on the CPU."""

    _execution_device = torch.device("cpu")

    def __init__(self, components: Any) -> None:
        self._components = components

    def __getattr__(self, name: str) -> Any:
        return getattr(self._components, name)


@dataclass(frozen=True)
class _FirstOfItsShape(TimestepPlan):
    def send(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        first = {(tensor.dtype, tensor.shape): tensor for tensor in reversed(tensors)}
        return super().send([first[tensor.dtype, tensor.shape] for tensor in tensors], device)
