"""The plan says what a decode will do, from shapes alone, and refuses what cannot be done."""

from __future__ import annotations

import json
from typing import Any

import pytest

from h3opt.errors import MemoryBudgetError, PipelineError
from h3opt.pipeline.tiling.plan import TilePlan, memory_bytes, memory_text, plan_decode
from h3opt.pipeline.tiling.strategies import TileOptions, combine_options
from h3opt.reference import CANVASES, full_vae


@pytest.fixture(scope="module")
def released() -> Any:
    return full_vae(device="meta")


def real_plan(vae: Any, canvas: str, **options: Any) -> TilePlan:
    return plan_decode(vae, (1, 24, *CANVASES[canvas].latents), [TileOptions(**options)])


def test_the_plan_of_the_released_decoder_is_that_of_its_documentation(released: Any) -> None:
    plan = real_plan(released, "544x960x124", max_tiles=8, memory_budget=2**33)
    found = json.loads(json.dumps(plan.to_dict()))
    assert (found["chunks"], found["rows"], found["columns"], found["tiles"]) == (7, 3, 5, 105)
    assert found["tile"] == [256, 256] and found["result"] == [124, 544, 960]
    assert found["overlaps"] == {"rows": [112, 112], "columns": [80, 80, 80, 80]}
    assert sum(found["batches"]) == 105 and set(found["batches"]) == {7, 8}
    assert len(real_plan(released, "768x1344x209").tiles) == 336
    lines = str(plan).splitlines()
    assert lines[0] == "decode to 544x960, 124 frames" and "7, 5 frames cross-faded" in lines[1]
    assert lines[2].split(maxsplit=1)[1] == "105: 3 x 5 a chunk, each 256x256"
    assert lines[3].split(maxsplit=1)[1] == "rows 112, 112; columns 80, 80, 80, 80"
    assert lines[-1].endswith("budget 8.00 GiB")


def test_a_plan_of_one_tile_has_no_overlaps(released: Any) -> None:
    assert "overlaps   none" in str(plan_decode(released, (1, 24, 7, 16, 16)))


def test_batches_shrink_with_the_budget_until_one_tile_does_not_fit(released: Any) -> None:
    free = real_plan(released, "544x960x124", max_tiles=8)
    sizes = []
    for tiles in (8, 4, 1):
        plan = real_plan(released, "544x960x124", max_tiles=8, memory_budget=free.peak(tiles))
        assert plan.peak(plan.batch) <= free.peak(tiles)
        sizes.append(plan.batch)
    assert sizes == [8, 4, 1]
    with pytest.raises(MemoryBudgetError, match="too small to decode 544x960, 124 frames") as caught:
        real_plan(released, "544x960x124", max_tiles=8, memory_budget=free.peak(1) - 1)
    least = memory_bytes(str(caught.value).partition("needs ")[2].partition(". Set")[0])
    assert real_plan(released, "544x960x124", memory_budget=least).batch == 1


@pytest.mark.parametrize("overlap", [0, -16, 256, 512])
def test_overlaps_that_cannot_be_laid_out_are_refused(overlap: int) -> None:
    vae = full_vae(device="meta")
    vae.tile_sample_min_overlap_width = overlap
    with pytest.raises(PipelineError, match=f"cannot overlap by {overlap}. Set an overlap"):
        plan_decode(vae, (1, 24, 7, 16, 20))
    plan_decode(vae, (1, 24, 7, 20, 16))  # along the height there is no such overlap


def test_a_later_option_replaces_an_earlier_option_and_leaves_the_others() -> None:
    combined = combine_options([TileOptions(max_tiles=2, memory_budget=7), TileOptions(max_tiles=3), TileOptions()])
    assert combined == TileOptions(max_tiles=3, memory_budget=7)
    assert combine_options([]) == TileOptions()


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("1.5 gib", 3 * 2**29), ("512 MiB", 2**29), ("100", 100), (7, 7), ("64KiB", 2**16)],
)
def test_memory_sizes_are_read(text: Any, size: int) -> None:
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", [0, -1, "", "0GiB", "-2GiB", "2GB", "two", True, 1.5, None, "GiB", "1 2"])
def test_a_memory_size_of_nothing_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="positive number of bytes"):
        memory_bytes(text)


@pytest.mark.parametrize("size", [1, 1023, 2**20 + 1, 123456789, 2**33 - 1])
def test_a_memory_size_in_words_is_never_too_small(size: int) -> None:
    assert memory_bytes(memory_text(size)) >= size
