"""Draw a frame decoded with and without a pass that chooses tiles, the difference, and the borders of the tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from h3opt.compiler.optimize import optimize, temporarily_uninstalled
from h3opt.errors import PipelineError
from h3opt.files import atomic_write
from h3opt.metrics.seams import Borders, seam_visibility
from h3opt.metrics.video import denormalize
from h3opt.pass_api.base import Pass
from h3opt.pipeline.tiling.plan import TilePlan, plan_decode
from h3opt.pipeline.view import PipelineView


@dataclass(frozen=True)
class SeamPicture:
    """The result of :func:`seam_picture`.

    Attributes:
        name: name of the pass.
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
        """:func:`~h3opt.metrics.seams.seam_visibility` of both videos at their own borders; 1 without borders."""
        pairs = ((self.unmodified, self.unmodified_borders), (self.candidate, self.candidate_borders))
        unmodified, candidate = (seam_visibility(video, *lines) if any(lines) else 1.0 for video, lines in pairs)
        return unmodified, candidate

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-ready types; the visibility of a seam in a picture that is flat elsewhere is ``None``."""
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


def seam_picture(pipe: Any, tile_pass: Pass, latents: torch.Tensor) -> SeamPicture:
    """Decode the first chunk of ``latents`` without any pass and with ``tile_pass``.

    Passes that were installed on the pipeline before are installed again at the end.

    Args:
        pipe: a MiniMax-H3 pipeline with a video VAE.
        tile_pass: a pass with a plan of tiles.
        latents: ``[1, channels, frames, rows, columns]`` as the VAE's decoder reads them, on the device of the VAE.

    Raises:
        PipelineError: the pass has no plan of tiles, or the pipeline has no video VAE.
        H3OptError: the options of the pass do not fit a video of this size.
    """
    view = PipelineView.of(pipe)
    if view.vae is None or view.pipe is None:
        raise PipelineError("Seams are those of decoded video. Give a pipeline with a video VAE.")
    size = (latents.shape[2], latents.shape[3], latents.shape[4])
    plan = tile_pass.plan(view, size)
    if not isinstance(plan, TilePlan):
        raise PipelineError(
            f"{tile_pass.name} cuts no video into tiles, so there is no seam to show. Try tile_geometry."
        )
    before = plan_decode(view.vae, latents.shape)
    clip = latents[:, :, : before.chunks.sources[0][1]]
    with torch.no_grad(), temporarily_uninstalled(view, always_back=True):
        reference = _decode(view, clip)
        with optimize(pipe, [tile_pass]):
            candidate = _decode(view, clip)
    return SeamPicture(tile_pass.name, reference, candidate, before.borders, plan.borders)


def _decode(view: PipelineView, clip: torch.Tensor) -> torch.Tensor:
    decoded = view.vae.decode(clip, return_dict=False)[0]
    return denormalize(decoded.cpu(), view.pipe.pixel_mean, view.pipe.pixel_std)[0]
