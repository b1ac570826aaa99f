"""The borders of tiles come from the plan, for whoever asks and for any choice of tile."""

from __future__ import annotations

from typing import Any

import pytest

from h3opt.pass_api.registry import make_pass
from h3opt.pipeline.tiling.plan import plan_decode, tile_borders
from h3opt.pipeline.tiling.strategies import TileOptions
from h3opt.pipeline.view import PipelineView

HEIGHT, WIDTH = 544, 960


def test_borders_are_those_of_the_decoder(pipe: Any) -> None:
    assert tile_borders(pipe.vae, 64, 96) == ([], [])
    rows, columns = tile_borders(pipe.vae, HEIGHT, WIDTH)
    assert rows == [144, 256, 288, 400] and set(columns) >= {256, 704}


@pytest.mark.parametrize("tile", [None, (288, 272, 32), (192, 160, 128)], ids=["of_the_model", "wider", "overlapping"])
def test_borders_are_those_of_the_plan_for_any_choice_of_tile(pipe: Any, tile: tuple[int, int, int] | None) -> None:
    """Verification asks for borders by the size of a frame, the picture of seams by the plan of a pass."""
    latents = (14, HEIGHT // 16, WIDTH // 16)
    choices = [TileOptions(tile=tile)]
    plan = plan_decode(pipe.vae, (1, 24, *latents), choices)
    borders = tile_borders(pipe.vae, HEIGHT, WIDTH, choices)
    assert borders == plan.borders
    for axis, lines in zip((plan.rows, plan.columns), borders, strict=True):
        starts = axis.offsets
        ends = [start + size for start, size in zip(starts, axis.sizes, strict=True)]
        assert lines == sorted({*starts[1:], *ends[:-1]}), "blending ends where the earlier tile ends"
    if tile is not None:
        chosen = make_pass("tile_geometry", {"tile": "x".join(map(str, tile))}).plan(PipelineView.of(pipe), latents)
        assert borders == chosen.borders != tile_borders(pipe.vae, HEIGHT, WIDTH)
