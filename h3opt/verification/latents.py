"""What the latents look like on their way: traced step by step, and told from noise and from a grid of patches."""

from __future__ import annotations

import dataclasses
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
        steps: for each step ``{"video", "audio"}``: root mean square after it, ``{"video_motion", "audio_motion"}``:
            root mean square of what it changed.
        patch: cells of one row of the packed sequence, (frames, height, width).
        ended: called when a generation has been denoised.
    """

    initial: torch.Tensor | None = None
    audio_initial: torch.Tensor | None = None
    final: torch.Tensor | None = None
    audio_final: torch.Tensor | None = None
    steps: list[dict[str, float]] = field(default_factory=list)
    patch: tuple[int, int, int] = (1, 2, 2)
    ended: Callable[[], None] | None = None

    def snapshot(self) -> LatentTrace:
        """A copy that later generations do not change."""
        return dataclasses.replace(self, steps=list(self.steps), ended=None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types: the steps, and :func:`adjacent_cell_cosine` of the final latents."""
        whiteness = adjacent_cell_cosine(self.final, self.patch) if self.final is not None else None
        return {
            "steps": [{name: round(found, 6) for name, found in step.items()} for step in self.steps],
            "adjacent_cell_cosine": whiteness.to_dict() if whiteness is not None else None,
        }


def trace_latents(view: PipelineView, undo: ExitStack) -> LatentTrace:
    """Record the latents of the next generation; a later generation starts the record anew.

    Args:
        view: a whole pipeline's.
        undo: stops recording.

    Raises:
        PipelineError: this is a bare model, or a pipeline without MiniMax-H3's denoising steps.
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
        found = {}
        for stream, name in LATENTS.items():
            now = getattr(state, name).detach().clone()  # diffusers writes to it in place
            found[stream] = _rms(now)
            found[f"{stream}_motion"] = _rms(now - before[stream])
            before[stream] = now
        trace.steps.append(found)

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
        within: of neighbours that one row of the packed sequence holds; NaN where a row holds one cell.
        across: of neighbours in different rows.
        frames: of one cell in successive frames; NaN where there is one frame.
        pairs: root mean square over all pairs of cells of a frame, in units of what unrelated ones have, the inverse
            square root of the channels: 1.14 at most was seen for white latents, 2.6 at least for a small clip's scene.
    """

    within: float
    across: float
    frames: float = float("nan")
    pairs: float = float("nan")

    @property
    def mean(self) -> float:
        """Over both kinds: 0.06 was seen for independent patches, 0.79 for a scene."""
        return self.across if self.within != self.within else (self.within + self.across) / 2

    def to_dict(self) -> dict[str, float | None]:
        """As JSON-ready types."""
        return {
            "within": None if self.within != self.within else round(self.within, 4),
            "across": None if self.across != self.across else round(self.across, 4),
            "frames": None if self.frames != self.frames else round(self.frames, 4),
            "pairs": None if self.pairs != self.pairs else round(self.pairs, 4),
        }


def adjacent_cell_cosine(latents: torch.Tensor, patch: tuple[int, int, int] = (1, 2, 2)) -> CellCosine:
    """How alike neighbours are: near 0 for white latents, near 1 for a scene.

    Args:
        latents: ``[1, channels, frames, height, width]``, floating point.
        patch: cells of one row of the packed sequence, (frames, height, width).

    Raises:
        PipelineError: these are no video latents.
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
    """See :attr:`CellCosine.pairs`; ``cells``: unit vectors ``[channels, frames, height, width]``."""
    flat = cells.transpose(0, 1).flatten(2)
    channels, count = flat.shape[1:]
    every = (flat @ flat.mT).square().sum((1, 2))  # of squared cosines, as ‖XᵀX‖ = ‖XXᵀ‖; the diagonal has ones
    return float(((every - count) / (count * (count - 1))).clamp(min=0).mean().mul(channels).sqrt())


def excess_kurtosis(noise: torch.Tensor) -> tuple[float, float]:
    """Fourth standardised moment less 3, and its standard error sqrt(24 / n) under a Gaussian: 0 for it, -1.2 for a
    uniform distribution."""
    values = noise.detach().double().flatten()
    centred = values - values.mean()
    variance = centred.square().mean()
    kurtosis = centred.pow(4).mean() / variance.square() - 3
    return float(kurtosis), (24 / values.numel()) ** 0.5


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.float().square().mean().sqrt())
