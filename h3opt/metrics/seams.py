"""Visibility of seams along the borders of decoder tiles.

Two measures answer two questions. :func:`seam_visibility` gives a single score for a video, to compare ways of tiling
with each other: the mean change over a border against that over the borders of the decoder's patches.
:func:`border_step_ratios` gives a ratio for every line, to detect a fault: the median step over a line against those
over the lines beside it, so that the edges of objects do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from h3opt.errors import PipelineError
from h3opt.metrics.video import frames_of, luma

Borders = tuple[list[int], list[int]]
"""Rows and columns of borders, in pixels; a border at ``y`` lies between lines ``y - 1`` and ``y``."""

_NEIGHBOURS = 6  # lines on either side that give the usual step near a line
_VISIBLE_STEP = 1 / 255  # an 8-bit level: smaller steps are invisible


def seam_visibility(video: torch.Tensor, rows: Sequence[int], columns: Sequence[int], step: int = 16) -> float:
    """Compute how much more a video changes across borders of tiles than across other lines: 1 for invisible seams.

    The mean absolute difference of neighbouring pixels over a border, divided by the mean over all other lines at
    multiples of ``step``: a decoder that writes patches of ``step`` pixels changes there with or without seams. Rows
    and columns are compared separately, and the largest ratio counts, so that no average hides a visible seam.

    Args:
        video: ``[batch, frames, 3, height, width]`` or ``[frames, 3, height, width]``, floating point.
        rows, columns: the borders: the pixel below, or to the right of, each.
        step: distance of the lines to compare with, in pixels; 1 for all lines.

    Returns:
        The largest ratio; infinite where only a border changes, 1 where nothing changes.

    Raises:
        PipelineError: this is no video, there is no border, a border lies outside the frame, or no other line is left
            to compare with.
    """
    frames = frames_of(video)
    if not rows and not columns:
        raise PipelineError("a picture of one tile has no seams; pass at least one border")
    largest = 0.0
    for dim, borders in ((-2, sorted(set(rows))), (-1, sorted(set(columns)))):
        if not borders:
            continue
        length = frames.shape[dim]
        others = [line for line in range(step, length, step) if line not in borders]
        if borders[0] < 1 or borders[-1] >= length or not others:
            raise PipelineError(
                f"borders {borders} and a line at a multiple of {step} besides must lie within {length} pixels; "
                "pass borders inside the frame, or a smaller step"
            )
        elsewhere = sum(_mean_change(frames, line, dim) for line in others) / len(others)
        for line in borders:
            change = _mean_change(frames, line, dim)
            in_flat_picture = 1.0 if change == 0 else math.inf
            largest = max(largest, change / elsewhere if elsewhere else in_flat_picture)
    return largest


def border_step_ratios(
    video: torch.Tensor, borders: Borders | None = None, reference: torch.Tensor | None = None
) -> dict[tuple[str, int], float]:
    """Compute how much larger the step across each line is than the steps across the lines beside it; 1 without a seam.

    A step is the median of the change in luma along the line and over time: the edge of an object covers only part of a
    line, or moves, and does not change the median.

    Args:
        video: ``[1, frames, 3, height, width]`` or ``[frames, 3, height, width]``, floating point in [0, 1].
        borders: the lines to examine; every line if ``None``.
        reference: the same scene without seams, of the same shape. The difference from it is examined instead of the
            video, so that structure of the scene neither hides a seam nor looks like one.

    Returns:
        The ratio for each ``("row" or "column", line)``.

    Raises:
        PipelineError: this is no video.
    """
    picture = luma(frames_of(video))
    if reference is not None:
        picture = picture - luma(frames_of(reference)).to(picture.device)
    ratios = {}
    for direction, dim, lines in (("row", 1, borders and borders[0]), ("column", 2, borders and borders[1])):
        changes = picture.diff(dim=dim).abs()
        steps = changes.median(dim=3 - dim).values.median(dim=0).values  # [lines - 1]; entry y - 1 is border y
        for line in range(1, steps.numel() + 1) if lines is None else lines:
            neighbours = [
                steps[other - 1]
                for other in range(line - _NEIGHBOURS, line + _NEIGHBOURS + 1)
                if other != line and 1 <= other <= steps.numel()
            ]
            usual = float(torch.stack(neighbours).median()) if neighbours else 0.0
            ratios[direction, line] = (float(steps[line - 1]) + _VISIBLE_STEP) / (usual + _VISIBLE_STEP)
    return ratios


def _mean_change(frames: torch.Tensor, line: int, dim: int) -> float:
    before, after = (frames.select(dim, at).double() for at in (line - 1, line))
    return (after - before).abs().mean().item()
