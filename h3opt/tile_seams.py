"""Steps along the borders of decoder tiles."""

from __future__ import annotations

from typing import Any

import torch

from h3opt.picture import frames_of, luma

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
