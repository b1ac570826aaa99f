"""The AdaLN tables of all steps, computed once per schedule."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.func import functional_call

from h3opt.device import to_host
from h3opt.errors import PipelineError
from h3opt.pass_api import Device, Exact, Mutant, PipelineView, SchedulePass, register
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.staleness import autocast_state, is_unmodified, mutation_version

MAX_TIMESTEPS = 4  # distinct timesteps in one forward: video, audio, keyframes, references
KEPT = 64  # steps whose tables stay, 39 MB each for H3: a second generation with the same schedule finds its own


class TableRows(torch.nn.Module):
    """Stands in for a block's AdaLN projection: hands out the rows of the current step.

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
        return len(view.transformer.transformer_blocks) if view.transformer is not None else 0

    def install(self, view: PipelineView, undo: ExitStack) -> int:
        tables = self.tables(view.transformer)
        undo.callback(tables.return_weights)
        for block, projection in zip(view.transformer.transformer_blocks, tables.projections, strict=True):
            undo.callback(setattr, block, "adaln_proj", projection.to(tables.device))
            for weight in projection.parameters():
                weight.data = to_host(weight.data)
            block.adaln_proj = TableRows(tables.blank)
        wrap_calls(view.transformer, tables.select, undo)
        view.after_step("MiniMaxH3SetTimestepsStep", tables.compute_schedule, undo)
        return len(tables.projections)

    def tables(self, transformer: Any) -> Tables:
        """The tables this pass fills and reads."""
        return Tables(transformer)

    def mutants(self) -> Sequence[Mutant]:
        return (Mutant("every step reads the first step's rows", _StuckOnFirst()),)


@dataclass
class Tables:
    """Rows per step and block, found by the identity of the step's timestep tensor: no device value is read back."""

    transformer: Any
    steps: dict[int, tuple[torch.Tensor, int | torch.Tensor, list[torch.Tensor]]] = field(default_factory=dict)
    made: dict[tuple[torch.dtype, bytes], list[torch.Tensor]] = field(default_factory=dict)  # by the embedding's value
    made_with: tuple[Any, ...] = ()  # see stamp()

    def __post_init__(self) -> None:
        self.projections = [block.adaln_proj for block in self.transformer.transformer_blocks]
        weight = self.projections[0].linear.weight
        self.device = weight.device
        self.blank = weight.new_zeros(3 * MAX_TIMESTEPS, weight.shape[0] // 3)

    def compute_schedule(self, state: Any) -> None:
        """Have the tables of every step of the plan the pipeline has just made."""
        self.steps.clear()
        self.prepare([timestep for timestep, _ in state.get("row_timestep_plan")])

    def prepare(self, timesteps: Sequence[torch.Tensor]) -> None:
        """Have the tables of ``timesteps``, each ``[distinct timesteps]``: those of an earlier schedule serve again."""
        if max(timestep.numel() for timestep in timesteps) > MAX_TIMESTEPS:
            raise PipelineError(
                f"A forward has more than {MAX_TIMESTEPS} distinct timesteps, which modulation_table has no room for. "
                "Turn the pass off."
            )
        if self.made_with != self.stamp():
            self.made.clear()
            self.made_with = self.stamp()
        # Not the timestep's value: an adapter in the embedder may have been set to another strength since.
        with torch.no_grad():
            embedded = [self._embed(timestep) for timestep in timesteps]
        spelled = [(temb.dtype, temb.cpu().view(torch.uint8).numpy().tobytes()) for temb in embedded]
        new = {key: temb for key, temb in zip(spelled, embedded, strict=True) if key not in self.made}
        self.made.update(self.compute(new) if new else {})
        for key, timestep in zip(spelled, timesteps, strict=True):
            self.made[key] = self.made.pop(key)  # the last ones used stay longest
            self.steps[id(timestep)] = (timestep, mutation_version(timestep), self.made[key])
        for key in list(self.made)[: -max(KEPT, len(timesteps))]:
            del self.made[key]
        for step in list(self.steps)[: -max(KEPT, len(timesteps))]:
            del self.steps[step]

    def compute(self, embeddings: dict[Any, torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
        """The tables of all blocks for each embedded timestep; weights visit the GPU block by block."""
        tables: dict[Any, list[torch.Tensor]] = {key: [] for key in embeddings}
        with torch.no_grad():
            for projection in self.projections:
                visiting = {name: weight.to(self.device) for name, weight in projection.named_parameters()}
                for key, temb in embeddings.items():
                    made = torch.cat(functional_call(projection, visiting, (temb,)), dim=-1)
                    rows = torch.zeros_like(self.blank, dtype=made.dtype)  # autocast may have its own
                    rows[: made.shape[0]] = made
                    tables[key].append(rows)
        return tables

    def select(self, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        """Put the rows of this call's timesteps in place, then go on to the transformer."""
        timestep = kwargs["timestep"] if "timestep" in kwargs else args[3]
        if self.made_with != self.stamp():
            self.steps.clear()
        known = self.steps.get(id(timestep))
        if known is None or known[0] is not timestep or not is_unmodified(timestep, known[1]):
            self.prepare([timestep])
        for block, rows in zip(self.transformer.transformer_blocks, self.rows(timestep), strict=True):
            block.adaln_proj.rows = rows
        return proceed(*args, **kwargs)

    def stamp(self) -> tuple[Any, ...]:
        """What tables depend on beside the timestep: autocast, and the weights they are computed from."""
        modules = (self.transformer.time_embedder, *self.projections)
        weights = (weight for module in modules for weight in module.parameters() if not weight.is_inference())
        return (*autocast_state(self.device), *((id(weight), weight._version) for weight in weights))

    def rows(self, timestep: torch.Tensor) -> list[torch.Tensor]:
        """The tables of ``timestep``, one per block."""
        return self.steps[id(timestep)][2]

    def return_weights(self) -> None:
        """Put the projections back where they were."""
        for projection in self.projections:
            projection.to(self.device)

    def _embed(self, timestep: torch.Tensor) -> torch.Tensor:
        embedder = self.transformer.time_embedder
        dtype = next(embedder.parameters()).dtype
        return embedder(self.transformer.time_proj(timestep).to(dtype))


class _FirstRows(Tables):
    def rows(self, timestep: torch.Tensor) -> list[torch.Tensor]:
        return next(iter(self.steps.values()))[2]


@dataclass(frozen=True)
class _StuckOnFirst(ModulationTable):
    def tables(self, transformer: Any) -> Tables:
        return _FirstRows(transformer)
