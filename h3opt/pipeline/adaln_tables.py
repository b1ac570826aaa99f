"""Tables of AdaLN: what the projections of all blocks give for each timestep, and the class that hands out their rows.

AdaLN depends on the timestep alone, so the projection of a block gives the same rows in every forward at that timestep.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.func import functional_call

from h3opt.device import to_host
from h3opt.errors import PipelineError
from h3opt.pipeline import minimax_h3
from h3opt.pipeline.adapters import scale_of_call, scaled_adapters
from h3opt.pipeline.minimax_h3 import ADALN_PROJECTION, MAX_TIMESTEPS, transformer_blocks
from h3opt.pipeline.staleness import (
    TensorCache,
    TensorSnapshot,
    autocast_state,
    content_key,
    drop_oldest,
    has_hooks,
    is_managed,
    module_state,
)

KEPT_STEPS = 64
"""Steps whose tables are kept, 39 MB each for H3: a second generation with the same schedule reuses them."""


class TableRows(torch.nn.Module):
    """Mixed into the class of a block's AdaLN projection while tables serve it.

    The projection stays the object that it was, with its parameters, adapters and hooks; only ``forward`` changes.

    Attributes:
        rows: the rows of the current step, ``[3 * MAX_TIMESTEPS, 6 * hidden_size]`` whatever the number of timesteps,
            so that one captured graph serves them all; the rows past the current ones are never indexed. ``None``
            while the projection computes by itself.
    """

    rows: torch.Tensor | None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PipelineError("A copy would keep the tables of one step. Call restore() before copying or pickling.")

    def forward(self, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not isinstance(self, TableRows):  # a library's hook has kept this method, and the pass is off again
            return type(self).forward(self, temb)
        if self.rows is None:
            computed: tuple[torch.Tensor, ...] = super().forward(temb)
            return computed
        return self.rows.chunk(6, dim=-1)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Cast and move the projection; weights that wait in host memory while rows are on a GPU stay there."""
        waits = self.rows is not None and self.rows.device.type == "cuda"
        result = super()._apply(fn, recurse)
        for weight in self.parameters() if waits else ():
            if weight.device.type == "cuda":
                weight.data = to_host(weight.data)
        return result


@cache
def with_rows(original: type) -> type:
    """Return the class of projections of class ``original`` that hand out rows; always the same, as graphs ask."""
    return type(f"{original.__name__}{TableRows.__name__}", (TableRows, original), {"__module__": __name__})


def compute_by_itself(projection: Any) -> None:
    """Give a projection the class that it had before tables served it."""
    if isinstance(projection, TableRows):
        del projection.rows
        projection.__class__ = type(projection).__bases__[1]


class _Unhooked(torch.nn.Module):
    """Calls a projection's own ``forward``: the hooks on the projection run in the block, not here."""

    def __init__(self, projection: torch.nn.Module) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
        projection: Any = self.projection
        original: Any = type(projection).__bases__[1]
        computed: tuple[torch.Tensor, ...] = original.forward(projection, temb)
        return computed


