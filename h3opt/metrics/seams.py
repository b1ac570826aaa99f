"""Seams along the borders of decoder tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from h3opt.errors import PipelineError
from h3opt.metrics.video import frames_of, luma


def seam_visibility(video: torch.Tensor, rows: Sequence[int], columns: Sequence[int], step: int = 16) -> float:
    """How much more a picture changes across the borders of tiles than across other places: 1 where nothing shows.

    The mean absolute difference of neighbouring pixels over one border, divided by the mean over all other lines
    at multiples of `step`: a decoder whose smallest patch is `step` pixels changes there too, seams or not. The
    worst border counts, rows and columns apart, so that one visible seam is not averaged away.

    Args:
        video: [batch, frames, 3, height, width] or [frames, 3, height, width], floating point.
        rows, columns: where borders are: the pixel below, or to the right of, each.
        step: of the lines compared with, in pixels; 1 for all lines.

    Returns:
        the worst ratio; infinite where the rest is flat and a border is not, 1 where all is flat.

    Raises:
        PipelineError: there is no border, one lies outside the frame, or no other line is left to compare with.
    """
    if video.ndim not in (4, 5) or video.numel() == 0 or not video.is_floating_point():
        raise PipelineError(f"seams are looked for in floating point videos, got {video.dtype} {list(video.shape)}")
    if not rows and not columns:
        raise PipelineError("a picture of one tile has no seams; pass at least one border")
    worst = 0.0
    for dim, borders in ((-2, sorted(set(rows))), (-1, sorted(set(columns)))):
        length = video.shape[dim]
        others = [line for line in range(step, length, step) if line not in borders]
        if not borders:
            continue
        if borders[0] < 1 or borders[-1] >= length or not others:
            raise PipelineError(
                f"borders {borders} and a line at a multiple of {step} besides must lie within {length} pixels; "
                "pass borders inside the frame, or a smaller step"
            )
        elsewhere = sum(_change(video, line, dim) for line in others) / len(others)
        for line in borders:
            change = _change(video, line, dim)
            flat = 1.0 if change == 0 else math.inf
            worst = max(worst, change / elsewhere if elsewhere else flat)
    return worst


def _change(video: torch.Tensor, line: int, dim: int) -> float:
    before, after = (video.select(dim, at).double() for at in (line - 1, line))
    return (after - before).abs().mean().item()


_NEIGHBOURS = 6  # lines to either side that say how rough the picture is there


_SMOOTH = 1 / 255  # a step of less than one 8-bit level is nothing anyone could see


Borders = tuple[list[int], list[int]]
"""(rows, columns) at which a tile starts or ends; a border at ``y`` lies between lines ``y - 1`` and ``y``."""


def tile_borders(vae: Any, height: int, width: int) -> Borders:
    """Where tiles of a MiniMax-H3 video decoder start and end inside a frame, in pixels."""
    if not vae.use_tiling:
        return [], []
    found = []
    for length, size, overlap in (
        (height, vae.tile_sample_min_height, vae.tile_sample_min_overlap_height),
        (width, vae.tile_sample_min_width, vae.tile_sample_min_overlap_width),
    ):
        starts, sizes, _ = vae._split_tiles(length, size, overlap)
        edges = {*starts, *(start + size for start, size in zip(starts, sizes, strict=True))}
        found.append(sorted(edge for edge in edges if 0 < edge < length))
    return found[0], found[1]


def seam_steps(
    video: torch.Tensor, borders: Borders | None = None, reference: torch.Tensor | None = None
) -> dict[tuple[str, int], float]:
    """How much larger the step across a border is than the steps across the lines beside it; 1 where nothing is seen.

    A step is the median along the line and over time, so that the edge of an object, which covers part of a line or
    moves, is no seam.

    Args:
        video: ``[1, frames, 3, height, width]`` or ``[frames, 3, height, width]``, floating point in [0, 1].
        borders: where to look; every line if ``None``.
        reference: the same scene without seams, of one shape: what differs from it is looked at, so that structure of
            the scene neither hides a seam nor looks like one.

    Returns:
        ``("row" or "column", line)`` → ratio.

    Raises:
        PipelineError: this is no video.
    """
    picture = luma(frames_of(video))
    if reference is not None:
        picture = picture - luma(frames_of(reference)).to(picture.device)
    found = {}
    for word, dim, lines in (("row", 1, borders and borders[0]), ("column", 2, borders and borders[1])):
        steps = picture.diff(dim=dim).abs()
        along = steps.median(dim=3 - dim).values.median(dim=0).values  # [lines - 1]; entry y - 1 is border y
        for line in range(1, along.numel() + 1) if lines is None else lines:
            beside = [
                along[other - 1]
                for other in range(line - _NEIGHBOURS, line + _NEIGHBOURS + 1)
                if other != line and 1 <= other <= along.numel()
            ]
            usual = float(torch.stack(beside).median()) if beside else 0.0
            found[word, line] = (float(along[line - 1]) + _SMOOTH) / (usual + _SMOOTH)
    return found
