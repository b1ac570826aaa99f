"""The AdaLN tables of all steps, computed once per schedule."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call

from h3opt.device import to_host
from h3opt.errors import PipelineError
from h3opt.pass_api import Device, Exact, Mutant, PipelineView, SchedulePass, register
from h3opt.pipeline import minimax_h3
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.minimax_h3 import ADALN_PROJECTION, MAX_TIMESTEPS, transformer_blocks
from h3opt.pipeline.staleness import TensorCache, autocast_state, content_key, drop_oldest
from h3opt.pipeline.steps import after_step

KEPT_STEPS = 64
"""Steps whose tables are kept, 39 MB each for H3: a second generation with the same schedule reuses them."""


@register
@dataclass(frozen=True)
class ModulationTable(SchedulePass):
    """AdaLN depends on the timestep alone: 13.0B of H3's 33.1B parameters run once per schedule, then leave the GPU.

    Tables are computed with the very calls the block would make, one timestep tensor at a time, so the bits are those
    of the block. A forward whose timesteps no schedule announced is served too, at the price of computing its tables
    when their values are new.
    """

    name = "modulation_table"
    promise = Exact()
    happens_before = (
        "All tables of a schedule are computed before its first transformer call.",
        "The rows of a step are in place before its first block runs.",
    )

    def applies(self, device: Device, view: PipelineView) -> str | None:
        return None if view.transformer is not None else "there is no transformer"

    def expect(self, view: PipelineView) -> int:
        return len(transformer_blocks(view.transformer)) if view.transformer is not None else 0

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        tables = self.tables(view.transformer)
        undo.callback(tables.return_weights)
        for block, projection in zip(tables.blocks, tables.projections, strict=True):
            undo.callback(setattr, block, ADALN_PROJECTION, projection.to(tables.device))
            for weight in projection.parameters():
                weight.data = to_host(weight.data)
            setattr(block, ADALN_PROJECTION, TableRows(tables.blank))
        wrap_calls(view.transformer, tables.select, undo)
        after_step(view.pipe, minimax_h3.SET_TIMESTEPS_STEP, tables.compute_schedule, undo)
        return len(tables.projections)

    def tables(self, transformer: Any) -> Tables:
        """The tables this pass fills and reads."""
        return Tables(transformer)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("every step reads the first step's rows", _AlwaysFirstStep()),)


class TableRows(torch.nn.Module):
    """Replaces a block's AdaLN projection: returns the rows of the current step.

    ``rows`` is ``[3 * MAX_TIMESTEPS, 6 * hidden_size]`` whatever the number of timesteps, so that one captured graph
    serves them all; the rows past the current ones are never indexed.
    """

    rows: torch.Tensor

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows, persistent=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PipelineError("A copy would keep the tables of one step. Call restore() before copying or saving.")

    def forward(self, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.rows.chunk(6, dim=-1)


class Tables:
    """The tables of all blocks per step, looked up by the step's timestep tensor: no device value is read back.

    Attributes:
        steps: timestep tensor of a step → tables, one per block.
        by_embedding: content of the timestep embedding → tables. The embedding is the key, not the timestep: an adapter
            in the embedder may have been set to another strength since.
        computed_from: autocast and weights that all tables were computed with.
    """

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer
        self.blocks: Sequence[Any] = transformer_blocks(transformer)
        self.projections = [getattr(block, ADALN_PROJECTION) for block in self.blocks]
        weight = self.projections[0].linear.weight
        self.device = weight.device
        self.blank = weight.new_zeros(3 * MAX_TIMESTEPS, weight.shape[0] // 3)
        self.steps: TensorCache[list[torch.Tensor]] = TensorCache()
        self.by_embedding: dict[Any, list[torch.Tensor]] = {}
        self.computed_from: tuple[Any, ...] = ()

    def compute_schedule(self, state: Any) -> None:
        """Compute the tables of all steps of the schedule that the pipeline has just computed."""
        self.steps.clear()
        self.prepare([timestep for timestep, _ in state.get(minimax_h3.ROW_TIMESTEPS)])

    def prepare(self, timesteps: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the tables of ``timesteps``, each ``[distinct timesteps]``; those of earlier schedules are reused."""
        if max(timestep.numel() for timestep in timesteps) > MAX_TIMESTEPS:
            raise PipelineError(
                f"A forward has more than {MAX_TIMESTEPS} distinct timesteps, which modulation_table has no room for. "
                "Turn the pass off."
            )
        if self.computed_from != (current := self.dependencies()):
            self.by_embedding.clear()
            self.computed_from = current
        with torch.no_grad():
            embeddings = [minimax_h3.embed_timestep(self.transformer, timestep) for timestep in timesteps]
        keys = [content_key(embedding) for embedding in embeddings]
        new = {key: temb for key, temb in zip(keys, embeddings, strict=True) if key not in self.by_embedding}
        self.by_embedding.update(self.compute(new) if new else {})
        for key, timestep in zip(keys, timesteps, strict=True):
            self.by_embedding[key] = self.by_embedding.pop(key)  # the tables used last are dropped last
            self.steps.put(timestep, self.by_embedding[key])
        drop_oldest(self.by_embedding, max(KEPT_STEPS, len(timesteps)))
        self.steps.keep_last(max(KEPT_STEPS, len(timesteps)))
        return [self.by_embedding[key] for key in keys]

    def compute(self, embeddings: dict[Any, torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
        """Compute the tables of all blocks for each embedding; weights come to the GPU block by block."""
        tables: dict[Any, list[torch.Tensor]] = {key: [] for key in embeddings}
        with torch.no_grad():
            for projection in self.projections:
                weights = {name: weight.to(self.device) for name, weight in projection.named_parameters()}
                for key, temb in embeddings.items():
                    computed = torch.cat(functional_call(projection, weights, (temb,)), dim=-1)
                    rows = torch.zeros_like(self.blank, dtype=computed.dtype)  # autocast may choose another dtype
                    rows[: computed.shape[0]] = computed
                    tables[key].append(rows)
        return tables

    def select(self, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        """Put the rows of this call's timesteps in place, then go on to the transformer."""
        timestep = minimax_h3.forward_timestep(args, kwargs)
        if self.computed_from != self.dependencies():
            self.steps.clear()
        for block, rows in zip(self.blocks, self.rows(timestep), strict=True):
            getattr(block, ADALN_PROJECTION).rows = rows
        return proceed(*args, **kwargs)

    def dependencies(self) -> tuple[Any, ...]:
        """What tables depend on besides the timestep: autocast, and the weights they are computed from."""
        modules = (minimax_h3.time_embedder(self.transformer), *self.projections)
        weights = (weight for module in modules for weight in module.parameters() if not weight.is_inference())
        return (*autocast_state(self.device), *((id(weight), weight._version) for weight in weights))

    def rows(self, timestep: torch.Tensor) -> list[torch.Tensor]:
        """The tables of ``timestep``, one per block."""
        return self.steps.get(timestep) or self.prepare([timestep])[0]

    def return_weights(self) -> None:
        """Put the projections back where they were."""
        for projection in self.projections:
            projection.to(self.device)


class _FirstStepTables(Tables):
    def rows(self, timestep: torch.Tensor) -> list[torch.Tensor]:
        super().rows(timestep)
        return self.steps.first()


@dataclass(frozen=True)
class _AlwaysFirstStep(ModulationTable):
    def tables(self, transformer: Any) -> Tables:
        return _FirstStepTables(transformer)
