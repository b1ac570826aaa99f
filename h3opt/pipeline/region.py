"""Regions: the modules of a pipeline that are captured, and which of their sizes vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Region:
    """Modules that share captured graphs: the repeated blocks of a model, or a model as a whole.

    Attributes:
        name: e.g. ``"transformer.block"``.
        modules: the modules, all of the same class.
        dynamic_dims: for each positional or keyword argument of ``forward``, the dimensions that vary between calls
            (tokens, rows of a table); the tensors of a tuple share one entry.
        holds: how many repeated blocks of each kind one graph spans; empty for a region of repeated blocks that is
            named after the kind, where each graph spans a single block.
    """

    name: str
    modules: Sequence[torch.nn.Module]
    dynamic_dims: Mapping[str, tuple[int, ...]]
    holds: Mapping[str, int] = field(default_factory=dict)
