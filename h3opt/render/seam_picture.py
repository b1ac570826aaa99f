"""One frame decoded with and without a pass that chooses tiles: both pictures, their difference, and tile borders."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from h3opt.compiler.optimize import optimize, temporarily_uninstalled
from h3opt.errors import PipelineError
from h3opt.metrics.seams import Borders, seam_visibility
from h3opt.metrics.video import denormalize
from h3opt.pass_api.base import Pass
from h3opt.pipeline.tiling.plan import TilePlan, plan_decode
from h3opt.pipeline.view import PipelineView
from h3opt.render.media import atomic_write


@dataclass(frozen=True)
class SeamPicture:
    """What :func:`seam_picture` decoded.

    Attributes:
        unmodified, candidate: ``[frames, 3, height, width]`` float32 in [0, 1], on the CPU.
        unmodified_borders, candidate_borders: rows and columns at which blending begins and ends.
    """

    name: str
    unmodified: torch.Tensor
    candidate: torch.Tensor
    unmodified_borders: Borders
    candidate_borders: Borders

    @property
    def seams(self) -> tuple[float, float]:
        """:func:`~h3opt.metrics.seams.seam_visibility` of each at its own borders; 1 if none shows."""
        pairs = ((self.unmodified, self.unmodified_borders), (self.candidate, self.candidate_borders))
        unmodified, candidate = (seam_visibility(video, *lines) if any(lines) else 1.0 for video, lines in pairs)
        return unmodified, candidate

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types; ``None`` for a seam against a picture that is flat elsewhere."""
        seams = [seam if math.isfinite(seam) else None for seam in self.seams]
        return {
            "largest_difference": float((self.candidate - self.unmodified).abs().max()),
            "seam_visibility": dict(zip(("unmodified", "candidate"), seams, strict=True)),
            "borders": {"unmodified": list(self.unmodified_borders), "candidate": list(self.candidate_borders)},
        }

    def write(self, path: Path) -> None:
        """Draw the middle frame as a PNG.

        Raises:
            MissingDependencyError: matplotlib is not installed.
            PipelineError: the file cannot be written.
        """
        from h3opt.render.figures import check_figures, seam_chart

        check_figures()
        frame = len(self.unmodified) // 2
        png = seam_chart(
            self.unmodified[frame], self.candidate[frame], self.unmodified_borders, self.candidate_borders, self.name,
            self.seams,
        )  # fmt: skip
        with atomic_write(path) as partial:
            partial.write_bytes(png)


def seam_picture(pipe: Any, one: Pass, latents: torch.Tensor) -> SeamPicture:
    """Decode the first clip of ``latents`` without any pass and with ``one``; the pipeline is left as it was found.

    Args:
        pipe: a MiniMax-H3 pipeline with a video VAE.
        one: a pass with a plan of tiles.
        latents: ``[1, channels, frames, rows, columns]`` as the VAE's decoder reads them, on its device.

    Raises:
        PipelineError: the pass cuts nothing, or the pipeline has no video VAE.
        H3OptError: the pass's options do not fit a video of this size.
    """
    view = PipelineView.of(pipe)
    if view.vae is None or view.pipe is None:
        raise PipelineError("Seams are those of decoded video. Give a pipeline with a video VAE.")
    size = (latents.shape[2], latents.shape[3], latents.shape[4])
    plan = one.plan(view, size)
    if not isinstance(plan, TilePlan):
        raise PipelineError(f"{one.name} cuts no video into tiles, so there is no seam to show. Try tile_geometry.")
    before = plan_decode(view.vae, latents.shape)
    clip = latents[:, :, : before.chunks.sources[0][1]]
    with torch.no_grad(), temporarily_uninstalled(view, always_back=True):
        reference = _decode(view, clip)
        with optimize(pipe, [one]):
            candidate = _decode(view, clip)
    return SeamPicture(one.name, reference, candidate, before.borders, plan.borders)


def _decode(view: PipelineView, clip: torch.Tensor) -> torch.Tensor:
    decoded = view.vae.decode(clip, return_dict=False)[0]
    return denormalize(decoded.cpu(), view.pipe.pixel_mean, view.pipe.pixel_std)[0]
