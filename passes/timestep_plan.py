"""The schedule of a generation, computed on the host and sent to the device in one copy per dtype."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from h3opt.pass_api import Device, Exact, Mutant, PipelineView, SchedulePass, register
from h3opt.pipeline.minimax_h3 import ROW_INDICES, ROW_TIMESTEPS, SCHEDULERS, SET_TIMESTEPS_STEP
from h3opt.pipeline.steps import components_on, copy_state, execution_device, find_loops, find_steps, wrap_step


@register
@dataclass(frozen=True)
class TimestepPlan(SchedulePass):
    """The whole schedule goes to the device in one copy per dtype; diffusers copies and waits several times a step.

    The unmodified step computes the schedule from device tensors: three ``float(...)`` of them per denoising step, each
    of which waits for the device, then two copies. Here the same code runs on the host, where it reads the same values.
    """

    name = "timestep_plan"
    promise = Exact()
    happens_before = (
        "The layout's row indices reach the host before the schedule is computed.",
        "All of the schedule is on its way to the device before anything that reads it is launched on the same stream.",
    )

    def applies(self, device: Device, view: PipelineView) -> str | None:
        if find_steps(view.pipe, SET_TIMESTEPS_STEP):
            return None
        return f"there is no pipeline with a {SET_TIMESTEPS_STEP}, so there is no schedule"

    def expect(self, view: PipelineView) -> int:
        """A step for each denoising loop: each loop needs a schedule."""
        return len(find_loops(view.pipe))

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        steps = find_steps(view.pipe, SET_TIMESTEPS_STEP)
        for step in steps:
            wrap_step(step, self.run_on_host, undo, innermost=True)  # other wrappers see the schedule on the device
        return len(steps)

    def run_on_host(self, proceed: Any, components: Any, state: Any) -> Any:
        """Run the step as if the pipeline were on the CPU, then send the schedule to the pipeline's device."""
        device = torch.device(execution_device(components))
        indices = zip(ROW_INDICES, to_host([state.get(name) for name in ROW_INDICES]), strict=True)
        host_state = copy_state(state, **dict(indices))
        proceed(components_on(components, torch.device("cpu")), host_state)

        schedulers = [getattr(components, name) for name in SCHEDULERS]
        schedules = [(scheduler.sigmas, scheduler.timesteps) for scheduler in schedulers]
        tensors, structure = tree_flatten((schedules, host_state.get(ROW_TIMESTEPS)))
        schedules, row_timesteps = tree_unflatten(self.send(tensors, device), structure)
        state.values.update({name: value for name, value in host_state.values.items() if name not in ROW_INDICES})
        for scheduler, (sigmas, timesteps), name in zip(schedulers, schedules, SCHEDULERS.values(), strict=True):
            scheduler.sigmas, scheduler.timesteps = sigmas, timesteps
            state.set(name, timesteps)
        state.set(ROW_TIMESTEPS, row_timesteps)
        return components, state

    def send(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Copy host tensors to ``device``: one transfer per dtype, then each tensor gets memory of its own."""
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
        return (Mutant("every tensor of a dtype is the first tensor of its shape", _FirstOfEachShape()),)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Bring 1-D tensors of one dtype to the host in one transfer."""
    return list(torch.cat(list(tensors)).cpu().split([tensor.numel() for tensor in tensors]))


@dataclass(frozen=True)
class _FirstOfEachShape(TimestepPlan):
    def send(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        first = {(tensor.dtype, tensor.shape): tensor for tensor in reversed(tensors)}
        return super().send([first[tensor.dtype, tensor.shape] for tensor in tensors], device)