class Tables:
    """The tables of all blocks per step, looked up by the step's timestep tensor: no device value is read back.

    Attributes:
        steps: timestep tensor of a step → tables, one per block.
        by_embedding: content of the timestep embedding → tables. The embedding is the key, not the timestep: an adapter
            in the embedder may have been set to another strength since.
    """

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer
        self.blocks: Sequence[Any] = transformer_blocks(transformer)
        self.projections = [getattr(block, ADALN_PROJECTION) for block in self.blocks]
        self.steps: TensorCache[list[torch.Tensor]] = TensorCache()
        self.by_embedding: dict[Any, list[torch.Tensor]] = {}
        self._weights = TensorSnapshot([])
        self._state: Any = None

    @property
    def device(self) -> torch.device:
        """The device on which the transformer computes."""
        return next(minimax_h3.time_embedder(self.transformer).parameters()).device

    def compute_schedule(self, state: Any) -> None:
        """Compute the tables of all steps of the schedule that the pipeline has just computed."""
        self.steps.clear()
        timesteps = [timestep for timestep, _ in state.get(minimax_h3.ROW_TIMESTEPS)]
        if not self.computes_itself(timesteps[0]) and not self.hooked():
            with scaled_adapters(self.transformer, scale_of_call(state.values)):
                self.prepare(timesteps)

    def prepare(self, timesteps: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the tables of ``timesteps``, each ``[distinct timesteps]``; those of earlier schedules are reused."""
        if max(timestep.numel() for timestep in timesteps) > MAX_TIMESTEPS:
            raise PipelineError(
                f"A forward has more than {MAX_TIMESTEPS} distinct timesteps, which modulation_table has no room for. "
                "Turn the pass off."
            )
        self.drop_stale()
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
        device = self.device
        with torch.no_grad():
            for projection in self.projections:
                unhooked = _Unhooked(projection)
                weights = {name: weight.to(device) for name, weight in unhooked.named_parameters()}
                for key, temb in embeddings.items():
                    computed = torch.cat(functional_call(unhooked, weights, (temb,)), dim=-1)
                    # autocast may choose another dtype than that of the weights
                    rows = computed.new_zeros(3 * MAX_TIMESTEPS, computed.shape[1])
                    rows[: computed.shape[0]] = computed
                    tables[key].append(rows)
        return tables

    def select(self, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        """Put the rows of this call's timesteps in place, then go on to the transformer."""
        timestep = minimax_h3.forward_timestep(args, kwargs)
        if any(is_managed(projection) for projection in self.projections):
            raise PipelineError(
                "Another library moves or casts the AdaLN weights around every call, and modulation_table has moved "
                "them. Call restore(), or turn modulation_table off."
            )
        rows: Sequence[torch.Tensor | None]
        if self.computes_itself(timestep):
            self.return_weights()
            rows = [None] * len(self.projections)
        else:
            if self.hooked():  # the result may be another in every call
                self.return_weights()
                self.forget()
            with scaled_adapters(self.transformer, scale_of_call(kwargs)):  # as the transformer's forward is about to
                self.drop_stale()
                rows = self.rows(timestep)
        for projection, current in zip(self.projections, rows, strict=True):
            projection.rows = current
        return proceed(*args, **kwargs)

    def computes_itself(self, timestep: torch.Tensor) -> bool:
        """Whether the projections must run in the blocks: a table has no gradient, and is not drawn anew."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (timestep, *self.weights())):
            return True
        inner = [module for projection in self.projections for module in projection.modules()]
        return any(isinstance(module, torch.nn.Dropout) and module.training and module.p > 0 for module in inner)

    def hooked(self) -> bool:
        """Whether hooks run inside a projection; those on a projection run in the block, with the rows."""
        return any(has_hooks(inner) for projection in self.projections for inner in projection.children())

    def drop_stale(self) -> None:
        """Drop all tables if anything changed that they depend on besides the timestep."""
        embedder = minimax_h3.time_embedder(self.transformer)
        states = [module_state(module) for module in (embedder, *self.projections)]
        state = (*autocast_state(self.device), *states)
        weights = [weight for weight in self.weights() if not weight.is_inference()]
        if self._state != state or not self._weights.matches(weights):
            self.forget()
            self._state, self._weights = state, TensorSnapshot(weights)
        if has_hooks(embedder):  # the embedding may be another in every call
            self.steps.clear()

    def forget(self, reason: str = "") -> None:
        """Drop all tables."""
        self.steps.clear()
        self.by_embedding.clear()

    def weights(self) -> list[torch.Tensor]:
        """All weights that tables are computed from."""
        modules = (minimax_h3.time_embedder(self.transformer), *self.projections)
        return [weight for module in modules for weight in module.parameters()]

    def rows(self, timestep: torch.Tensor) -> list[torch.Tensor]:
        """The tables of ``timestep``, one per block."""
        return self.steps.get(timestep) or self.prepare([timestep])[0]

    def return_weights(self) -> None:
        """Put the weights of the projections back where the transformer computes."""
        device = self.device
        for projection in self.projections:
            for inner in projection.children():
                inner.to(device)
