"""Both measures of seams agree with their definitions and refuse borders outside a video."""

from __future__ import annotations

import math

import pytest
import torch

from h3opt.errors import PipelineError
from h3opt.metrics.seams import border_step_ratios, seam_visibility


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def _with_seam(step: float) -> torch.Tensor:
    """A video that changes by 1 at every multiple of 16 columns, and by ``1 + step`` at column 64."""
    columns = torch.arange(128)
    picture = (columns // 16).float() + step * (columns >= 64)
    return picture.expand(2, 3, 64, 128).clone()


def test_a_seam_is_as_visible_as_it_is_larger_than_other_borders_of_patches() -> None:
    assert seam_visibility(_with_seam(0.0), [], [64]) == 1
    assert seam_visibility(_with_seam(2.0), [], [64]) == 3
    assert seam_visibility(_with_seam(2.0), [], [32, 64]) == pytest.approx(3)
    assert seam_visibility(_with_seam(2.0).transpose(-1, -2), [64], []) == 3
    assert seam_visibility(_with_seam(2.0).unsqueeze(0), [16], [64]) == 3, "rows are flat, and so is their border"


def test_a_seam_in_a_flat_picture_is_infinitely_visible() -> None:
    flat = torch.zeros(1, 3, 64, 64)
    assert seam_visibility(flat, [], [32]) == 1
    flat[..., 32:] = 1
    assert seam_visibility(flat, [], [32]) == math.inf
    assert seam_visibility(flat, [], [33]) < 1


@pytest.mark.parametrize(
    ("rows", "columns"), [([], []), ([0], []), ([], [128]), ([], [-3]), ([16, 32, 48], [])], ids=str
)
def test_borders_that_are_none_are_refused(rows: list[int], columns: list[int]) -> None:
    with pytest.raises(PipelineError, match="; pass"):
        seam_visibility(_with_seam(0.0), rows, columns)


def test_seams_are_looked_for_in_videos() -> None:
    with pytest.raises(PipelineError, match="must be floating point"):
        seam_visibility(torch.zeros(3, 64, 64), [32], [])


def test_a_step_along_a_border_stands_out():
    video = noise(8, 3, 40, 40) * 0.2
    stepped = video.clone()
    stepped[..., 20:, :] += 0.5
    steps = border_step_ratios(stepped, ([20, 30], [10]))
    assert steps["row", 20] > 3 and steps["row", 30] < 1.5 and steps["column", 10] < 1.5
    against = border_step_ratios(video + 0.01 * (stepped > 0.5), None, video)
    assert set(against) == {(word, line) for word in ("row", "column") for line in range(1, 40)}
    assert border_step_ratios(video, ([], []), video) == {}
