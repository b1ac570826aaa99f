"""Trace the latents of a generation step by step, and tell a scene from noise and from a grid of patches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from h3opt.errors import PipelineError
from h3opt.pipeline.minimax_h3 import AFTER_DENOISE_STEP, LATENTS, LOOP_SCHEDULER_STEP, PREPARE_LATENTS_STEP
from h3opt.pipeline.steps import after_step
from h3opt.pipeline.view import PipelineView


@dataclass
class LatentTrace:
    """The latents of one generation.

    Attributes:
        initial: video rows before the first step, ``[rows, channels]``; ``None`` until then.
        audio_initial: audio rows likewise.
        final: denoised video latents ``[1, channels, frames, height, width]``.
        audio_final: denoised audio latents ``[2, channels, frames]``.
        steps: for each step, ``"video"`` and ``"audio"``: root mean square of the latents after the step;
            ``"video_motion"`` and ``"audio_motion"``: root mean square of the change by the step.
        patch: latent cells in a row of the packed sequence, (frames, height, width).
        ended: called when denoising has ended.
    """

    initial: torch.Tensor | None = None
    audio_initial: torch.Tensor | None = None
    final: torch.Tensor | None = None
    audio_final: torch.Tensor | None = None
    steps: list[dict[str, float]] = field(default_factory=list)
    patch: tuple[int, int, int] = (1, 2, 2)
    ended: Callable[[], None] | None = None

    def snapshot(self) -> LatentTrace:
        """Return a copy that later generations do not change."""
        return dataclasses.replace(self, steps=list(self.steps), ended=None)

    def to_dict(self) -> dict[str, Any]:
        """The steps, and :func:`adjacent_cell_cosine` of the final latents, as JSON-ready types."""
        whiteness = adjacent_cell_cosine(self.final, self.patch) if self.final is not None else None
        return {
            "steps": [{name: round(value, 6) for name, value in step.items()} for step in self.steps],
            "adjacent_cell_cosine": whiteness.to_dict() if whiteness is not None else None,
        }


def trace_latents(view: PipelineView, undo: ExitStack) -> LatentTrace:
    """Record the latents of the next generation; each later generation replaces the record.

    Args:
        view: the view of a whole pipeline.
        undo: stops the recording.

    Raises:
        PipelineError: the view is of a bare model, or of a pipeline without MiniMax-H3's denoising steps.
    """
    trace = LatentTrace()
    before: dict[str, torch.Tensor] = {}
    if view.pipe is not None:
        trace.patch = tuple(view.pipe.patch_size)

    def start(state: Any) -> None:
        trace.initial, trace.audio_initial = (state.get(name).detach().clone() for name in LATENTS.values())
        trace.final = trace.audio_final = None
        trace.steps.clear()
        before.update(video=trace.initial, audio=trace.audio_initial)

    def step(state: Any) -> None:
        measures = {}
        for stream, name in LATENTS.items():
            now = getattr(state, name).detach().clone()  # diffusers writes to it in place
            measures[stream] = _rms(now)
            measures[f"{stream}_motion"] = _rms(now - before[stream])
            before[stream] = now
        trace.steps.append(measures)

    def end(state: Any) -> None:
        trace.final, trace.audio_final = (state.get(name).detach().clone() for name in LATENTS.values())
        before.clear()
        if trace.ended is not None:
            trace.ended()

    hooked = [
        after_step(view.pipe, name, action, undo)
        for name, action in (
            (PREPARE_LATENTS_STEP, start),
            (LOOP_SCHEDULER_STEP, step),
            (AFTER_DENOISE_STEP, end),
        )
    ]
    if not all(hooked):
        raise PipelineError(
            "The latents of this pipeline cannot be traced: it lacks MiniMax-H3's denoising steps. Pass a whole "
            "diffusers MiniMax-H3 pipeline."
        )
    return trace


@dataclass(frozen=True)
class CellCosine:
    """Mean cosine of the channel vectors of neighbouring cells.

    Attributes:
        within: of neighbours in the same row of the packed sequence; NaN where a row has a single cell.
        across: of neighbours in different rows.
        frames: of the same cell in successive frames; NaN for a single frame.
        pairs: root mean square over all pairs of cells of a frame, in units of the value for unrelated cells, which is
            the inverse square root of the number of channels. Measured: at most 1.14 for white latents, at least 2.6
            for the scene of a small clip.
    """

    within: float
    across: float
    frames: float = float("nan")
    pairs: float = float("nan")

    @property
    def mean(self) -> float:
        """The mean of both kinds of neighbours. Measured: 0.06 for independent patches, 0.79 for a scene."""
        return self.across if math.isnan(self.within) else (self.within + self.across) / 2

    def to_dict(self) -> dict[str, float | None]:
        """The cosines as JSON-ready types; NaN becomes ``None``."""
        return {name: None if math.isnan(value) else round(value, 4) for name, value in vars(self).items()}


def adjacent_cell_cosine(latents: torch.Tensor, patch: tuple[int, int, int] = (1, 2, 2)) -> CellCosine:
    """Measure how alike neighbouring cells are: near 0 for white latents, near 1 for a scene.

    Args:
        latents: ``[1, channels, frames, height, width]``, floating point.
        patch: latent cells in a row of the packed sequence, (frames, height, width).

    Raises:
        PipelineError: the tensor cannot be video latents.
    """
    if latents.ndim != 5 or latents.shape[0] != 1 or not latents.is_floating_point() or min(latents.shape[-2:]) < 2:
        raise PipelineError(
            f"Video latents must be floating point [1, channels, frames, height, width], not {latents.dtype} "
            f"{list(latents.shape)}. Pass those that leave the denoising loop."
        )
    cells = torch.nn.functional.normalize(latents.detach()[0].float(), dim=0)
    within, across = [], []
    for dim, size in ((2, patch[1]), (3, patch[2])):
        length = cells.shape[dim]
        cosine = (cells.narrow(dim, 0, length - 1) * cells.narrow(dim, 1, length - 1)).sum(0).movedim(dim - 1, 0)
        crosses = torch.arange(1, length, device=cells.device) % size == 0
        within.append(cosine[~crosses].flatten())
        across.append(cosine[crosses].flatten())
    frames = (cells[:, :-1] * cells[:, 1:]).sum(0).mean()
    return CellCosine(float(torch.cat(within).mean()), float(torch.cat(across).mean()), float(frames), _pairs(cells))


def _pairs(cells: torch.Tensor) -> float:
    """Compute :attr:`CellCosine.pairs` of unit vectors ``[channels, frames, height, width]``."""
    flat = cells.transpose(0, 1).flatten(2)
    channels, count = flat.shape[1:]
    every = (flat @ flat.mT).square().sum((1, 2))  # sum of squared cosines, as ‖XᵀX‖ = ‖XXᵀ‖; the diagonal has ones
    return float(((every - count) / (count * (count - 1))).clamp(min=0).mean().mul(channels).sqrt())


def excess_kurtosis(noise: torch.Tensor) -> tuple[float, float]:
    """Return the fourth standardised moment minus 3, and the standard error ``sqrt(24 / n)`` of it for Gaussian noise.

    The value is 0 for a Gaussian and -1.2 for a uniform distribution.
    """
    values = noise.detach().double().flatten()
    centred = values - values.mean()
    variance = centred.square().mean()
    kurtosis = centred.pow(4).mean() / variance.square() - 3
    return float(kurtosis), (24 / values.numel()) ** 0.5


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.float().square().mean().sqrt())
