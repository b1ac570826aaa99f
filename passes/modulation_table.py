"""The AdaLN tables of all steps, computed once per schedule."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.device import to_host
from h3opt.pass_api import Device, Exact, Mutant, PipelineView, SchedulePass, register
from h3opt.pipeline import minimax_h3
from h3opt.pipeline.adaln_tables import Tables, compute_by_itself, with_rows
from h3opt.pipeline.adapters import before_merges
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.minimax_h3 import ADALN_PROJECTION, transformer_blocks
from h3opt.pipeline.staleness import (
    is_managed,
)
from h3opt.pipeline.steps import after_step


@register
@dataclass(frozen=True)
class ModulationTable(SchedulePass):
    """AdaLN depends on the timestep alone: 13.0B of H3's 33.1B parameters run once per schedule, then leave the GPU.

    Tables are computed with the very calls the block would make, one timestep tensor at a time, so the bits are those
    of the block. A forward whose timesteps no schedule announced is served too, at the price of computing its tables
    when their values are new. Tables are computed again when anything changes that they depend on: weights, adapters
    and their strength, autocast, training mode.

    Where gradients are wanted, or an adapter has dropout while it is trained, a table cannot stand for the projection:
    the blocks compute it themselves. With hooks inside a projection tables are computed anew for every call. In both
    cases the weights are back on the GPU, and stay there.
    """

    name = "modulation_table"
    promise = Exact()
    happens_before = (
        "All tables of a schedule are computed before its first transformer call.",
        "The rows of a step are in place before its first block runs.",
    )

    def applies(self, device: Device, view: PipelineView) -> str | None:
        if view.transformer is None:
            return "there is no transformer"
        modules = [getattr(block, ADALN_PROJECTION) for block in transformer_blocks(view.transformer)]
        if any(is_managed(module) for module in modules):
            return "another library moves or casts the AdaLN weights around every call"
        return None

    def expect(self, view: PipelineView) -> int:
        return len(transformer_blocks(view.transformer)) if view.transformer is not None else 0

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        tables = self.tables(view.transformer)
        undo.callback(tables.return_weights)
        for projection in tables.projections:
            undo.callback(compute_by_itself, projection)
            original: Any = type(projection)
            projection.__class__ = with_rows(original)
            projection.register_buffer("rows", None, persistent=False)
            for weight in projection.parameters():
                weight.data = to_host(weight.data)
        before_merges(view.transformer, tables.forget, undo)
        wrap_calls(view.transformer, tables.select, undo)
        after_step(view.pipe, minimax_h3.SET_TIMESTEPS_STEP, tables.compute_schedule, undo)
        return len(tables.projections)

    def tables(self, transformer: Any) -> Tables:
        """The tables this pass fills and reads."""
        return Tables(transformer)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("every step reads the first step's rows", _AlwaysFirstStep()),)


class _FirstStepTables(Tables):
    def rows(self, timestep: torch.Tensor) -> list[torch.Tensor]:
        super().rows(timestep)
        return self.steps.first()


@dataclass(frozen=True)
class _AlwaysFirstStep(ModulationTable):
    def tables(self, transformer: Any) -> Tables:
        return _FirstStepTables(transformer)
